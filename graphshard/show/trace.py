"""Traces of predicted timelines for ui.perfetto.dev and chrome://tracing, and measured traces.

A predicted trace has one process with the lanes of ``simulate``. Arrows lead from the launch of a
collective to the collective and on to the first use of its result; counters show memory.

    compute        [copy-in]──┐  [step 0: mm   ]         ┌─►[copy-out]─►[step 1: mm_1 ]
    communication             └─►[ncclDevKernel_AllGather]

Kernels have the categories, names and streams that HolisticTraceAnalysis uses to separate
communication from compute (hta/utils/utils.py): its ``get_comm_comp_overlap`` returns the predicted
overlap. Format: "Trace Event Format" by the Chrome team; times in microseconds.

Measured traces come from torch's profiler. They contain the names of the graphs that ran
("Torch-Compiled Region: 0/0"), and the sequence numbers that link backward to forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..kinds import HOST_COPIES, GraphKind, TransferKind
from ..planning.simulate import (
    COLLECTIVE,
    COMMUNICATION,
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    LANES,
    STEP,
    USER,
    Slot,
)
from .dump import Dump, param_name

PREDICTED, MEASURED = "predicted", "measured"
PID = 1 << 30  # process of the predicted events; measured traces never use this number
# Thread ID of each lane in the process, which is also its stream number.
THREADS = {lane: number for number, lane in enumerate(LANES, 1)}
_MAX_BUCKETS = 1 << 20  # per graph; arrow IDs combine the numbers of a run and a bucket

_KERNEL_NAMES = {
    TransferKind.ALL_GATHER: "ncclDevKernel_AllGather",
    TransferKind.REDUCE_SCATTER: "ncclDevKernel_ReduceScatter",
    TransferKind.ALL_REDUCE_SHARDS: "ncclDevKernel_AllReduce_Shards",
    TransferKind.COPY_TO_DEVICE: "Memcpy HtoD (Pinned -> Device)",
    TransferKind.COPY_TO_HOST: "Memcpy DtoH (Device -> Pinned)",
    TransferKind.ALL_REDUCE: "ncclDevKernel_AllReduce",
    TransferKind.ALL_REDUCE_MAX: "ncclDevKernel_AllReduce_Max",
}
_EXCHANGE = "ncclDevKernel_SendRecv"


TraceEvent: TypeAlias = dict[str, Any]  # its phase "ph" determines which keys it has
Trace: TypeAlias = dict[str, Any]  # content of a trace file


class _Span(NamedTuple):
    """Start and end of a drawn slot, in whole nanoseconds, the resolution of viewers."""

    begin_ns: int
    end_ns: int


def trace(dump: Dump) -> Trace:
    """Return the content of a trace file with the timeline of one graph."""
    title = f"{PREDICTED}: {dump.plan.graph} on {dump.hardware.name}"
    return {
        "traceEvents": [*process_events(title), *run_events(dump)],
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": 0},  # HolisticTraceAnalysis requires a rank
    }


def process_events(title: str) -> list[TraceEvent]:
    """Return the events that name the process and its lanes."""
    return [
        _metadata("process_name", 0, name=title),
        _metadata("process_sort_index", 0, sort_index=-1),
        *(_metadata("thread_name", tid, name=lane) for lane, tid in THREADS.items()),
        *(_metadata("thread_sort_index", tid, sort_index=tid) for tid in THREADS.values()),
    ]


def _metadata(name: str, tid: int, /, **args: object) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": PID, "tid": tid, "ts": 0, "args": args}


def run_events(
    dump: Dump, *, start_us: float = 0.0, number: int = 0, streams: bool = True
) -> list[TraceEvent]:
    """Return the events of one run of the graph.

    Args:
        start_us: start of the run in the trace.
        number: number of the run, which makes the IDs of its arrows unique.
        streams: whether slices have streams, so that HolisticTraceAnalysis counts them.
    """
    spans = {slot: _span(slot, start_us) for slot in dump.timeline.slots}
    drawn = {slot: span for slot, span in spans.items() if span.begin_ns < span.end_ns}
    events = [_slice(dump, slot, span, streams) for slot, span in drawn.items()]
    for index in range(len(dump.plan.buckets)):
        events += _arrow(dump, index, drawn, number * _MAX_BUCKETS + index)
    return [*events, *_memory_counters(dump, spans)]


def _span(slot: Slot, start_us: float) -> _Span:
    # Round both ends, instead of start and duration, to keep adjacent slots adjacent.
    return _Span(round((start_us + slot.start_us) * 1e3), round((start_us + slot.end_us) * 1e3))


def _slice(dump: Dump, slot: Slot, span: _Span, streams: bool) -> TraceEvent:
    tid = THREADS[slot.lane]
    stream = {"stream": tid} if streams else {}
    return {
        "ph": "X",
        "cat": "gpu_memcpy" if slot.lane in HOST_COPIES else "kernel",
        "name": _slice_name(dump, slot),
        "pid": PID,
        "tid": tid,
        "ts": span.begin_ns / 1e3,
        "dur": (span.end_ns - span.begin_ns) / 1e3,
        "args": {**stream, **_slice_args(dump, slot)},
    }


def _slice_name(dump: Dump, slot: Slot) -> str:
    if slot.kind == STEP:
        return f"step {dump.step_label(slot.index)}"
    if slot.lane == USER:
        return f"ncclDevKernel_{dump.user_collective(slot).op}(user collective)"
    bucket = dump.plan.buckets[slot.index]
    name = slot.kind
    if slot.kind == COLLECTIVE:
        name = _EXCHANGE if dump.plan.exchanges(bucket) else _KERNEL_NAMES[bucket.kind]
    return f"{name}({dump.bucket_label(bucket)})"


def _slice_args(dump: Dump, slot: Slot) -> dict[str, object]:
    plan = dump.plan  # viewers show these arguments for a selected slice
    if slot.kind == STEP:
        params = [
            transfer.param
            for transfer in plan.problem.transfers
            if transfer.kind == TransferKind.ALL_GATHER and transfer.due == slot.index
        ]
        names = [param_name(plan.params[i]) for i in params if i is not None]
        return {"first used": ", ".join(names)}
    if slot.lane == USER:
        user = dump.user_collective(slot)
        return {"bytes": user.num_bytes, "ranks": user.world}
    bucket = plan.buckets[slot.index]
    return {
        "bucket": slot.index,
        "parameters": ", ".join(dump.param_names(bucket)),
        "bytes": bucket.num_bytes,
        "wire dtype": ", ".join(plan.wire_dtypes(bucket)),
        "ranks": bucket.world,
        "exposed us": round(dump.timeline.exposed_us[slot.index], 3),
        "launched before": dump.step_label(bucket.launch),
        "waited for before": dump.step_label(bucket.wait),
    }


def _arrow(
    dump: Dump, index: int, drawn: Mapping[Slot, _Span], identity: int
) -> Iterator[TraceEvent]:
    """Yield the arrow from a bucket's launch through its collective and wait to its first use."""
    path = [slot for slot in _arrow_path(dump, index, drawn) if slot in drawn]
    if len(path) < 2:
        return
    for slot, phase in zip(path, ["s", *"t" * (len(path) - 2), "f"]):
        span = drawn[slot]
        yield {
            "ph": phase,
            "bp": "e",  # bind the arrow to the enclosing slice
            "cat": "schedule",
            "name": dump.plan.buckets[index].kind,
            "id": identity,
            "pid": PID,
            "tid": THREADS[slot.lane],
            "ts": (span.end_ns - 1 if phase == "s" else span.begin_ns) / 1e3,
        }


def _arrow_path(dump: Dump, index: int, drawn: Mapping[Slot, _Span]) -> list[Slot]:
    bucket, problem = dump.plan.buckets[index], dump.plan.problem
    launched_us = dump.slots[COPY_IN, index].end_us
    # If no copy-in is drawn, the arrow begins at the previous slot; if no copy-out is drawn, the
    # next slot represents the wait.
    before = [slot for slot in drawn if slot.lane == COMPUTE and slot.end_us <= launched_us]
    due = min(problem.transfers[i].due for i in bucket.transfers)
    steps = dict.fromkeys((bucket.wait, due))
    after = [dump.slots[STEP, step] for step in steps if step < problem.num_steps]
    return [*before[-1:], dump.slots[COLLECTIVE, index], dump.slots[COPY_OUT, index], *after]


def _memory_counters(dump: Dump, spans: Mapping[Slot, _Span]) -> Iterator[TraceEvent]:
    timeline = dump.timeline
    for step, sizes in enumerate(zip(timeline.alive_bytes, timeline.in_flight_bytes)):
        ts = spans[dump.slots[STEP, step]].begin_ns / 1e3
        for name, num_bytes in zip(("alive", "in flight"), sizes):
            args = {"bytes": num_bytes}
            yield {"ph": "C", "name": name, "pid": PID, "tid": 0, "ts": ts, "args": args}


# --- measured traces ----------------------------------------------------------------------------

_REGION = "Torch-Compiled Region: "
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
_SEQUENCE = "Sequence number"
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_WAIT, _GLOO = "_c10d_functional::wait_tensor", "gloo:"
_MAX_SPANS = 2000  # per lane of a run; shorter gaps are merged, as they would be invisible
BusyUs: TypeAlias = list[tuple[float, float]]


class GraphRun(NamedTuple):
    """A measured run of the graph of ``dump``."""

    start_us: float  # start of its first GPU kernel or copy, or of the call if it launched none
    us: float  # time until the end of its last GPU kernel or copy, or of the call
    dump: Dump
    # Busy spans of each lane: start relative to ``start_us``, and duration. On a CPU, compute is
    # busy unless it waits for a collective.
    lanes: dict[str, BusyUs]


def measured_runs(trace: Trace, dumps: Sequence[Dump]) -> list[list[GraphRun]]:
    """Return, for each dump, the runs of its graph in a trace of ``profile``."""
    events = [event for event in trace["traceEvents"] if event.get("pid") != PID]
    runs = list(graph_runs(events, dumps))
    return [[run for run in runs if run.dump is dump] for dump in dumps]


def graph_runs(events: Sequence[TraceEvent], dumps: Sequence[Dump]) -> Iterator[GraphRun]:
    """Yield the measured runs of the graphs of ``dumps``, in chronological order."""
    # Later dumps of a graph replace earlier ones.
    dump_of_graph = {(dump.compiled, dump.plan.graph): dump for dump in dumps}
    region_of_thread: dict[int, str] = {}
    region_of_sequence: dict[object, str] = {}
    calls = [event for event in events if event["ph"] == "X" and event.get("cat") == "cpu_op"]
    for call in sorted(calls, key=lambda event: event["ts"]):
        name, graphs = call["name"], list[tuple[str, GraphKind]]()
        if name.startswith(_REGION):
            region = region_of_thread[call["tid"]] = name.removeprefix(_REGION)
            graphs = [(region, GraphKind.FORWARD), (region, GraphKind.INFERENCE)]
        elif name == _FORWARD:
            region_of_sequence[call["args"][_SEQUENCE]] = region_of_thread.get(call["tid"], "")
        elif name == _BACKWARD:
            region = region_of_sequence.get(call["args"][_SEQUENCE], "")
            graphs = [(region, GraphKind.BACKWARD)]
        for graph in graphs:
            if graph in dump_of_graph:
                yield _graph_run(call, events, dump_of_graph[graph])


def _graph_run(call: TraceEvent, events: Sequence[TraceEvent], dump: Dump) -> GraphRun:
    within = [e for e in events if e["ph"] == "X" and 0 <= e["ts"] - call["ts"] <= call["dur"]]
    work = _device_work(call, within, events)
    start_us, end_us = call["ts"], call["ts"] + call["dur"]
    if work:
        start_us = min(event["ts"] for _, event in work)
        end_us = max(event["ts"] + event["dur"] for _, event in work)
        spans = [(lane, event["ts"], event["ts"] + event["dur"]) for lane, event in work]
    else:
        spans = list(_host_work(call, within))
    lanes = {
        lane: _merged(
            sorted((a - start_us, b - start_us) for one, a, b in spans if one == lane),
            gap_us=(end_us - start_us) / _MAX_SPANS,
        )
        for lane in LANES
    }
    return GraphRun(start_us, end_us - start_us, dump, {k: v for k, v in lanes.items() if v})


def _device_work(
    call: TraceEvent, within: Sequence[TraceEvent], events: Sequence[TraceEvent]
) -> list[tuple[str, TraceEvent]]:
    launched = {
        event["args"].get("correlation")
        for event in within
        if event.get("cat") in _LAUNCH_CATEGORIES and event["tid"] == call["tid"]
    }
    return [
        (_device_lane(event["name"]), event)
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy")
        and event["args"].get("correlation") in launched
    ]


def _device_lane(name: str) -> str:
    copies = {"Memcpy HtoD": TransferKind.COPY_TO_DEVICE, "Memcpy DtoH": TransferKind.COPY_TO_HOST}
    found = (lane for prefix, lane in copies.items() if name.startswith(prefix))
    return next(found, COMMUNICATION if name.startswith("nccl") else COMPUTE)


def _host_work(
    call: TraceEvent, within: Sequence[TraceEvent]
) -> Iterator[tuple[str, float, float]]:
    """Yield (lane, start, end) of the work of a call that launched no kernels."""
    free_us = call["ts"]  # end of the last wait
    for event in sorted(within, key=lambda event: event["ts"]):
        if event["name"].startswith(_GLOO):  # runs in its own thread
            yield COMMUNICATION, event["ts"], event["ts"] + event["dur"]
        elif event["name"] == _WAIT and event["tid"] == call["tid"]:
            yield COMPUTE, free_us, event["ts"]
            free_us = event["ts"] + event["dur"]
    yield COMPUTE, free_us, call["ts"] + call["dur"]


def _merged(spans: Sequence[tuple[float, float]], gap_us: float) -> BusyUs:
    """Merge sorted (start, end) spans across gaps up to ``gap_us``; return starts and durations."""
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1] + gap_us:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return [(round(start, 3), round(end - start, 3)) for start, end in merged]


def with_predictions(measured: Trace, dumps: Sequence[Dump]) -> Trace:
    """Return ``measured`` with labeled processes, and with a process of predicted timelines."""
    events = [_with_label(event) for event in measured["traceEvents"]]
    predicted: list[TraceEvent] = []
    free_us = 0.0
    for number, run in enumerate(graph_runs(events, dumps)):
        start_us = max(run.start_us, free_us)
        predicted += run_events(run.dump, start_us=start_us, number=number, streams=False)
        free_us = start_us + run.dump.timeline.total_us
    names = sorted({dump.hardware.name for dump in dumps})
    title = process_events(f"{PREDICTED} on {', '.join(names)}") if predicted else []
    return {**measured, "traceEvents": [*title, *predicted, *events]}


def _with_label(event: TraceEvent) -> TraceEvent:
    if event["ph"] != "M" or event["name"] != "process_name":
        return event
    return {**event, "args": {"name": f"{MEASURED}: {event['args']['name']}"}}
