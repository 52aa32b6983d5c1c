"""Record the kernels of steps over modelled links, and split the step time into parts."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

PARTS = ("compute", "exposed", "idle", "links")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Kernel(NamedTuple):
    """A kernel, copy or memset on a GPU; times are in microseconds."""

    start_us: float
    us: float
    stream: int
    name: str

    @property
    def end_us(self) -> float:
        return self.start_us + self.us

    @property
    def is_collective(self) -> bool:
        return "spin" in self.name


class Streams(NamedTuple):
    compute: list[Kernel]
    links: list[Kernel]


def record(call: Callable[[], object]) -> list[Kernel]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    on_gpu = sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda e: e["ts"])
    start = on_gpu[0]["ts"]
    return [Kernel(e["ts"] - start, e["dur"], e["args"]["stream"], e["name"][:90]) for e in on_gpu]


def write(kernels: Sequence[Kernel], path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(kernels).encode()))


def parse(packed: bytes) -> list[Kernel]:
    return [Kernel(*fields) for fields in json.loads(gzip.decompress(packed))]


def split(kernels: Sequence[Kernel], steps: int) -> dict[str, float]:
    """Return the milliseconds per step of each of ``PARTS``, from kernels of ``steps`` steps."""
    own, on_links = map(_busy_us, streams(kernels))
    busy = _busy_us(kernels)
    span = max(k.end_us for k in kernels) - min(k.start_us for k in kernels)
    parts_us = (own, busy - own, span - busy, on_links)
    return {part: us / steps / 1e3 for part, us in zip(PARTS, parts_us)}


def streams(kernels: Iterable[Kernel]) -> Streams:
    """Return kernels of the busiest stream without collectives, and of all streams with any."""
    by_stream: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_stream[kernel.stream].append(kernel)
    is_link = {s: any(k.is_collective for k in some) for s, some in by_stream.items()}
    compute = max((some for s, some in by_stream.items() if not is_link[s]), key=_busy_us)
    return Streams(compute, [k for s, some in by_stream.items() if is_link[s] for k in some])


def _busy_us(kernels: Iterable[Kernel]) -> float:
    total, end = 0.0, -math.inf
    for kernel in sorted(kernels):
        total += max(0.0, kernel.end_us - max(kernel.start_us, end))
        end = max(end, kernel.end_us)
    return total
