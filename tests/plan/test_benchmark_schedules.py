"""FSDP2's rule and resized problems: computed by hand for problems of a few steps."""

from __future__ import annotations

import dataclasses
import operator

import pytest

from benchmarks import schedules
from benchmarks.llama import LlamaSizes, trace
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem
from tests.plan.problems import WORLD, gather, problem, reduction


def _plan(graph: Problem, *fqns: str) -> Plan:
    params = tuple(PlanParam(i, (8, 2), "bfloat16", 2, fqn) for i, fqn in enumerate(fqns))
    return Plan(params, graph, ())


def _placed(buckets: list[Bucket]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(bucket.transfers, bucket.launch, bucket.wait) for bucket in buckets]


FQNS = ("head", "blocks.1.w", "blocks.1.v", "blocks.0.w")


def _backward() -> Problem:
    """Return the backward of a head and two blocks; block 1 has two parameters."""
    transfers = [gather(0, 32, 0), gather(1, 32, 1), gather(2, 32, 2), gather(3, 32, 3)]
    transfers += [reduction(i, 32, i + 1, 5) for i in range(4)]
    return problem([100.0] * 5, transfers)


def test_fsdp2_rule_gathers_one_block_early_and_waits_one_block_late() -> None:
    graph = _backward()
    assert _placed(schedules.fsdp2_rule(_plan(graph, *FQNS), graph)) == [
        ((0,), 0, 0),
        ((1, 2), 0, 1),
        ((3,), 1, 3),
        ((4,), 1, 3),
        ((5, 6), 3, 4),
        ((7,), 4, 5),
    ]


def test_at_world_changes_shards_and_padding() -> None:
    graph = problem([1.0], [gather(0, 32, 0), reduction(0, 32, 1, 1)], [100])
    resized = schedules.at_world(_plan(graph, "w"), 3)  # 8 rows of 4 bytes: 3 rows per rank
    assert [(t.num_bytes, t.world) for t in resized.transfers] == [(36, 3), (36, 3)]
    assert resized.fixed_bytes == (100 - 32 // WORLD + 12,)
    assert resized.graph == GraphKind.BACKWARD


def _padding_bytes(one: Problem, other: Problem) -> list[int]:
    """Return, for each step, the difference in padding of the parameters whose last step it is."""
    differ = [0] * one.num_steps
    for ours, theirs in zip(one.transfers, other.transfers, strict=True):
        if ours.kind == TransferKind.ALL_GATHER:
            differ[ours.last] += abs(ours.num_bytes - theirs.num_bytes)
    return differ


def test_at_world_equals_trace_for_that_number_of_ranks() -> None:
    sizes = LlamaSizes(dim=64, layers=1, heads=4, kv_heads=2, hidden=96, recompute=True, vocab=100)
    wide, narrow = trace(sizes, 8, 16), trace(sizes, 6, 16)
    assert [plan.graph for plan in wide] == [GraphKind.FORWARD, GraphKind.BACKWARD]
    for one, other in zip(wide, narrow, strict=True):
        resized, graph = schedules.at_world(one, 6), other.problem
        # Each compilation gives the group and the nodes new names.
        transfers = [
            dataclasses.replace(t, group=one.problem.transfers[0].group) for t in graph.transfers
        ]
        assert resized.transfers == tuple(transfers)
        # Equal except for the padding of parameters freed before their last step ends.
        differ = map(operator.sub, resized.fixed_bytes, graph.fixed_bytes)
        freed = _padding_bytes(one.problem, resized)
        assert all(abs(num_bytes) <= most for num_bytes, most in zip(differ, freed, strict=True))
        assert resized.compute_us == pytest.approx(graph.compute_us)
