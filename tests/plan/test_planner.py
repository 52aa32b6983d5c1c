"""Schedules: what holds of every one, what the search finds, and how far from the best it may be."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphshard.plan import ALL_GATHER, Bucket, Plan, Problem
from graphshard.planner import LAUNCH_PRICE_US, BudgetError, Limits, schedule, smallest_peak
from graphshard.simulate import alive_bytes, clock, in_flight_bytes, simulate
from tests.plan.problems import Line, gather, lines, problem, problems, reduction


def _assert_sound(asked: Problem, buckets: tuple[Bucket, ...]) -> None:
    assert sorted(i for b in buckets for i in b.transfers) == list(range(len(asked.transfers)))
    assert list(buckets) == sorted(buckets, key=lambda bucket: bucket.launch)
    for bucket in buckets:
        transfers = [asked.transfers[i] for i in bucket.transfers]
        assert {(t.kind, t.group) for t in transfers} == {(bucket.kind, bucket.group)}
        assert bucket.num_bytes == sum(t.num_bytes for t in transfers)
        assert max(t.ready for t in transfers) <= bucket.launch <= bucket.wait
        assert bucket.wait <= min(t.due for t in transfers) <= asked.num_steps


@given(problems(), lines)
def test_every_transfer_is_in_one_bucket_at_a_time_that_is_right(
    asked: Problem, line: Line
) -> None:
    _assert_sound(asked, schedule(asked, line, Limits()))


@given(problems(), lines)
def test_the_same_problem_has_the_same_schedule(asked: Problem, line: Line) -> None:
    assert schedule(asked, line, Limits()) == schedule(asked, line, Limits())


@given(problems(), lines)
def test_no_schedule_beats_the_lower_bound(asked: Problem, line: Line) -> None:
    timeline = simulate(asked, schedule(asked, line, Limits()), line)
    wire_us = sum(t.num_bytes for t in asked.transfers) * line.us_per_byte
    assert timeline.total_us >= max(sum(asked.compute_us), wire_us) - 1e-6


@given(problems(), lines, st.integers(0, 300))
def test_a_budget_is_kept_or_its_smallest_is_named(asked: Problem, line: Line, spare: int) -> None:
    needed = smallest_peak(asked)
    buckets = schedule(asked, line, Limits(peak=needed + spare))
    _assert_sound(asked, buckets)
    assert max(alive_bytes(asked, buckets)) <= needed + spare
    assume(needed > 0)
    with pytest.raises(BudgetError, match="memory_budget_gb") as caught:
        schedule(asked, line, Limits(peak=needed - 1))
    assert caught.value.needed == needed


@given(problems(), lines, st.integers(1, 300), st.integers(1, 300))
def test_caps_are_kept(asked: Problem, line: Line, cap: int, in_flight: int) -> None:
    buckets = schedule(asked, line, Limits(cap=cap, in_flight=in_flight))
    _assert_sound(asked, buckets)
    assert all(bucket.num_bytes <= cap or len(bucket.transfers) == 1 for bucket in buckets)
    gathers = [bucket for bucket in buckets if bucket.kind == ALL_GATHER]
    for step, alive in enumerate(in_flight_bytes(asked, gathers)):
        # A gather that is due right away is never held back.
        ahead = sum(b.num_bytes for b in gathers if b.launch <= step < b.wait)
        assert alive == ahead <= in_flight


def test_a_gather_hides_behind_the_compute_before_it() -> None:
    asked = problem([100.0] * 4, [gather(i, 50, i) for i in range(4)])
    buckets = schedule(asked, Line(1.0, 1.0), Limits())
    timeline = simulate(asked, buckets, Line(1.0, 1.0))
    # The first has nothing to hide behind; one collective less may cost LAUNCH_PRICE_US.
    assert 51.0 <= sum(timeline.exposed_us) <= 51.0 + LAUNCH_PRICE_US


def test_latency_makes_buckets_large_and_its_absence_small() -> None:
    asked = problem([100.0] * 16, [gather(i, 50, i) for i in range(16)])
    slow = schedule(asked, Line(latency_us=400.0, us_per_byte=0.1), Limits())
    assert len(slow) <= 4


def test_a_reduction_does_not_delay_a_gather() -> None:
    """The gather that step 2 needs is on the wire before the reduction that step 0 sets free."""
    asked = problem([100.0, 100.0, 100.0], [reduction(0, 150, 1, 3), gather(1, 90, 2)])
    buckets = schedule(asked, Line(1.0, 1.0), Limits())
    exposed_us = clock(asked, buckets, Line(1.0, 1.0)).exposed_us
    (at,) = (i for i, bucket in enumerate(buckets) if bucket.kind == ALL_GATHER)
    assert exposed_us[at] == 0.0


@given(problems(), lines)
def test_near_the_best_of_all_schedules(asked: Problem, line: Line) -> None:
    """Small ones, against every way to cut and to launch."""
    assume(len(asked.transfers) <= 4 and asked.num_steps <= 4)
    total_us = clock(asked, schedule(asked, line, Limits()), line).total_us
    best_us = min((clock(asked, b, line).total_us for b in _all_schedules(asked)), default=0.0)
    assert total_us <= 1.1 * best_us + LAUNCH_PRICE_US * len(asked.transfers) + 1e-6


def _all_schedules(asked: Problem) -> list[list[Bucket]]:
    """Every order of launch of single transfers and of all of a kind together."""
    found = []
    singles = [((i,), t) for i, t in enumerate(asked.transfers)]
    choices = [
        [
            Bucket(t.kind, (members,), t.num_bytes, t.group, t.world, launch, t.due)
            for launch in range(t.ready, t.due + 1)
        ]
        for members, t in singles
    ]
    for placed in itertools.product(*choices):
        for order in itertools.permutations(placed):
            if all(a.launch <= b.launch for a, b in itertools.pairwise(order)):
                found.append(list(order))
    return found


_SCRIPT = """
import json, sys
from graphshard.plan import Plan
from graphshard.planner import Limits, schedule
from tests.plan.problems import Line
plan = Plan.from_json(sys.stdin.read())
print(schedule(plan.problem, Line(), Limits()))
"""


def test_another_process_decides_the_same() -> None:
    transfers = [gather(i, 30 + i, i // 2) for i in range(12)]
    transfers += [reduction(i, 40 + i, i // 2 + 1, 6) for i in range(12)]
    asked = problem([50.0] * 6, transfers)
    text = Plan((), asked, ()).to_json()
    assert json.loads(text)["problem"]["steps"]
    said = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] == f"{schedule(asked, Line(), Limits())}\n"
