"""Waits of reductions depend on bytes and launch order; schedules are robust to other speeds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given

from benchmarks import robustness
from benchmarks.llama import LlamaSizes, trace
from benchmarks.schedules import at_world
from graphshard.cost.devices import HARDWARE
from graphshard.kinds import TransferKind
from graphshard.planning.buckets import next_in_chain
from graphshard.planning.live_bytes import Footprint, in_flight_bytes, num_points
from graphshard.planning.memory_budget import ScheduleLimits, Sent, place_waits
from graphshard.planning.plan import Bucket, Plan, Problem, UserCollective
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import simulate
from tests.plan.problems import Line, lines, problem, problems, reduction

T = TypeVar("T")

STEPS = 6
GRADIENT = Footprint(in_flight_bytes=8, at_launch=2, at_wait=-8)


def _sent(*steps: int, due: int = STEPS) -> list[Sent]:
    return [Sent(step, due, GRADIENT) for step in steps]


def _waits(
    sent: list[Sent], max_alive: float = math.inf, max_in_flight: float = math.inf
) -> object:
    alive = [10] * num_points(STEPS)
    return place_waits(sent, alive, max_alive, [1] * STEPS, max_in_flight)


def test_reductions_are_waited_for_at_end_if_memory_allows() -> None:
    assert _waits(_sent(1, 2, 3)) == [STEPS] * 3


@pytest.mark.parametrize(
    ("max_alive", "expected"), [(10, [1, 2, 4]), (18, [2, 4, 6]), (26, [4, 6, 6]), (34, [6, 6, 6])]
)
def test_oldest_reduction_is_waited_for_first_if_memory_is_short(
    max_alive: int, expected: list[int]
) -> None:
    assert _waits(_sent(1, 2, 4), max_alive) == expected


def test_limit_of_bytes_in_flight_includes_gathers() -> None:
    assert _waits(_sent(1, 2, 4), max_in_flight=17) == [4, 6, 6]
    assert _waits(_sent(1, 2, 4), max_in_flight=16) == [2, 4, 6]


def test_reduction_is_waited_for_where_it_is_due() -> None:
    early = Sent(2, 3, GRADIENT)
    assert _waits([*_sent(1), early, *_sent(4)]) == [6, 3, 6]
    assert _waits([*_sent(1), early, *_sent(4)], max_alive=18) == [2, 3, 6]


def test_copies_of_sent_data_count_as_in_flight() -> None:
    # If the process group copies its input, half as many bytes may be in flight.
    graph = problem([100.0] * 9, [reduction(i, 1000, i + 1, 9) for i in range(8)])
    copying = dataclasses.replace(graph, copies_sent=True)
    line = Line(latency_us=0.0, buffer_cost_us=0.0, issue_us=0.0)
    once, twice = (
        max(in_flight_bytes(each, find_schedule(each, line, ScheduleLimits())))
        for each in (graph, copying)
    )
    assert 0 < twice <= once / 2


@given(problems(), lines)
def test_waits_planned_for_fast_links_suit_slow_ones(graph: Problem, line: Line) -> None:
    # Only schedules with the same buckets and launches are compared.
    # Compute waits for user collectives: an earlier wait may cost time at one speed only.
    # Compute is long enough to hide transfers: memory is priced as a fraction of the total time.
    compute_us = tuple(us + 10_000 for us in graph.compute_us)
    graph = dataclasses.replace(graph, user_collectives=(), compute_us=compute_us)
    slow = Line(line.latency_us, 2 * line.us_per_byte, line.copy_us_per_byte)
    one, other = (find_schedule(graph, each, ScheduleLimits()) for each in (line, slow))
    placed = [[(b.buffers, b.launch) for b in buckets] for buckets in (one, other)]
    if placed[0] == placed[1]:
        fast, best = (simulate(graph, buckets, slow).total_us for buckets in (one, other))
        assert fast <= 1.001 * best


def test_averages_begin_no_later_than_next_reduction() -> None:
    # An average over replicas is launched at the wait for its reduce-scatter.
    transfers = [reduction(i, 32, i + 1, 5, num_replicas=2) for i in range(4)]
    graph = problem([100.0] * 5, transfers)
    buckets = find_schedule(graph, Line(latency_us=0.0, buffer_cost_us=0.0), ScheduleLimits())
    reduced = [b for b in buckets if b.kind == TransferKind.REDUCE_SCATTER]
    assert len(reduced) > 1
    for bucket, after in itertools.pairwise(reduced):
        assert bucket.wait <= after.launch
    averages = {buckets[i]: buckets[j] for i, j in next_in_chain(buckets).items()}
    assert all(average.launch == bucket.wait for bucket, average in averages.items())
    assert all(average.wait == graph.num_steps for average in averages.values())


def _with_user_collectives(graph: Problem, num_bytes: int) -> Problem:
    """Insert an all-reduce over 2 ranks before every third step, which waits for it."""
    added = range(1, graph.num_steps, 3)

    def moved(step: int) -> int:  # for steps before which something is ready
        return step + bisect_left(added, step)

    def due(step: int) -> int:
        return step + bisect_right(added, step)

    def filled(values: Sequence[T], value: T | None = None) -> tuple[T, ...]:
        pairs = (((values[i] if value is None else value), v) for i, v in enumerate(values))
        parts = ((new, v) if i in added else (v,) for i, (new, v) in enumerate(pairs))
        return tuple(itertools.chain.from_iterable(parts))

    kind = TransferKind.ALL_REDUCE
    return dataclasses.replace(
        graph,
        steps=filled(graph.steps),
        compute_us=filled(graph.compute_us, 0.0),
        fixed_bytes=filled(graph.fixed_bytes),
        fixed_boundary_bytes=filled(graph.fixed_boundary_bytes),
        transfers=tuple(
            dataclasses.replace(t, ready=moved(t.ready), due=due(t.due), last=due(t.last))
            for t in graph.transfers
        ),
        user_collectives=tuple(
            UserCollective(kind, kind, num_bytes, "tp", 2, step + i, step + i + 1)
            for i, step in enumerate(added)
        ),
    )


@functools.cache
def _plans() -> list[Plan]:
    return trace(LlamaSizes(1024, 4, 8, 8, 4096, recompute=False, vocab=8192))


@pytest.mark.parametrize("link", robustness.LINKS)
def test_schedules_around_user_collectives_suit_other_speeds(link: float) -> None:
    # Scenarios include links of half the speed, and kernels that take 20 % longer.
    plans = _plans()
    graphs = [_with_user_collectives(at_world(plan, 4), 4 << 20) for plan in plans]
    hardware = robustness.slowed(HARDWARE["H100"], robustness.Scenario(link, 1.0, 1.0))
    ours = robustness.plan_for(graphs, hardware)
    found = robustness.ratios(plans, graphs, ours, hardware, exact=False)
    assert max(found.rule) <= 1.0
    # A bucket is launched just before a user collective only if it is due there.
    for graph, buckets in zip(graphs, ours, strict=True):
        users = {user.launch for user in graph.user_collectives}
        assert len(users) > 4
        assert not any(b.launch in users and b.launch < b.wait for b in buckets)


@pytest.mark.parametrize("link", robustness.LINKS)
@pytest.mark.parametrize("gpus", [8, 64])
def test_no_scenario_is_slower_than_fsdp2(gpus: int, link: float) -> None:
    plans = _plans()
    graphs = [at_world(plan, gpus) for plan in plans]
    hardware = robustness.slowed(HARDWARE["H100"], robustness.Scenario(link, 1.0, 1.0))
    ours = robustness.plan_for(graphs, hardware)
    found = robustness.ratios(plans, graphs, ours, hardware, exact=False)
    assert max(found.rule) <= 1.0
    theirs: list[list[Bucket]] = [robustness.uncopied(p, g) for p, g in zip(plans, graphs)]
    assert robustness.peak_bytes(graphs, ours) <= 1.02 * robustness.peak_bytes(graphs, theirs)
