from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given

from graphshard.kinds import TransferKind
from graphshard.planning.buckets import bucket_of
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.offload import add_host_copies
from graphshard.planning.plan import Bucket, Problem
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import (
    COLLECTIVE,
    COMMUNICATION,
    COMPUTE,
    STEP,
    USER,
    Lane,
    bucket_cost,
    clock,
    simulate,
)
from tests.plan.dumps import by_hand
from tests.plan.problems import WORLD, Line, gather, lines, problem, problems


def test_simulated_schedule_matches_hand_computation() -> None:
    plan = by_hand().plan
    timeline = simulate(plan.problem, plan.buckets, Line(10.0, 1.0, 0.1))
    assert [s.start_us for s in timeline.slots if s.kind == STEP] == [30.0, 60.0, 104.0]
    assert [s.start_us for s in timeline.slots if s.kind == COLLECTIVE] == [0.0, 30.0, 104.0]
    assert timeline.exposed_us == (30.0, 10.0, 40.0)
    assert timeline.total_us == 154.0
    assert timeline.busy_us(COMPUTE) == 74.0 and timeline.busy_us(COMMUNICATION) == 110.0
    # Before step 2 the gradients are packed.
    assert timeline.alive_bytes == (100 + 20 + 20, 200 + 20, 100 + 20 + 40 + 40)
    assert timeline.in_flight_bytes == (20, 0, 40)
    assert timeline.peak_bytes == 220


def test_additional_buffer_in_collective_takes_time() -> None:
    graph = problem([10.0], [gather(i, 8, 0) for i in range(3)])
    bucket = Bucket(TransferKind.ALL_GATHER, ((0, 1), (2,)), 24, "g", WORLD, 0, 0)
    line = Line(10.0, 1.0, 0.5)
    # The packed buffer: copy-in of 16 / 4 bytes, copy-out of 16 bytes.
    assert bucket_cost(graph, bucket, line)[:3] == (20.0 + 2.0, 34.0, 8.0)
    assert clock(graph, [bucket], line).total_us == 20.0 + 2.0 + 34.0 + 8.0 + 10.0
    alone = dataclasses.replace(bucket, buffers=((2,),))
    assert bucket_cost(graph, alone, line)[:3] == (0.0, 34.0, 0.0)


@given(problems(), lines)
def test_clock_agrees_with_simulate(graph: Problem, line: Line) -> None:
    limits = ScheduleLimits()
    buckets = add_host_copies(graph, find_schedule(graph, line, limits), line, limits)
    timeline = simulate(graph, buckets, line)
    times = clock(graph, buckets, line)
    assert times.total_us == pytest.approx(timeline.total_us)
    assert times.exposed_us == pytest.approx(timeline.exposed_us)
    steps = [slot.start_us for slot in timeline.slots if slot.kind == STEP]
    assert times.step_us[:-1] == pytest.approx(steps)


@given(problems(), lines)
def test_every_timeline_is_consistent(graph: Problem, line: Line) -> None:
    buckets = find_schedule(graph, line, ScheduleLimits())
    timeline = simulate(graph, buckets, line)
    for lane in (COMPUTE, COMMUNICATION, USER):
        of_lane = [slot for slot in timeline.slots if slot.lane == lane]
        for one, other in itertools.pairwise(of_lane):
            assert other.start_us >= one.end_us
    # The compute lane is busy or waits for exposed transfers or user collectives.
    waits_us = sum(timeline.exposed_us) + sum(timeline.user_exposed_us)
    busy = timeline.busy_us(COMPUTE) + waits_us
    last = max((s.end_us for s in timeline.slots if s.lane == COMPUTE), default=0.0)
    assert busy == pytest.approx(last)
    assert timeline.total_us >= max(last, timeline.busy_us(COMMUNICATION)) - 1e-6


def test_work_starts_once_it_is_ready_and_its_lane_is_free() -> None:
    lane = Lane()
    assert lane.run(10.0, ready_us=5.0) == 15.0
    assert lane.start_us(0.0) == 15.0 and lane.start_us(20.0) == 20.0
    assert lane.run(10.0) == 25.0
    assert lane.run(1.0, ready_us=40.0) == lane.free_us == 41.0


def test_lane_can_run_backward_in_time() -> None:
    lane = Lane(-math.inf)
    assert -lane.run(10.0, -100.0) == 90.0
    assert -lane.run(10.0, -95.0) == 80.0


def _slots(stride: int) -> list[tuple[str, float, float]]:
    """Return lane, start and end of a gather, a user collective and a gather: 30 us each."""
    graph = problem([10.0, 10.0, 10.0], [gather(0, 20, 2), gather(1, 20, 2)], user_launches=[1])
    user = dataclasses.replace(graph.user_collectives[0], num_bytes=20, stride=stride)
    graph = dataclasses.replace(graph, user_collectives=(user,))
    buckets = [bucket_of(graph, ((i,),), launch=2 * i, wait=2) for i in range(2)]
    timeline = simulate(graph, buckets, Nodes(10.0, 1.0))
    assert clock(graph, buckets, Nodes(10.0, 1.0)).total_us == timeline.total_us
    return [(s.lane, s.start_us, s.end_us) for s in timeline.slots if s.kind == COLLECTIVE]


@dataclasses.dataclass(frozen=True)
class Nodes(Line):
    """A `Line` on which groups of stride 1 are within a node."""

    def crosses_nodes(self, world: int, stride: int = 1) -> bool:
        return stride > 1


def test_user_collective_waits_for_ours_on_same_interconnect() -> None:
    gathered = (COMMUNICATION, 0.0, 30.0)
    assert _slots(1) == [gathered, (USER, 30.0, 60.0), (COMMUNICATION, 60.0, 90.0)]
    assert _slots(2) == [gathered, (USER, 10.0, 40.0), (COMMUNICATION, 30.0, 60.0)]
