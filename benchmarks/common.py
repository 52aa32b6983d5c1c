"""What the benchmarks share: names of the ways to train that are compared (benchmarks/ways.py builds
them), a process group of one rank, interleaved timing, and the table that is printed."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
PLAIN, FSDP2, FSDP2_BLOCKS = "torch.compile", "FSDP2, eager", "FSDP2, compiled blocks"
DDP, TORCHAO = "DDP", "FSDP2, torchao float8"
GRAPHSHARD, GRAPHSHARD_FP8 = "graphshard", "graphshard, fp8"


# --- where it runs -------------------------------------------------------------------------------


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks of one rank have."""
    shown = argparse.RawDescriptionHelpFormatter
    new = argparse.ArgumentParser(description=doc, formatter_class=shown)
    new.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu"
    )
    return new


def count(text: str) -> int:
    """An argument that is a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 up")
    return int(text)


def pick_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def join_group(device: torch.device) -> DeviceMesh:
    """A process group of this process alone, over NCCL or gloo, and the mesh over it."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,))


# --- timing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds until a piece of work returned, and until the device had done it."""

    host_s: float
    done_s: float


def timed(work: Callable[[], Any], device: torch.device) -> Timing:
    synchronize(device)
    start = time.perf_counter()
    work()
    host_s = time.perf_counter() - start
    synchronize(device)
    return Timing(host_s, time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(runs: Mapping[str, Callable[[], T]], steps: int, warm_up: int) -> dict[str, list[T]]:
    """What each of ``runs`` returns in ``steps`` rounds after the warm-up.

    Every round runs each once, in an order that is rotated from round to round: what slows the
    machine down for a while then slows all of them, and none always follows the same other one.
    """
    names = list(runs)
    results: dict[str, list[T]] = {name: [] for name in runs}
    for step in range(warm_up + steps):
        first = step % len(names)
        for name in names[first:] + names[:first]:
            result = runs[name]()
            if step >= warm_up:
                results[name].append(result)
    return results


median = statistics.median


# --- what is printed -----------------------------------------------------------------------------


def heading(module: str, device: torch.device) -> str:
    """The command and what it ran on."""
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"CPU ({os.cpu_count()} cores)"
    return f"`{command}`, torch {torch.__version__}, {where}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column is text, the others are numbers."""
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers, "github", disable_numparse=True, colalign=align)


def show(*parts: str) -> None:
    """Print paragraphs."""
    for part in parts:
        print(part, end="\n\n", flush=True)


def chart(steps_s: Mapping[str, Sequence[float]], path: Path) -> str:
    """A bar for each way to train: what was written, or why nothing was."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no chart: matplotlib is not installed (the extra `bench`)"
    figure = Figure(figsize=(7, 0.5 * len(steps_s) + 1), layout="constrained")
    axes = figure.subplots()
    for name, seconds in reversed(steps_s.items()):
        low, half, high = (s * 1e3 for s in statistics.quantiles(seconds, n=4))
        spread = [[half - low], [high - half]]
        axes.barh(name, half, xerr=spread, color="C1" if name == GRAPHSHARD else "C0")
    axes.set_xlabel("step, ms (median, quartiles)")
    figure.savefig(path)
    return f"![a bar for each row]({path.name})"
