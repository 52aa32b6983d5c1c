"""Find the runs of compiled graphs in a profile.

A profile names the graphs that ran: "Torch-Compiled Region: 0/0", and the sequence number that
links autograd's backward to its forward.
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
    """A measured run of the graph of ``dump``.

    Attributes:
        start_us: start of its first GPU kernel; start of the call if it launched none.
        us: time until its last GPU kernel ended; until the call ended if it launched none.
        dump: dump of the graph.
    """

    start_us: float
    us: float
    dump: Dump


def measured_us(trace: Trace, dumps: Sequence[Dump]) -> list[list[float]]:
    """Return, for each dump, how long its graph's runs took in a trace of ``measured.profile``."""
    events = [event for event in trace["traceEvents"] if event.get("pid") != PID]
    durations: dict[int, list[float]] = {id(dump): [] for dump in dumps}
    for run in graph_runs(events, dumps):
        durations[id(run.dump)].append(run.us)
    return [durations[id(dump)] for dump in dumps]


def graph_runs(events: Sequence[TraceEvent], dumps: Sequence[Dump]) -> Iterator[GraphRun]:
    """Yield the measured runs of graphs in order of time, each with the latest dump of its graph.

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
    """Return start and end of the GPU kernels that ``call`` launched, or of the call itself."""
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
