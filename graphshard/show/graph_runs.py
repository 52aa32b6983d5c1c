"""The runs of graphs that a profile has.

A profile says which graphs ran ("Torch-Compiled Region: 0/0", and the sequence number that links
autograd's backward to it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..kinds import GraphKind
from .dump import Dump
from .trace import TraceEvent

_REGION = "Torch-Compiled Region: "
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
_SEQUENCE = "Sequence number"
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


class GraphRun(NamedTuple):
    start_us: float
    dump: Dump


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
                yield GraphRun(_start_us(call, events), dump_of_graph[graph])


def _start_us(call: TraceEvent, events: Sequence[TraceEvent]) -> float:
    """Return when the first kernel that ``call`` launched on a GPU began, or else the call."""
    end_us = call["ts"] + call["dur"]
    launched = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in _LAUNCH_CATEGORIES
        and event["tid"] == call["tid"]
        and call["ts"] <= event["ts"] <= end_us
    }
    kernels = (event for event in events if event.get("cat") == "kernel")
    starts_us = [k["ts"] for k in kernels if k["args"].get("correlation") in launched]
    return float(min(starts_us, default=call["ts"]))
