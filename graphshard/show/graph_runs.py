"""The runs of graphs that a profile has.

A profile says which graphs ran ("Torch-Compiled Region: 0/0", and the sequence number that links
autograd's backward to it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..kinds import GraphKind
from .dump import Dump
from .trace import PID, Trace, TraceEvent

_REGION = "Torch-Compiled Region: "
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
_SEQUENCE = "Sequence number"
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


class GraphRun(NamedTuple):
    """A run of the graph of ``dump``, as it was measured.

    Attributes:
        start_us: when its first kernel on a GPU began, or else its call.
        us: until its last kernel on a GPU ended, or else its call.
    """

    start_us: float
    us: float
    dump: Dump


def measured_us(trace: Trace, dumps: Sequence[Dump]) -> list[list[float]]:
    """Return by dump how long each run of its graph took in a trace of ``measured.profile``."""
    events = [event for event in trace["traceEvents"] if event.get("pid") != PID]
    durations: dict[int, list[float]] = {id(dump): [] for dump in dumps}
    for run in graph_runs(events, dumps):
        durations[id(run.dump)].append(run.us)
    return [durations[id(dump)] for dump in dumps]


def graph_runs(events: Sequence[TraceEvent], dumps: Sequence[Dump]) -> Iterator[GraphRun]:
    """Yield the runs of graphs that were measured, in order of time, with each one's latest dump.

    Graphs without a dump are left out.
    """
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
                start_us, end_us = _span_us(call, events)
                yield GraphRun(start_us, end_us - start_us, dump_of_graph[graph])


def _span_us(call: TraceEvent, events: Sequence[TraceEvent]) -> tuple[float, float]:
    """Return begin and end of the kernels that ``call`` launched on a GPU, or else of the call."""
    start_us, end_us = call["ts"], call["ts"] + call["dur"]
    launched = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in _LAUNCH_CATEGORIES
        and event["tid"] == call["tid"]
        and start_us <= event["ts"] <= end_us
    }
    kernels = [
        event
        for event in events
        if event.get("cat") == "kernel" and event["args"].get("correlation") in launched
    ]
    return (
        min((kernel["ts"] for kernel in kernels), default=start_us),
        max((kernel["ts"] + kernel["dur"] for kernel in kernels), default=end_us),
    )
