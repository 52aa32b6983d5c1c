"""A run under torch's profiler, with what was predicted of its graphs beside it.

    with graphshard.show.profile("dump/step.trace.json"):  # dump: the backend's folder
        loss = compiled(batch)
        loss.backward()

The profile says which graphs ran ("Torch-Compiled Region: 0/0", and the sequence number that links
autograd's backward to it). The predicted timeline of each graph begins when its run was measured to
begin.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from ..kinds import GraphKind
from .dump import Dump
from .dump_folder import dump_paths
from .trace import PREDICTED, Trace, TraceEvent, process_events, run_events

MEASURED = "measured"
_REGION = "Torch-Compiled Region: "
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
_SEQUENCE = "Sequence number"
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


@contextlib.contextmanager
def profile(path: str | Path, dump: str | Path | None = None) -> Iterator[torch.profiler.profile]:
    """Profile a block on CPU and GPU, and write a trace of it, measured and predicted.

    Every rank may enter it; the first rank writes. HolisticTraceAnalysis sees what was measured.

    Args:
        path: of the trace, ``.json``; its folder exists.
        dump: the folder that the backend was given as ``dump``; None: the folder of ``path``.

    Raises:
        ValueError: a folder does not exist.
    """
    path = Path(path)
    folder = path.parent if dump is None else Path(dump)
    for name, needed in (("path", path.parent), ("dump", folder)):
        if not needed.is_dir():
            raise ValueError(f"{name}: there is no folder {str(needed)!r}")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler
    if not dist.is_initialized() or dist.get_rank() == 0:
        dumps = [Dump.load(dump_path) for dump_path in dump_paths(folder)]
        path.write_text(json.dumps(with_predictions(_measured_trace(profiler), dumps)))


def _measured_trace(profiler: torch.profiler.profile) -> Trace:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "measured.json")
        profiler.export_chrome_trace(str(path))
        trace: Trace = json.loads(path.read_text())
    return trace


def with_predictions(measured: Trace, dumps: Sequence[Dump]) -> Trace:
    """Return ``measured`` with a process for what was predicted of each run of a graph."""
    events = [_with_label(event) for event in measured["traceEvents"]]
    predicted: list[TraceEvent] = []
    free_us = 0.0
    for number, run in enumerate(_graph_runs(events, dumps)):
        start_us = max(run.start_us, free_us)
        predicted += run_events(run.dump, start_us=start_us, number=number, streams=False)
        free_us = start_us + run.dump.timeline.total_us
    names = sorted({dump.hardware.name for dump in dumps})
    title = process_events(f"{PREDICTED} on {', '.join(names)}") if predicted else []
    return {**measured, "traceEvents": [*title, *predicted, *events]}


def _with_label(event: TraceEvent) -> TraceEvent:
    """Return ``event``; if it names a process, the name says that the process was measured."""
    if event["ph"] != "M" or event["name"] != "process_name":
        return event
    return {**event, "args": {"name": f"{MEASURED}: {event['args']['name']}"}}


class _GraphRun(NamedTuple):
    start_us: float
    dump: Dump


def _graph_runs(events: Sequence[TraceEvent], dumps: Sequence[Dump]) -> Iterator[_GraphRun]:
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
                yield _GraphRun(_start_us(call, events), dump_of_graph[graph])


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
