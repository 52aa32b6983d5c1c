"""Shared code of the benchmarks: arguments, a one-rank process group, timing and output.

The names of the training variants are defined here; ``benchmarks/variants.py`` builds the variants.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
PLAIN, FSDP2, FSDP2_BLOCKS = "torch.compile", "FSDP2, eager", "FSDP2, compiled blocks"
DDP, TORCHAO = "DDP", "FSDP2, torchao float8"
GRAPHSHARD, GRAPHSHARD_FP8 = "graphshard", "graphshard, fp8"


# --- arguments -----------------------------------------------------------------------------------


def new_parser(doc: str | None, *, with_device: bool = False) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    if with_device:
        parser.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu"
        )
    return parser


def add_counts(parser: argparse.ArgumentParser, **defaults: int) -> None:
    for name, value in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=count, default=value, help="default: %(default)s")


def add_variants(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    parser.add_argument(
        "--variants", nargs="+", choices=names, default=list(names), help="default: all"
    )


def add_out(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    path = None if default is None else Path(default)
    text = "Markdown file to write; default: %(default)s"
    parser.add_argument("--out", type=Path, default=path, help=text)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


# --- one rank ------------------------------------------------------------------------------------


def pick_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def group_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """Yield the mesh of a process group of this process only; on a CPU, torch uses one thread."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


# --- timing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Duration of a piece of work.

    Attributes:
        host_s: seconds until the call returned.
        done_s: seconds until the device was done.
    """

    host_s: float
    done_s: float


def timed(work: Callable[[], object], device: torch.device) -> Timing:
    """Run ``work`` on an idle device and return its timing."""
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
    """Call all ``runs`` round by round; return their results in the rounds after the warm-up.

    A slow phase of the machine thus affects all runs. The order rotates, so that no run is always
    the first of its round.
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


# --- output --------------------------------------------------------------------------------------


def heading(module: str, device: torch.device) -> str:
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"CPU ({os.cpu_count()} cores)"
    return f"`{command}`, torch {torch.__version__}, {machine}"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    align = ("left", *("right" for _ in list(rows[0])[1:]))
    return tabulate(rows, "keys", "github", disable_numparse=True, colalign=align)


def show(*paragraphs: str) -> None:
    for paragraph in paragraphs:
        print(paragraph, end="\n\n", flush=True)


def write_report(path: Path | None, paragraphs: Sequence[str]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(paragraphs) + "\n")
