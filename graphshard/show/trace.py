"""The predicted timeline as a trace: ui.perfetto.dev and chrome://tracing open it.

One process with the lanes of ``simulate``. Arrows lead from where a collective is launched to
the collective, and on to the first thing that needs its result; counters tell what is in memory.

    compute        [copy-in]──┐  [step 0: mm   ]         ┌─►[copy-out]─►[step 1: mm_1 ]
    communication             └─►[ncclDevKernel_AllGather]

Kernels have a category, names and streams by which HolisticTraceAnalysis tells communication from
compute (hta/utils/utils.py), so that its ``get_comm_comp_overlap`` gives the predicted overlap. The
format: "Trace Event Format", by the Chrome team; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kinds import HOST_COPIES, TransferKind
from ..planning import simulate
from ..planning.simulate import COLLECTIVE, COMPUTE, COPY_IN, COPY_OUT, STEP, Slot
from .dump import Dump, param_name

Event = dict[str, Any]
Span = tuple[int, int]

PREDICTED = "predicted"
PID = 1 << 30  # no process of a measured trace has it
LANES = {lane: number for number, lane in enumerate(simulate.LANES, 1)}
"""Threads of the process; streams likewise."""
_KERNELS = {
    TransferKind.ALL_GATHER: "ncclDevKernel_AllGather",
    TransferKind.REDUCE_SCATTER: "ncclDevKernel_ReduceScatter",
    TransferKind.ALL_REDUCE_SHARDS: "ncclDevKernel_AllReduce_Shards",
    TransferKind.COPY_TO_DEVICE: "Memcpy HtoD (Pinned -> Device)",
    TransferKind.COPY_TO_HOST: "Memcpy DtoH (Device -> Pinned)",
    TransferKind.ALL_REDUCE: "ncclDevKernel_AllReduce",
    TransferKind.ALL_REDUCE_MAX: "ncclDevKernel_AllReduce_Max",
}


def trace(dump: Dump) -> dict[str, Any]:
    """The contents of a trace file with the timeline of one graph."""
    title = f"{PREDICTED}: {dump.plan.graph} on {dump.hardware.name}"
    return {
        "traceEvents": [*process(title), *run(dump)],
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": 0},  # HolisticTraceAnalysis asks for one
    }


def process(title: str) -> list[Event]:
    """What names the process and its lanes."""
    return [
        _metadata("process_name", 0, name=title),
        _metadata("process_sort_index", 0, sort_index=-1),
        *(_metadata("thread_name", tid, name=lane) for lane, tid in LANES.items()),
        *(_metadata("thread_sort_index", tid, sort_index=tid) for tid in LANES.values()),
    ]


def _metadata(what: str, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": PID, "tid": tid, "ts": 0, "args": args}


def run(dump: Dump, *, start_us: float = 0.0, number: int = 0, streams: bool = True) -> list[Event]:
    """One run of the graph.

    Args:
        start_us: when it begins.
        number: of the run in its file; arrows of different runs must not be mixed up.
        streams: kernels say which stream they are on.
    """
    spans = {slot: _span(slot, start_us) for slot in dump.timeline.slots}
    seen = {slot: span for slot, span in spans.items() if span[0] < span[1]}
    events = [_slice(dump, slot, span, streams) for slot, span in seen.items()]
    for index in range(len(dump.plan.buckets)):
        events += _arrow(dump, index, seen, number << 20 | index)
    return events + _counters(dump, spans)


def _span(slot: Slot, start_us: float) -> Span:
    """In nanoseconds. Viewers count in whole ones; what ends when another thing begins still does."""
    return round((start_us + slot.start_us) * 1e3), round((start_us + slot.end_us) * 1e3)


def _slice(dump: Dump, slot: Slot, span: Span, streams: bool) -> Event:
    tid = LANES[slot.lane]
    stream = {"stream": tid} if streams else {}
    return {
        "ph": "X",
        "cat": "gpu_memcpy" if slot.lane in HOST_COPIES else "kernel",
        "name": _name(dump, slot),
        "pid": PID,
        "tid": tid,
        "ts": span[0] / 1e3,
        "dur": (span[1] - span[0]) / 1e3,
        "args": {**stream, **_details(dump, slot)},
    }


def _name(dump: Dump, slot: Slot) -> str:
    if slot.kind == STEP:
        return f"step {dump.step(slot.index)}"
    bucket = dump.plan.buckets[slot.index]
    what = _KERNELS[bucket.kind] if slot.kind == COLLECTIVE else slot.kind
    return f"{what}({dump.range_of(bucket)})"


def _details(dump: Dump, slot: Slot) -> dict[str, Any]:
    """What a viewer shows of a slice that was clicked on."""
    plan = dump.plan
    if slot.kind == STEP:
        used = [
            t
            for t in plan.problem.transfers
            if t.kind == TransferKind.ALL_GATHER and t.due == slot.index
        ]
        names = (param_name(plan.params[t.param]) for t in used if t.param is not None)
        return {"first used": ", ".join(names)}
    bucket = plan.buckets[slot.index]
    return {
        "bucket": slot.index,
        "parameters": ", ".join(dump.names(bucket)),
        "bytes": bucket.num_bytes,
        "ranks": bucket.world,
        "exposed us": round(dump.timeline.exposed_us[slot.index], 3),
        "launched before": dump.step(bucket.launch),
        "waited for before": dump.step(bucket.wait),
    }


def _arrow(dump: Dump, index: int, seen: Mapping[Slot, Span], identity: int) -> list[Event]:
    """From the launch of a bucket to its collective, to the wait for it and to its first use."""
    path = [slot for slot in _path(dump, index, seen) if slot in seen]
    events = []
    for slot, phase in zip(path, ["s", *"t" * (len(path) - 2), "f"] if len(path) > 1 else []):
        begin, end = seen[slot]
        events.append(
            {
                "ph": phase,
                "bp": "e",  # the arrow is tied to the slice around this time
                "cat": "schedule",
                "name": dump.plan.buckets[index].kind,
                "id": identity,
                "pid": PID,
                "tid": LANES[slot.lane],
                "ts": (end - 1 if phase == "s" else begin) / 1e3,
            }
        )
    return events


def _path(dump: Dump, index: int, seen: Mapping[Slot, Span]) -> list[Slot]:
    """What an arrow leads through. Where no copy is seen, a wait is what comes behind it."""
    bucket, problem = dump.plan.buckets[index], dump.plan.problem
    launched_us = dump.slots[COPY_IN, index].end_us
    ran = [slot for slot in seen if slot.lane == COMPUTE and slot.end_us <= launched_us]
    due = min(problem.transfers[i].due for i in bucket.transfers)
    steps = dict.fromkeys((bucket.wait, due))
    used = [dump.slots[STEP, step] for step in steps if step < problem.num_steps]
    return [*ran[-1:], dump.slots[COLLECTIVE, index], dump.slots[COPY_OUT, index], *used]


def _counters(dump: Dump, spans: Mapping[Slot, Span]) -> list[Event]:
    """Memory in use, at the start of every step."""
    timeline = dump.timeline
    events = []
    for step, sizes in enumerate(zip(timeline.alive_bytes, timeline.in_flight_bytes)):
        ts = spans[dump.slots[STEP, step]][0] / 1e3
        for name, num_bytes in zip(("alive", "in flight"), sizes):
            args = {"bytes": num_bytes}
            events.append({"ph": "C", "name": name, "pid": PID, "tid": 0, "ts": ts, "args": args})
    return events
