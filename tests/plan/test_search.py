from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphshard.errors import BackendError
from graphshard.kinds import TransferKind
from graphshard.planning.bucketing import packed_bucket
from graphshard.planning.buckets import replica_bucket
from graphshard.planning.follow_plan import follow_plan
from graphshard.planning.live_bytes import alive_bytes, in_flight_bytes, smallest_peak
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem
from graphshard.planning.search import BudgetError, find_schedule, schedule_without_overlap
from graphshard.planning.simulate import COLLECTIVE, simulate
from tests.plan.problems import WORLD, Line, gather, lines, problem, problems, reduction


def _assert_sound(graph: Problem, buckets: tuple[Bucket, ...]) -> None:
    first = [b for b in buckets if b.kind != TransferKind.ALL_REDUCE_SHARDS]
    assert sorted(i for b in first for i in b.transfers) == list(range(len(graph.transfers)))
    assert list(buckets) == sorted(buckets, key=lambda bucket: bucket.launch)
    averaged = {
        bucket.buffers: bucket
        for bucket in buckets
        if bucket.kind == TransferKind.ALL_REDUCE_SHARDS
    }
    assert len(first) + len(averaged) == len(buckets)
    for bucket in first:
        expected, average = replica_bucket(bucket, graph.transfers), averaged.get(bucket.buffers)
        assert (expected is None) == (average is None)
        if expected and average:
            assert dataclasses.replace(average, wait=expected.wait) == expected
            assert average.num_bytes == sum(
                graph.transfers[i].num_bytes // WORLD for i in average.transfers
            )
            assert average.launch <= average.wait <= graph.num_steps
        transfers = [graph.transfers[i] for i in bucket.transfers]
        assert {(t.kind, t.group) for t in transfers} == {(bucket.kind, bucket.group)}
        assert bucket.num_bytes == sum(t.num_bytes for t in transfers)
        assert max(t.ready for t in transfers) <= bucket.launch <= bucket.wait
        assert bucket.wait <= min(t.due for t in transfers) <= graph.num_steps


@given(problems(), lines)
def test_every_transfer_is_in_one_bucket_at_a_valid_time(graph: Problem, line: Line) -> None:
    _assert_sound(graph, find_schedule(graph, line, ScheduleLimits()))
    _assert_sound(graph, schedule_without_overlap(graph))


@pytest.mark.parametrize("line", [Line(latency_us=1e4), Line(latency_us=0.0, buffer_cost_us=0.0)])
def test_a_gather_ready_after_another_is_due_has_its_own_bucket(line: Line) -> None:
    # As for an fp8 weight whose scale is computed late.
    early, late = gather(0, 50, 1), gather(1, 50, 3, ready=2)
    for graph in (problem([9.0] * 4, [early, late]), problem([9.0] * 4, [late, early])):
        for buckets in (
            find_schedule(graph, line, ScheduleLimits()),
            schedule_without_overlap(graph),
        ):
            _assert_sound(graph, buckets)
            assert len(buckets) == 2 and simulate(graph, buckets, line).total_us > 0


@given(problems(), lines)
def test_the_search_is_deterministic(graph: Problem, line: Line) -> None:
    assert find_schedule(graph, line, ScheduleLimits()) == find_schedule(
        graph, line, ScheduleLimits()
    )


@given(problems(), lines)
def test_no_schedule_beats_the_lower_bound(graph: Problem, line: Line) -> None:
    timeline = simulate(graph, find_schedule(graph, line, ScheduleLimits()), line)
    shards = [t.num_bytes // WORLD for t in graph.transfers if t.replicas]
    lane_us = (sum(t.num_bytes for t in graph.transfers) + sum(shards)) * line.us_per_byte
    assert timeline.total_us >= max(sum(graph.compute_us), lane_us) - 1e-6


@given(problems(), lines, st.integers(0, 300))
def test_a_budget_is_kept_or_the_error_names_the_smallest_one(
    graph: Problem, line: Line, spare: int
) -> None:
    needed = smallest_peak(graph)
    buckets = find_schedule(graph, line, ScheduleLimits(peak=needed + spare))
    _assert_sound(graph, buckets)
    assert max(alive_bytes(graph, buckets)) <= needed + spare
    assume(needed > 0)
    with pytest.raises(BudgetError, match="memory_budget_gb") as caught:
        find_schedule(graph, line, ScheduleLimits(peak=needed - 1))
    assert caught.value.needed == needed


@given(problems(), lines, st.integers(1, 300), st.integers(1, 300))
def test_caps_of_buckets_and_bytes_in_flight_are_kept(
    graph: Problem, line: Line, cap: int, in_flight: int
) -> None:
    buckets = find_schedule(graph, line, ScheduleLimits(cap=cap, in_flight=in_flight))
    _assert_sound(graph, buckets)
    assert all(bucket.num_bytes <= cap or len(bucket.transfers) == 1 for bucket in buckets)
    gathers = [bucket for bucket in buckets if bucket.kind == TransferKind.ALL_GATHER]
    for step, alive in enumerate(in_flight_bytes(graph, gathers)):
        # Gathers due at their launch are not counted, as the cap never delays them.
        ahead = sum(b.num_bytes for b in gathers if b.launch <= step < b.wait)
        assert alive == ahead <= in_flight


def test_averages_over_replicas_are_in_flight_with_reductions() -> None:
    graph = problem(
        [50.0] * 4, [reduction(0, 80, 1, 4, num_replicas=2), reduction(1, 80, 2, 4, num_replicas=2)]
    )
    most = 80 + 80 // WORLD - 1
    buckets = find_schedule(graph, Line(), ScheduleLimits(cap=80, in_flight=most))
    assert max(in_flight_bytes(graph, buckets)) <= most


def _follow(problem: Problem, plan: Plan, num_others: int = 0) -> tuple[Bucket, ...]:
    """Follow `plan` in a graph with `num_others` additional parameters, which shift indices."""
    numbers = sorted({t.param for t in plan.problem.transfers if t.param is not None})
    params = [PlanParam(i, (), "", 1, "") for i in range(max([0, *numbers]) + 1)]
    plan = dataclasses.replace(plan, params=tuple(params))
    others = [PlanParam(-1 - i, (), "", 1, "") for i in range(num_others)]
    moved = [
        t if t.param is None else dataclasses.replace(t, param=t.param + num_others)
        for t in problem.transfers
    ]
    problem = dataclasses.replace(problem, transfers=tuple(moved))
    return follow_plan(problem, [*others, *plan.params], plan)


@given(problems(), lines, st.data())
def test_a_rank_with_other_compute_times_can_follow(
    graph: Problem, line: Line, data: st.DataObject
) -> None:
    # On its own, that rank would choose a different schedule.
    buckets = find_schedule(graph, line, ScheduleLimits())
    times = st.lists(st.floats(0, 200), min_size=graph.num_steps, max_size=graph.num_steps)
    other = dataclasses.replace(graph, compute_us=tuple(data.draw(times)))
    followed = _follow(other, Plan((), graph, buckets), data.draw(st.integers(0, 3)))
    _assert_sound(other, followed)
    assert [b.transfers for b in followed] == [b.transfers for b in buckets]


@given(problems(), lines, st.data())
def test_a_rank_whose_gradients_are_ready_later_can_follow(
    graph: Problem, line: Line, data: st.DataObject
) -> None:
    buckets = find_schedule(graph, line, ScheduleLimits())
    transfers = [
        t
        if t.kind == TransferKind.ALL_GATHER
        else dataclasses.replace(t, ready=data.draw(st.integers(t.ready, graph.num_steps)))
        for t in graph.transfers
    ]
    other = dataclasses.replace(graph, transfers=tuple(transfers))
    try:
        followed = _follow(other, Plan((), graph, buckets))
    except BackendError:
        return  # a gather comes after a reduction that is ready too late
    _assert_sound(other, followed)


def test_rank_with_a_late_gather_cannot_follow() -> None:
    graph = problem([100.0] * 3, [gather(0, 40, 1), gather(1, 40, 2)])
    plan = Plan((), graph, find_schedule(graph, Line(1.0, 0.01), ScheduleLimits()))
    early = dataclasses.replace(graph.transfers[1], ready=2, due=1)
    with pytest.raises(BackendError, match="cannot follow the first rank's plan"):
        _follow(dataclasses.replace(graph, transfers=(graph.transfers[0], early)), plan)


def test_averages_over_replicas_are_hidden() -> None:
    graph = problem([100.0] * 6, [reduction(i, 40, i + 1, 6, 2) for i in range(5)], [10_000] * 6)
    buckets = find_schedule(graph, Line(1.0, 1.0, issue_us=0.0), ScheduleLimits())
    timeline = simulate(graph, buckets, Line(1.0, 1.0))
    averages = [
        i for i, bucket in enumerate(buckets) if bucket.kind == TransferKind.ALL_REDUCE_SHARDS
    ]
    assert len(averages) > 1
    assert sum(timeline.exposed_us[i] for i in averages[:-1]) == 0.0


def test_gather_is_hidden_by_compute_before_it() -> None:
    graph = problem([100.0] * 4, [gather(i, 50, i) for i in range(4)])
    buckets = find_schedule(graph, Line(1.0, 1.0), ScheduleLimits())
    timeline = simulate(graph, buckets, Line(1.0, 1.0))
    # The first gather is exposed; saving a collective is worth exposing up to 30 us more.
    assert 51.0 <= sum(timeline.exposed_us) <= 51.0 + 30.0


def test_high_latency_makes_buckets_large() -> None:
    graph = problem([100.0] * 16, [gather(i, 50, i) for i in range(16)])
    slow = find_schedule(graph, Line(latency_us=400.0, us_per_byte=0.1), ScheduleLimits())
    assert len(slow) <= 4


def test_first_gather_and_last_reduction_are_small() -> None:
    # Transfers in between share buckets, because each launch has a price.
    graph = problem(
        [1000.0] * 12,
        [gather(i, 100, i) for i in range(12)] + [reduction(i, 100, i + 1, 12) for i in range(12)],
        [100_000] * 12,
    )
    buckets = find_schedule(graph, Line(1.0, 1.0), ScheduleLimits())
    timeline = simulate(graph, buckets, Line(1.0, 1.0))
    assert sum(timeline.exposed_us) == pytest.approx(2 * 101.0)
    assert len(buckets) < len(graph.transfers)


def test_slow_wire_is_always_busy() -> None:
    # No gather can be hidden, so there are few buckets, without gaps between them.
    graph = problem([100.0] * 16, [gather(i, 400, i) for i in range(16)], [100_000] * 16)
    line = Line(latency_us=1000.0, us_per_byte=1.0)
    buckets = find_schedule(graph, line, ScheduleLimits())
    timeline = simulate(graph, buckets, line)
    assert len(buckets) <= 4
    wire = [slot for slot in timeline.slots if slot.kind == COLLECTIVE]
    assert all(one.end_us == other.start_us for one, other in itertools.pairwise(wire))


def test_memory_grows_by_few_buckets_without_budget() -> None:
    # One bucket would save 19 launches, but its memory costs more than that.
    graph = problem([3000.0] * 20, [gather(i, 1000, i) for i in range(20)], [10_000] * 20)
    line = Line(latency_us=100.0, us_per_byte=1.0)
    modest = find_schedule(graph, line, ScheduleLimits())
    assert max(alive_bytes(graph, modest)) <= smallest_peak(graph) + 2 * 1000
    (all_at_once,) = find_schedule(graph, Line(latency_us=50_000.0), ScheduleLimits(peak=60_000))
    assert len(all_at_once.transfers) == 20


def test_reduction_used_in_graph_has_its_own_bucket() -> None:
    early = dataclasses.replace(reduction(0, 10, 1, 4), due=2)
    graph = problem([10.0] * 4, [early, *(reduction(i, 10, i, 4) for i in range(1, 5))])
    buckets = find_schedule(graph, Line(latency_us=1000.0), ScheduleLimits())
    _assert_sound(graph, buckets)
    assert (0,) in {bucket.transfers for bucket in buckets}


def test_transfers_share_a_bucket_across_one_of_another_kind() -> None:
    # Gradients of replicated and of sharded parameters alternate.
    reduced = [reduction(i, 10, i + 1, 8) for i in range(8)]
    all_reduced = {"kind": TransferKind.ALL_REDUCE, "shard_bytes": 10}
    mixed = [dataclasses.replace(t, **all_reduced) if t.param % 2 else t for t in reduced]
    graph = problem([10.0] * 8, mixed)
    buckets = find_schedule(graph, Line(latency_us=1000.0), ScheduleLimits())
    _assert_sound(graph, buckets)
    assert len(buckets) == 2


def test_tensor_is_packed_if_its_own_buffer_costs_more() -> None:
    sizes = [10, 10, 40, 40]
    graph = problem([10.0], [gather(i, size, 0) for i, size in enumerate(sizes)])
    (bucket,) = find_schedule(
        graph, Line(latency_us=1000.0, copy_us_per_byte=1.0), ScheduleLimits()
    )
    assert bucket.buffers == ((0, 1), (2,), (3,))


class _Kernels(Line):
    def copy_us(self, num_bytes: int) -> float:
        return 5.0


@pytest.mark.parametrize(("num_gradients", "num_buffers"), [(3, 1), (5, 2)])
def test_mixed_gradients_have_two_buffers_if_kernels_cost_more(
    num_gradients: int, num_buffers: int
) -> None:
    # One kernel packs a buffer of equal dtypes; in a mixed one, each gradient takes its own.
    reduced = [
        dataclasses.replace(reduction(i, 10, 0, 1), casts=i > 0) for i in range(num_gradients)
    ]
    graph, cost_model = problem([10.0], reduced), _Kernels(buffer_cost_us=20.0)
    bucket = packed_bucket(graph, range(num_gradients), cost_model, launch=1, wait=1)
    assert len(bucket.buffers) == num_buffers


_SCRIPT = """
import json, sys
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Plan
from graphshard.planning.search import find_schedule
from tests.plan.problems import Line
plan = Plan.from_json(sys.stdin.read())
print(find_schedule(plan.problem, Line(), ScheduleLimits()))
"""


def test_another_process_finds_same_schedule() -> None:
    transfers = [gather(i, 30 + i, i // 2) for i in range(12)]
    transfers += [reduction(i, 40 + i, i // 2 + 1, 6) for i in range(12)]
    graph = problem([50.0] * 6, transfers)
    text = Plan((), graph, ()).to_json()
    assert json.loads(text)["problem"]["steps"]
    printed = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": "."},  # this process has a random seed
    ).stdout
    assert printed == f"{find_schedule(graph, Line(), ScheduleLimits())}\n"
