"""Measure this machine, and write its rates to a file for ``schedule.hardware``.

    python -m graphshard calibrate --out machine.json                        one device
    torchrun --nproc-per-node 8 -m graphshard calibrate --out machine.json   and its interconnects

This measures matrix products by dtype and size; copies by size on the device, from the host, and
within host memory; exponentials; an empty kernel; and, with several ranks, collectives by size,
launched as graphs launch them. The file holds the medians of rank 0, measured while the other
ranks measure the same. Operands rotate through more memory than caches hold, as in training. Rates
of fp8, of interconnects that these ranks do not span, and the compute time lost to hidden
collectives are taken from the device table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ..files import write_whole
from .hardware import Hardware
from .measure import Effort, measure


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``calibrate`` to ``python -m graphshard``."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, for schedule.hardware",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=_file, required=True, help="the JSON file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument(
        "--sizes", type=_sizes, help="collective buffer sizes in bytes, as in 65536,16777216"
    )
    parser.set_defaults(run=_calibrate, parser=parser)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file in a folder that exists")
    return path


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be sizes in bytes, as in 65536,1048576")
    return tuple(sorted({int(part) for part in parts}))


def _calibrate(args: argparse.Namespace) -> int:
    # All ranks measure; rank 0 writes the file.
    device = _pick_device(args.device)
    effort = Effort.for_device(device, quick=args.quick)
    if args.sizes is not None:
        effort = dataclasses.replace(effort, collective_bytes=args.sizes)
    with _joined_ranks(device):
        hardware, warning = measure(device, effort)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_whole(args.out, hardware.to_json())
            lines = [warning, summary(hardware), f"written to {args.out}"]
            print(*filter(None, lines), sep="\n")
    return 0


def _pick_device(name: str | None) -> torch.device:
    if (name or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _joined_ranks(device: torch.device) -> Iterator[None]:
    joins = "RANK" in os.environ and not dist.is_initialized()  # started by torchrun
    if joins:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        if joins:
            dist.destroy_process_group()


def summary(hardware: Hardware) -> str:
    """Return the rates at the largest sizes, as text."""
    flops = [f"{dtype} {rate.largest / 1e12:.3g}" for dtype, rate in hardware.flops.items()]
    lines = [
        hardware.name,
        "Tflop/s: " + ", ".join(flops),
        f"memory: {hardware.memory.largest / 1e9:.3g} GB/s, from the host: "
        f"{hardware.host.largest / 1e9:.3g} GB/s, within the host: "
        f"{hardware.host_memory.largest / 1e9:.3g} GB/s, launch: {hardware.launch_us:.3g} us",
    ]
    for name, link in (("in a node", hardware.intra), ("between nodes", hardware.inter)):
        bus = [f"{kind} {rate.largest / 1e9:.3g}" for kind, rate in link.bus.items()]
        latency = f"latency {link.latency_us:.3g} us, {link.buffer_us:.3g} per further tensor"
        lines.append(f"{name}: {latency}, bus GB/s: {', '.join(bus)}")
    return "\n".join(lines)
