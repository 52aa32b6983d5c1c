"""Collectives called by the model: each bucket keeps its order relative to them on all ranks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.errors import BackendError
from graphshard.planning.follow_plan import follow_plan
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import COMMUNICATION, COMPUTE, USER
from graphshard.show import Dump
from graphshard.show.metrics import metrics
from graphshard.show.page import graph_data
from graphshard.show.table import table
from graphshard.show.trace import THREADS, trace
from tests.plan.dumps import by_hand
from tests.plan.problems import Line, lines, problem, problems, reduction, user_collective

PARAMS = tuple(PlanParam(i, (), "", 1) for i in range(8))


def _sides(graph: Problem, buckets: tuple[Bucket, ...]) -> list[int]:
    return [sum(u.launch < b.launch for u in graph.user_collectives) for b in buckets]


@given(problems(on_host=False), lines, st.data())
def test_a_rank_with_other_steps_follows_on_the_same_sides(
    graph: Problem, line: Line, data: st.DataObject
) -> None:
    plan = Plan(PARAMS, graph, find_schedule(graph, line, ScheduleLimits()))
    steps = st.integers(0, graph.num_steps - 1)
    num_users = len(graph.user_collectives)
    launches = data.draw(st.sets(steps, min_size=num_users, max_size=num_users))
    users = tuple(map(user_collective, sorted(launches)))
    other = dataclasses.replace(graph, user_collectives=users)
    try:
        followed = follow_plan(other, PARAMS, plan)
    except BackendError:
        assert users != graph.user_collectives
        return  # a transfer would have to cross a user collective
    assert _sides(other, followed) == _sides(graph, plan.buckets)
    assert [b.transfers for b in followed] == [b.transfers for b in plan.buckets]
    own, theirs = (Plan(PARAMS, *each) for each in ((other, followed), (graph, plan.buckets)))
    assert own.collectives_text() == theirs.collectives_text()


def _plan(*user_launches: int, ready: int = 1) -> Plan:
    graph = problem([1.0] * 4, [reduction(0, 8, ready, 4)], user_launches=user_launches)
    (bucket,) = find_schedule(graph, Line(), ScheduleLimits())
    return Plan(PARAMS, graph, (dataclasses.replace(bucket, launch=2),))


def test_launch_moves_to_its_side_of_user_collective() -> None:
    # At a step that begins with a user collective, the bucket is launched first.
    for user, launch in ((1, 2), (2, 2), (3, 2)):
        (bucket,) = follow_plan(_plan(user).problem, PARAMS, _plan(user))
        assert bucket.launch == launch
    (before,) = follow_plan(_plan(1).problem, PARAMS, _plan(2))
    (after,) = follow_plan(_plan(3).problem, PARAMS, _plan(1))
    assert (before.launch, after.launch) == (1, 4)


def test_gradient_ready_on_other_side_is_an_error() -> None:
    error = "cannot be launched before step 2, but must be launched by st"
    with pytest.raises(BackendError, match=error):
        follow_plan(_plan(1, ready=2).problem, PARAMS, _plan(2))


def test_plans_with_different_sides_differ_in_text() -> None:
    lines = _plan(1).collectives_text().splitlines()
    assert lines[1] == "user collective: all_reduce in group t"
    assert _plan(2).collectives_text().splitlines() == [lines[0], lines[2], lines[1]]
    assert _plan(2).collectives_text() == _plan(3).collectives_text()


def test_user_collectives_survive_json() -> None:
    assert Plan.from_json(_plan(1).to_json()) == _plan(1)


def _shown() -> Dump:
    """Return the dump of `by_hand`, with an all-reduce of 23.3 us that is launched at 60 us."""
    plan = by_hand().plan
    graph = dataclasses.replace(plan.problem, user_collectives=(user_collective(1),))
    return dataclasses.replace(by_hand(), plan=dataclasses.replace(plan, problem=graph))


def test_tables_have_a_row_for_user_collectives() -> None:
    rows = [line.split() for line in table(_shown()).splitlines()]
    assert ["user", "all_reduce", "1", "0.000", "0.023", "0.000"] in rows
    assert "+ 0.000 user collectives" in table(_shown())
    assert "user" not in table(by_hand())


def test_exposed_time_includes_waits_for_user_collectives() -> None:
    graph = _shown().plan.problem
    (user,) = graph.user_collectives
    large = dataclasses.replace(user, num_bytes=10_000)
    graph = dataclasses.replace(graph, user_collectives=(large,))
    shown = dataclasses.replace(_shown(), plan=dataclasses.replace(_shown().plan, problem=graph))
    totals, page, found = shown.totals, graph_data(shown, "")["predicted"], metrics([shown])
    assert totals.user_exposed_us > 0
    assert page["total_us"] == pytest.approx(page["compute_us"] + page["exposed_us"])
    exposed_us = totals.total_us - totals.compute_us
    assert found["predicted_exposed_us"] == pytest.approx(exposed_us)
    assert found["predicted_exposure"] == pytest.approx(exposed_us / totals.total_us)


def test_traces_and_pages_have_a_lane_for_user_collectives() -> None:
    (event,) = (e for e in trace(_shown())["traceEvents"] if "user collective)" in e["name"])
    assert event["name"] == "ncclDevKernel_all_reduce(user collective)"
    assert event["tid"] == THREADS[USER]
    assert (event["ts"], event["dur"]) == (60.0, 23.333)
    data = graph_data(_shown(), "")
    assert data["lanes"] == [COMPUTE, COMMUNICATION, USER]
    assert data["user_collectives"] == [
        {
            "op": "all_reduce",
            "bytes": 10,
            "ranks": 2,
            "start_us": 60.0,
            "us": 23.333,
            "exposed_us": 0.0,
        }
    ]
