"""`for_strategy` adapts a traced step to HSDP, or returns None if that needs a new trace."""

from __future__ import annotations

import dataclasses

from graphshard.forecast.derive import for_strategy
from graphshard.forecast.recipe import Recipe

from .test_trace import trace_stack


def test_adapted_step_equals_step_traced_for_mesh() -> None:
    hsdp = Recipe("hsdp:4")
    traced = trace_stack(1, hsdp, 8)
    made = for_strategy(trace_stack(1, Recipe(), 8), hsdp, 8)
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
    hsdp = Recipe("hsdp:4", dtype="fp8")
    traced = trace_stack(1, hsdp, 8)
    made = for_strategy(trace_stack(1, Recipe(dtype="fp8"), 8), hsdp, 8)
    assert made is not None
    ours, theirs = (step.graphs[0].problem.transfers for step in (made, traced))
    assert [(t.kind, t.num_bytes, t.world, t.stride) for t in ours] == [
        (t.kind, t.num_bytes, t.world, t.stride) for t in theirs
    ]


def test_steps_with_padded_rows_must_be_traced() -> None:
    assert for_strategy(trace_stack(1, Recipe(), 10), Recipe("hsdp:5"), 10) is None
