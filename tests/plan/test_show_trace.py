from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given

from graphshard.kinds import TransferKind
from graphshard.planning.simulate import COMMUNICATION, COMPUTE
from graphshard.show import Dump, trace
from graphshard.show.trace import PID, THREADS
from tests.plan.dumps import bucket, by_hand, dump, dumps
from tests.plan.problems import gather, problem

Event = dict[str, Any]
Interval = tuple[float, float]
NS = 1e-3  # microseconds; rounding error of a slice


def _events(shown: Dump, phases: str) -> list[Event]:
    events = json.loads(json.dumps(trace(shown)))["traceEvents"]
    return [event for event in events if event["ph"] in phases]


def _lane(shown: Dump, lane: str) -> list[tuple[str, float, float]]:
    events = [e for e in _events(shown, "X") if e["tid"] == THREADS[lane]]
    return [(e["name"], e["ts"], e["dur"]) for e in events]


def test_lanes_of_plan_match_hand_computation() -> None:
    pair = "norm.weight .. norm.bias (2)"
    assert _lane(by_hand(), COMPUTE) == [
        ("step 0 step0", 30.0, 20.0),
        ("step 1 step1", 60.0, 40.0),
        (f"copy-in({pair})", 100.0, 4.0),
        ("step 2 step2", 104.0, 10.0),
    ]
    assert _lane(by_hand(), COMMUNICATION) == [
        ("ncclDevKernel_AllGather(up.weight)", 0.0, 30.0),
        ("ncclDevKernel_AllGather(down.weight)", 30.0, 30.0),
        (f"ncclDevKernel_ReduceScatter({pair})", 104.0, 50.0),
    ]


def test_arrows_lead_from_launch_to_first_use() -> None:
    arrows = defaultdict(list)
    for event in _events(by_hand(), "stf"):
        arrows[event["id"]].append((event["ph"], _slice_at(by_hand(), event)["name"]))
    assert dict(arrows) == {
        0: [("s", "ncclDevKernel_AllGather(up.weight)"), ("f", "step 0 step0")],
        1: [("s", "ncclDevKernel_AllGather(down.weight)"), ("f", "step 1 step1")],
        2: [
            ("s", "copy-in(norm.weight .. norm.bias (2))"),
            ("f", "ncclDevKernel_ReduceScatter(norm.weight .. norm.bias (2))"),
        ],
    }


def test_arrow_passes_through_wait() -> None:
    asked = problem([20.0, 5.0, 5.0], [gather(0, 20, 2), gather(1, 20, 2)])
    packed = dump(asked, [bucket(TransferKind.ALL_GATHER, [(0, 1)], 40, (1, 2))])
    alone = dump(
        problem([20.0, 5.0, 5.0], [gather(0, 40, 2)]),
        [bucket(TransferKind.ALL_GATHER, [(0,)], 40, (1, 1))],
    )
    kernel, both = "ncclDevKernel_AllGather", "(p0 .. p1 (2))"
    for shown, names in (
        (packed, [f"copy-in{both}", f"{kernel}{both}", f"copy-out{both}", "step 2 step2"]),
        (alone, ["step 0 step0", f"{kernel}(p0)", "step 1 step1", "step 2 step2"]),
    ):
        arrow = _events(shown, "stf")
        assert [_slice_at(shown, event)["name"] for event in arrow] == names
        assert [event["ph"] for event in arrow] == ["s", "t", "t", "f"]


def _slice_at(shown: Dump, arrow: Event) -> Event:
    (found,) = (
        event
        for event in _events(shown, "X")
        if (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
        and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"] - NS / 2
    )
    return found


@given(dumps())
def test_every_arrow_has_both_ends(shown: Dump) -> None:
    phases = defaultdict(list)
    times = defaultdict(list)
    for event in _events(shown, "stf"):
        phases[event["id"]].append(event["ph"])
        times[event["id"]].append(event["ts"])
        assert event["bp"] == "e" and event["cat"] == "schedule"
        _slice_at(shown, event)
    for identity, found in phases.items():
        assert found == ["s", *["t"] * (len(found) - 2), "f"]
        assert times[identity] == sorted(times[identity])


@given(dumps())
def test_slices_of_a_lane_do_not_overlap(shown: Dump) -> None:
    for lane in THREADS:
        slices = [(round(ts * 1e3), round(dur * 1e3)) for _, ts, dur in _lane(shown, lane)]
        for (ts, dur), (next_ts, _) in itertools.pairwise(slices):
            assert dur > 0 and ts + dur <= next_ts


@given(dumps())
def test_the_overlap_in_the_trace_is_the_predicted_one(shown: Dump) -> None:
    totals = shown.totals
    lane_us = totals.communication_us + totals.user_collectives_us
    exposed_us = totals.exposed_us + totals.user_exposed_us
    hidden_us, found_us = _overlap(_events(shown, "X"))
    slack = NS * len(shown.timeline.slots)
    assert found_us == pytest.approx(lane_us, abs=slack)
    assert hidden_us == pytest.approx(lane_us - exposed_us, abs=2 * slack)


def _overlap(events: list[Event]) -> tuple[float, float]:
    """Return the time of overlap of communication and compute, and the time of communication.

    Follows HolisticTraceAnalysis (hta/analyzers/communication_analysis.py, hta/utils/utils.py):
    events on a stream are communication if they are called ``nccl...Kernel``, otherwise compute.
    """
    kernels = [e for e in events if e["cat"] == "kernel" and e["args"].get("stream", -1) != -1]
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    for event in kernels:
        communicates = re.match("^nccl.*Kernel", event["name"]) is not None
        spans[communicates].append((event["ts"], event["ts"] + event["dur"]))
    wire, compute = _merged(spans[True]), _merged(spans[False])
    together = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in wire for b in compute)
    return together, sum(end - begin for begin, end in wire)


def _merged(spans: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def test_memory_is_counted_at_every_step() -> None:
    counted = [(e["name"], e["ts"], e["args"]["bytes"]) for e in _events(by_hand(), "C")]
    assert counted == [
        ("alive", 30.0, 140),
        ("in flight", 30.0, 20),
        ("alive", 60.0, 220),
        ("in flight", 60.0, 0),
        ("alive", 104.0, 200),
        ("in flight", 104.0, 40),
    ]


def test_process_and_threads_are_labelled() -> None:
    names = {
        (e["name"], e["tid"]): e["args"]["name"]
        for e in _events(by_hand(), "M")
        if "name" in e["args"]
    }
    assert names["process_name", 0] == "predicted: backward on wire"
    assert {names["thread_name", tid] for tid in THREADS.values()} == set(THREADS)
    assert all(event["pid"] == PID for event in _events(by_hand(), "XstfCM"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TransferKind.ALL_GATHER, "AllGather"),
        (TransferKind.REDUCE_SCATTER, "ReduceScatter"),
        (TransferKind.ALL_REDUCE, "AllReduce"),
    ],
)
def test_collectives_have_names_of_nccl_kernels(kind: str, name: str) -> None:
    shown = dump(problem([5.0], [gather(0, 20, 0)]), [bucket(kind, [(0,)], 20, (0, 0))])
    assert [event[0] for event in _lane(shown, COMMUNICATION)] == [f"ncclDevKernel_{name}(p0)"]
