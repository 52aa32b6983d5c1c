from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.kinds import TransferKind
from graphshard.planning.bucketing import Queue
from graphshard.planning.live_bytes import (
    LiveBytes,
    Span,
    alive_by_point,
    alive_bytes,
    fixed_by_point,
    launches,
    least_by_point,
    max_by_step,
    running,
    sum_spans,
    waits,
    with_fixed_bytes,
)
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.placement import BucketSizes, Placer, Splits
from graphshard.planning.plan import Bucket, Problem, Transfer
from graphshard.planning.search import find_schedule
from tests.plan.problems import WORLD, Line, gather, lines, problem, problems, reduction

SIZE = 8 * WORLD


def _alive(transfers: list[Transfer], *buckets: Bucket) -> list[int]:
    return alive_by_point(problem([1.0] * 3, transfers), buckets)


def _bucket(kind: TransferKind, *buffers: tuple[int, ...], at: tuple[int, int]) -> Bucket:
    num_bytes = SIZE * sum(map(len, buffers))
    return Bucket(kind, buffers, num_bytes, "g", WORLD, *at)


def test_parameter_in_its_own_buffer_is_received_in_place() -> None:
    one = gather(0, SIZE, 1)
    alive = _alive([one], _bucket(TransferKind.ALL_GATHER, (0,), at=(0, 1)))
    assert alive == [SIZE] * 6 + [0] * 5  # from the launch before step 0 to the end of step 1
    cast = dataclasses.replace(one, casts=True, copied_in=True)
    packed = SIZE // WORLD
    alive = _alive([cast], _bucket(TransferKind.ALL_GATHER, (0,), at=(0, 1)))
    assert alive == [SIZE + packed] * 4 + [SIZE] * 2 + [0] * 5


def test_copy_out_holds_parameters_of_shared_buffer_twice() -> None:
    transfers = [gather(0, SIZE, 1), gather(1, SIZE, 1, 2)]
    alive = _alive(transfers, _bucket(TransferKind.ALL_GATHER, (0, 1), at=(0, 1)))
    received, packed = 2 * SIZE, 2 * SIZE // WORLD
    flying = [received + packed] * 4
    assert alive == [*flying, 2 * received, received, *[SIZE] * 3, 0, 0]
    assert alive_bytes(problem([1.0] * 3, transfers), []) == [0, 0, 0]


def test_copy_in_holds_gradients_twice() -> None:
    transfers = [reduction(0, SIZE, 1, 3), reduction(1, SIZE, 2, 3)]
    alive = _alive(transfers, _bucket(TransferKind.REDUCE_SCATTER, (0, 1), at=(2, 3)))
    shards = 2 * SIZE // WORLD
    ready = [0, 0, 0, SIZE, SIZE, SIZE]  # the first gradient, complete before step 1
    sent = 2 * SIZE
    assert alive == [*ready, 2 * sent, *[sent + shards] * 3, shards]


@pytest.mark.parametrize(
    ("changes", "at_launch", "sent"),
    [
        pytest.param({}, SIZE + SIZE // WORLD, SIZE, id="unchanged"),
        pytest.param(
            {"copied_in": True, "grad_bytes": SIZE // 2}, SIZE // 2 + SIZE, SIZE, id="cast"
        ),
        pytest.param({"copied_in": True, "grad_bytes": SIZE - 4}, 2 * SIZE - 4, SIZE, id="padded"),
        pytest.param({"copied_in": True}, 2 * SIZE, SIZE, id="transposed"),
    ],
)
def test_single_gradient_is_packed_if_cast_padded_or_transposed(
    changes: dict[str, Any], at_launch: int, sent: int
) -> None:
    one = dataclasses.replace(reduction(0, SIZE, 1, 3), **changes)
    alive = _alive([one], _bucket(TransferKind.REDUCE_SCATTER, (0,), at=(1, 2)))
    assert alive[launches(1)] == at_launch
    assert alive[waits(1)] == alive[launches(2)] == sent + SIZE // WORLD
    assert alive[waits(2)] == alive[-1] == SIZE // WORLD


def test_cast_holds_reduced_shards_twice() -> None:
    one = dataclasses.replace(reduction(0, SIZE, 1, 3), shard_bytes=SIZE // WORLD // 2)
    alive = _alive([one], _bucket(TransferKind.REDUCE_SCATTER, (0,), at=(1, 2)))
    assert alive[waits(2)] == SIZE // WORLD + one.shard_bytes
    assert alive[running(2)] == one.shard_bytes


def test_all_reduces_are_computed_in_place() -> None:
    one = reduction(0, SIZE, 1, 3, num_replicas=2)
    shards = _bucket(TransferKind.REDUCE_SCATTER, (0,), at=(1, 2))
    average = dataclasses.replace(
        shards, kind=TransferKind.ALL_REDUCE_SHARDS, num_bytes=SIZE // WORLD, launch=2, wait=3
    )
    assert _alive([one], shards, average) == _alive(
        [dataclasses.replace(one, replicas="", num_replicas=1)], shards
    )
    whole = dataclasses.replace(one, kind=TransferKind.ALL_REDUCE, shard_bytes=SIZE, replicas="")
    alive = _alive([whole], _bucket(TransferKind.ALL_REDUCE, (0,), at=(1, 2)))
    assert alive == [0, 0, 0, *[SIZE] * 8]


def test_bytes_of_step_are_maximum_over_its_points() -> None:
    between = [7, 8, 1]
    graph = problem([1.0] * 2, [], [5, 9], between)
    assert fixed_by_point(graph) == [7, 7, 5, 8, 8, 9, 1, 1]
    assert max_by_step(fixed_by_point(graph)) == alive_bytes(graph, []) == [7, 9]
    doubled = with_fixed_bytes(graph, [2 * n for n in fixed_by_point(graph)])
    assert doubled.fixed_bytes == (10, 18) and doubled.fixed_boundary_bytes == (14, 16, 2)


@given(problems(), lines)
def test_the_placer_counts_like_alive_by_point(graph: Problem, line: Line) -> None:
    kinds = [t.kind == TransferKind.ALL_GATHER for t in graph.transfers]
    gathers = sorted(
        (i for i, is_gather in enumerate(kinds) if is_gather), key=lambda i: graph.transfers[i].due
    )
    reductions = [i for i, is_gather in enumerate(kinds) if not is_gather]
    reductions.sort(key=lambda i: -graph.transfers[i].ready)
    sizes = BucketSizes(60, 60, 100)
    queues = [Queue(graph, line, None, order) for order in (gathers, reductions)]
    placer = Placer(graph, line, ScheduleLimits(peak=max(least_by_point(graph)) + 50), 50)
    schedule = placer.place(Splits(*(queue.split(60) for queue in queues)), sizes)
    assert schedule.score.peak_bytes == max(alive_by_point(graph, schedule.buckets()))


def test_budget_includes_averages_over_replicas() -> None:
    # If the wait came before the last step, the shards would add to that step's ten bytes.
    shards = reduction(0, 100, 1, 3, num_replicas=2, host=True)
    graph = problem([100.0] * 3, [shards], [0, 0, 10])
    budget = max(least_by_point(graph))
    assert (
        max(alive_bytes(graph, find_schedule(graph, Line(), ScheduleLimits(peak=budget)))) <= budget
    )


NUM_POINTS = 6
_points = st.integers(0, NUM_POINTS)
_spans = st.lists(st.builds(Span, begin=_points, end=_points, num_bytes=st.integers(0, 100)))


@given(_spans)
def test_all_sums_of_spans_agree(spans: list[Span]) -> None:
    expected = [
        sum(span.num_bytes for span in spans if span.begin <= point < span.end)
        for point in range(NUM_POINTS)
    ]
    assert sum_spans(spans, NUM_POINTS) == expected
    live = LiveBytes([0] * NUM_POINTS)
    for span in spans:
        live.add(span)
    assert live.by_point == expected
    for span in spans:
        live.remove(span)
    assert live.by_point == [0] * NUM_POINTS


def test_has_room_checks_only_points_of_span() -> None:
    live = LiveBytes([10, 50, 10])
    assert live.has_room(Span(0, 1, 40), budget=50)
    assert not live.has_room(Span(0, 2, 40), budget=50)
    assert live.has_room(Span(1, 1, 40), budget=50)
    assert live.exceeds(49, Span(0, 2, 0)) and not live.exceeds(50, Span(0, 2, 0))
