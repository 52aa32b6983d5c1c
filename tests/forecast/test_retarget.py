"""`on_mesh` adapts a traced step to another mesh, or returns None if that needs a new trace."""

from __future__ import annotations

import dataclasses

import pytest

from graphshard.fake_mesh import Ranks
from graphshard.forecast.derive import on_mesh
from graphshard.forecast.recipe import Recipe

from .test_trace import trace_stack


@pytest.mark.parametrize("ranks", [Ranks(2, 4), Ranks(1, 4)])
def test_adapted_step_equals_step_traced_for_mesh(ranks: Ranks) -> None:
    sharded = trace_stack(1, Recipe(), 8)
    strategy = "hsdp:4" if ranks.replicas > 1 else "zero3"
    traced = trace_stack(1, Recipe(strategy), ranks.replicas * ranks.shards)
    made = on_mesh(sharded, 8, ranks)
    assert made is not None and made.held == traced.held
    for ours, theirs in zip(made.graphs, traced.graphs, strict=True):
        assert ours.params == theirs.params and ours.input_bytes == theirs.input_bytes
        assert ours.problem.fixed_bytes == theirs.problem.fixed_bytes
        assert ours.problem.fixed_boundary_bytes == theirs.problem.fixed_boundary_bytes
        assert ours.problem.compute_us == theirs.problem.compute_us
        for mine, other in zip(ours.problem.transfers, theirs.problem.transfers, strict=True):
            names = {"group": other.group, "replicas": other.replicas}
            assert dataclasses.replace(mine, **names) == other
            assert bool(mine.replicas) == bool(other.replicas)


def test_fp8_scales_are_reduced_over_shard_group() -> None:
    recipe = Recipe(dtype="fp8")
    made = on_mesh(trace_stack(1, recipe, 8), 8, Ranks(2, 4))
    traced = trace_stack(1, Recipe("hsdp:4", dtype="fp8"), 8)
    assert made is not None
    ours, theirs = (step.graphs[0].problem.transfers for step in (made, traced))
    assert [(t.kind, t.num_bytes, t.world, t.stride) for t in ours] == [
        (t.kind, t.num_bytes, t.world, t.stride) for t in theirs
    ]


def test_steps_with_padded_rows_must_be_traced() -> None:
    assert on_mesh(trace_stack(1, Recipe(), 8), 8, Ranks(1, 5)) is None
