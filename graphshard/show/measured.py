"""A run under torch's profiler, with what was predicted of its graphs beside it.

    with graphshard.show.profile("dump/step.trace.json"):  # dump: the backend's folder
        loss = compiled(batch)
        loss.backward()

The predicted timeline of each graph begins when its run was measured to begin (``graph_runs``).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from .dump import Dump
from .dump_folder import dump_paths, write_page
from .graph_runs import graph_runs
from .trace import MEASURED, PREDICTED, Trace, TraceEvent, process_events, run_events


@contextlib.contextmanager
def profile(path: str | Path, dump: str | Path | None = None) -> Iterator[torch.profiler.profile]:
    """Profile a block on CPU and GPU, and write a trace of it, measured and predicted.

    Every rank may enter it; the first rank writes. HolisticTraceAnalysis sees what was measured.
    If the trace lies in the backend's folder, the page there has measured times beside predicted.

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
        if dumps:
            write_page(folder)


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
    for number, run in enumerate(graph_runs(events, dumps)):
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
