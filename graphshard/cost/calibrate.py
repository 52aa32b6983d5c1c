"""Run the command ``graphshard calibrate``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..files import write_output
from .hardware import Hardware
from .measure import Effort, measure


def calibrate(args: argparse.Namespace) -> int:
    """Run ``graphshard calibrate`` on this rank and return its exit status."""
    # All ranks measure; rank 0 writes the file.
    device = _pick_device(args.device)
    effort = Effort.for_device(device, quick=args.quick)
    if args.sizes is not None:
        effort = dataclasses.replace(effort, collective_bytes=args.sizes)
    with _joined_ranks(device):
        hardware = measure(device, effort)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(summary(hardware))  # first: it remains if the file cannot be written
            write_output("--out", args.out, hardware.to_json())
            print(f"written to {args.out}")
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
    """Return latencies, and rates at the largest sizes, as lines of text."""
    flops = [f"{dtype} {rate.largest / 1e12:.3g}" for dtype, rate in hardware.flops.items()]
    lines = [
        hardware.name,
        "Tflop/s: " + ", ".join(flops),
        f"device memory: {hardware.memory.largest / 1e9:.3g} GB/s, host to device: "
        f"{hardware.host.largest / 1e9:.3g} GB/s, host memory: "
        f"{hardware.host_memory.largest / 1e9:.3g} GB/s, launch: {hardware.launch_us:.3g} us",
    ]
    for name, link in (("within a node", hardware.intra), ("between nodes", hardware.inter)):
        bus = [f"{kind} {rate.largest / 1e9:.3g}" for kind, rate in link.bus.items()]
        latency = f"latency {link.latency_us:.3g} us, {link.buffer_us:.3g} per additional tensor"
        lines.append(f"{name}: {latency}, bus GB/s: {', '.join(bus)}")
    return "\n".join(lines)
