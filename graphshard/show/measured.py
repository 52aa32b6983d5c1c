"""A run under torch's profiler, with what was predicted of its graphs beside it.

    with graphshard.show.profile("dump/step.trace.json"):  # dump: the backend's folder
        loss = compiled(batch)
        loss.backward()

The profile says which graphs ran ("Torch-Compiled Region: 0/0", and the sequence number that links
autograd's backward to it); the predicted timeline of each begins where its run was measured to.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from ..kinds import GraphKind
from .dump import Dump
from .dump_folder import dumps_in
from .trace import PREDICTED, Event, process, run

MEASURED = "measured"
_REGION = "Torch-Compiled Region: "
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"
_SEQUENCE = "Sequence number"
_LAUNCHES = ("cuda_runtime", "cuda_driver")


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
        with tempfile.TemporaryDirectory() as scratch:
            measured = Path(scratch, "measured.json")
            profiler.export_chrome_trace(str(measured))
            raw = json.loads(measured.read_text())
        path.write_text(json.dumps(beside(raw, list(map(Dump.load, dumps_in(folder))))))


def beside(measured: dict[str, Any], dumps: Sequence[Dump]) -> dict[str, Any]:
    """A trace with a process for what was measured, and one for what was predicted of each run."""
    events = list(map(_labelled, measured["traceEvents"]))
    predicted: list[Event] = []
    free_us = 0.0
    for number, (start_us, dump) in enumerate(_runs(events, dumps)):
        start_us = max(start_us, free_us)
        predicted += run(dump, start_us=start_us, number=number, streams=False)
        free_us = start_us + dump.timeline.total_us
    names = sorted({dump.hardware.name for dump in dumps})
    title = process(f"{PREDICTED} on {', '.join(names)}") if predicted else []
    return {**measured, "traceEvents": [*title, *predicted, *events]}


def _labelled(event: Event) -> Event:
    if event["ph"] != "M" or event["name"] != "process_name":
        return event
    return {**event, "args": {"name": f"{MEASURED}: {event['args']['name']}"}}


def _runs(events: Sequence[Event], dumps: Sequence[Dump]) -> Iterator[tuple[float, Dump]]:
    """When a graph was seen to run, in order of time, and the latest dump of it."""
    known = {(dump.compiled, dump.plan.graph): dump for dump in dumps}
    region: dict[Any, str] = {}  # which compilation runs, by thread
    sequence: dict[int, str] = {}
    calls = [event for event in events if event["ph"] == "X" and event.get("cat") == "cpu_op"]
    for event in sorted(calls, key=lambda call: call["ts"]):
        name, found = event["name"], []
        if name.startswith(_REGION):
            compiled = region[event["tid"]] = name.removeprefix(_REGION)
            found = [(compiled, GraphKind.FORWARD), (compiled, GraphKind.INFERENCE)]
        elif name == _FORWARD:
            sequence[event["args"][_SEQUENCE]] = region.get(event["tid"], "")
        elif name == _BACKWARD:
            found = [(sequence.get(event["args"][_SEQUENCE], ""), GraphKind.BACKWARD)]
        yield from ((_start_us(event, events), known[key]) for key in found if key in known)


def _start_us(call: Event, events: Sequence[Event]) -> float:
    """Of the first kernel that ``call`` launched on a GPU, or of the call itself."""
    end_us = call["ts"] + call["dur"]
    launched = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in _LAUNCHES
        and event["tid"] == call["tid"]
        and call["ts"] <= event["ts"] <= end_us
    }
    kernels = (event for event in events if event.get("cat") == "kernel")
    started = [k["ts"] for k in kernels if k["args"].get("correlation") in launched]
    return float(min(started, default=call["ts"]))
