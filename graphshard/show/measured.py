"""Profile a run with torch's profiler, and add the predicted timelines of its graphs.

    with graphshard.show.profile("dump/step.trace.json"):  # dump: the backend's folder
        loss = compiled(batch)
        loss.backward()

Each predicted timeline starts where the measured run of its graph started (``graph_runs``).
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
    """Profile a block on CPU and GPU, and write a trace with measured and predicted events.

    All ranks may enter; only the first one writes. HolisticTraceAnalysis reads the measured part.
    If the trace is in the backend's dump folder, the page in it shows measured times, too.

    Args:
        path: path of the trace, ``.json``; its folder must exist.
        dump: the backend's ``dump`` folder; None: the folder of ``path``.

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
    """Add a process to ``measured`` with the predicted timeline of each run of a graph."""
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
    """Mark ``event`` as measured if it names a process."""
    if event["ph"] != "M" or event["name"] != "process_name":
        return event
    return {**event, "args": {"name": f"{MEASURED}: {event['args']['name']}"}}
