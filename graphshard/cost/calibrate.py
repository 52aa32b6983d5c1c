"""Measures this machine and writes what ``hardware`` reads: ``python -m graphshard calibrate``.

    python -m graphshard calibrate --out machine.json                             one device
    torchrun --nproc-per-node 8 -m graphshard calibrate --out machine.json        and its links

Matrix products by dtype and size, copies by size, on the device and from the host, exponentials, an
empty kernel; with several ranks the three collectives by size, as the graphs run them. All are medians,
of rank 0, while the other ranks measure the same. Operands rotate through more memory than caches hold,
as in training. What is not measured stays as in the table: fp8, links that these ranks do not span, and
what compute loses to collectives that are hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..files import write_whole
from ..kinds import TransferKind
from ..ops import collectives
from ..ops.emitter import run
from .hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Rate

_KiB, _MiB = 1 << 10, 1 << 20
COLD_BYTES = 256 * _MiB  # what operands rotate through; a B200 caches 126 MB
_NUM_PARCELS, _PARCEL_ELEMENTS = 8, 1 << 14  # tensors in one collective, and of each
SAMPLE_US = 2000.0  # a sample repeats short work for so long


@dataclass(frozen=True)
class Effort:
    """What is measured.

    Attributes:
        dtypes: of the matrix products; ``products``: their sizes ``n``, for ``n x n`` by ``n x n``.
        copies: bytes of the copies; ``collectives``: bytes of the full buffers.
        repeats: samples that the medians are of.
    """

    dtypes: tuple[str, ...]
    products: tuple[int, ...]
    copies: tuple[int, ...]
    collectives: tuple[int, ...]
    repeats: int

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> Effort:
        if device.type == "cuda":
            return cls(
                ("float32", "tf32", "bfloat16", "float16"),
                (512, 1024, 2048, 4096, 8192)[:: 2 if quick else 1],
                tuple(_MiB << n for n in range(0, 11, 4 if quick else 2)),
                tuple(_KiB << n for n in range(2, 21, 6 if quick else 2)),
                5 if quick else 15,
            )
        return cls(
            ("float32", "bfloat16"),
            (64, 128, 256, 512) if quick else (64, 128, 256, 512, 1024, 2048),
            tuple(_KiB << n for n in range(6, 17 if quick else 19, 2)),
            tuple(_KiB << n for n in range(0, 15 if quick else 17, 3 if quick else 2)),
            5 if quick else 15,
        )


def main(argv: Sequence[str]) -> int:
    """Measure, and have rank 0 write the file. Joins the ranks of torchrun if there are some."""
    args = _parser().parse_args(argv)
    device = _pick_device(args.device)
    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        effort = Effort.of(device, quick=args.quick)
        if args.sizes is not None:
            effort = dataclasses.replace(effort, collectives=args.sizes)
        measured, reason = measure(device, effort)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_whole(args.out, measured.to_json())
            print(*filter(None, (reason, summary(measured), f"written to {args.out}")), sep="\n")
    finally:
        if joined:
            dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("calibrate", description=__doc__, formatter_class=shown)
    parser.add_argument("--out", type=_file, required=True, help="the JSON file to write")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument(
        "--sizes", type=_sizes, help="bytes of the collectives' buffers, as in 65536,16777216"
    )
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file in a folder that exists")
    return path


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of bytes, as in 65536,1048576")
    return tuple(sorted({int(part) for part in parts}))


def _pick_device(name: str | None) -> torch.device:
    if (name or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def summary(hardware: Hardware) -> str:
    """The rates at the largest sizes, for people."""
    flops = {name: _largest(rate) for name, rate in hardware.flops.items()}
    lines = [
        f"{hardware.name}",
        "Tflop/s: " + ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in flops.items()),
        f"memory: {_largest(hardware.memory) / 1e9:.3g} GB/s, from the host: "
        f"{_largest(hardware.host) / 1e9:.3g} GB/s, launch: {hardware.launch_us:.3g} us",
    ]
    for name, link in (("in a node", hardware.intra), ("between nodes", hardware.inter)):
        bus = ", ".join(f"{kind} {_largest(link.bus[kind]) / 1e9:.3g}" for kind in COLLECTIVE_KINDS)
        latency = f"latency {link.latency_us:.3g} us, {link.buffer_us:.3g} for each tensor more"
        lines.append(f"{name}: {latency}, bus GB/s: {bus}")
    return "\n".join(lines)


def _largest(rate: Rate) -> float:
    return rate.peak * rate.achieved[-1][1]


# --- what is measured ----------------------------------------------------------------------------


def measure(device: torch.device, effort: Effort) -> tuple[Hardware, str]:
    """The device, and the links between the ranks of the default process group, if there is one.

    Returns:
        The table's entry for the device with what was measured in it, and why that entry is not
        the device's own, "" where it is.
    """
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    base, reason = Hardware.for_device(name)
    launch_us = _launch_us(device, effort)
    flops = {dtype: _products(dtype, device, effort, launch_us) for dtype in effort.dtypes}
    measured = dataclasses.replace(
        base,
        name=f"{name}, calibrated",
        flops={**base.flops, **flops},
        memory=_copies(device, effort, launch_us),
        host=_copies_from_host(device, effort, launch_us),
        special_per_s=_special_per_s(device, effort),
        launch_us=launch_us,
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        measured = _with_links(measured, device, effort)
    return measured, reason


def _launch_us(device: torch.device, effort: Effort) -> float:
    x = torch.ones(1, device=device)
    return median_us(lambda: torch.add(x, x, out=x), device, effort.repeats)


def _products(dtype: str, device: torch.device, effort: Effort, launch_us: float) -> Rate:
    """In the three layouts of a linear layer: forward, and the two of backward."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        points = []
        for n in effort.products:
            cold = _cold(3 * n * n * kind.itemsize)
            pair = torch.randn(2, n, n, device=device).to(kind)
            pairs = [pair.clone() for _ in range(cold)]
            out = torch.empty(n, n, device=device, dtype=kind)
            times = [
                median_us(_rotating(_product(turn, out), pairs), device, effort.repeats)
                for turn in ((False, True), (False, False), (True, False))
            ]
            points.append((2 * n**3, statistics.mean(times) - launch_us))
        return rate(points)
    finally:
        torch.set_float32_matmul_precision(before)


def _product(turned: tuple[bool, bool], out: Tensor) -> Callable[[Tensor], object]:
    def work(pair: Tensor) -> object:
        left, right = (m.t() if turn else m for m, turn in zip(pair, turned))
        return torch.mm(left, right, out=out)

    return work


def _copies(device: torch.device, effort: Effort, launch_us: float) -> Rate:
    points = []
    for num_bytes in effort.copies:
        cold = _cold(2 * num_bytes)
        pairs = [torch.zeros(2, num_bytes // 4, device=device) for _ in range(cold)]
        work = _rotating(lambda pair: pair[0].copy_(pair[1]), pairs)
        points.append((2 * num_bytes, median_us(work, device, effort.repeats) - launch_us))
    return rate(points)


def _copies_from_host(device: torch.device, effort: Effort, launch_us: float) -> Rate:
    pinned, points = device.type != "cpu", []
    for num_bytes in effort.copies:
        hosts = [torch.zeros(num_bytes // 4, pin_memory=pinned) for _ in range(_cold(num_bytes))]
        value = torch.zeros(num_bytes // 4, device=device)
        work = _rotating(partial(value.copy_, non_blocking=True), hosts)
        points.append((num_bytes, median_us(work, device, effort.repeats) - launch_us))
    return rate(points)


def _special_per_s(device: torch.device, effort: Effort) -> float:
    x = torch.rand(_MiB // 4 if device.type == "cpu" else 64 * _MiB, device=device)
    out = torch.empty_like(x)
    functions = (torch.exp, torch.erf)
    times = [median_us(partial(f, x, out=out), device, effort.repeats) for f in functions]
    return x.numel() / statistics.mean(times) * 1e6


def _with_links(hardware: Hardware, device: torch.device, effort: Effort) -> Hardware:
    """One node: all ranks. Several: the ranks of each node, and all ranks for the network."""
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local == world:
        intra = _link(dist.group.WORLD, device, effort)
        return dataclasses.replace(
            hardware, intra=intra, ranks_per_node=max(world, hardware.ranks_per_node)
        )
    inter = _link(dist.group.WORLD, device, effort)
    intra = hardware.intra
    if local > 1:
        intra = _link(dist.new_subgroups(local)[0], device, effort)
    return dataclasses.replace(hardware, ranks_per_node=local, intra=intra, inter=inter)


def _link(group: Any, device: torch.device, effort: Effort) -> Interconnect:
    world, times = group.size(), {}
    for kind in COLLECTIVE_KINDS:
        times[kind] = [
            (num_bytes, _collective_us(kind, num_bytes, group, device, effort.repeats))
            for num_bytes in effort.collectives
        ]
    return interconnect(times, world, _buffer_us(group, device, effort.repeats))


def _buffer_us(group: Any, device: torch.device, repeats: int) -> float:
    """What another tensor adds to a coalesced collective; the mean of gathers and reductions."""
    world = group.size()
    parts = [torch.zeros(_PARCEL_ELEMENTS, device=device) for _ in range(_NUM_PARCELS)]
    fulls = [torch.zeros(world * _PARCEL_ELEMENTS, device=device) for _ in range(_NUM_PARCELS)]
    part, full = torch.cat(parts), torch.cat(fulls)
    sent = {TransferKind.ALL_GATHER: (parts, [part]), TransferKind.REDUCE_SCATTER: (fulls, [full])}
    added_us = []
    for kind, pair in sent.items():
        many_us, one_us = (_sent_us(kind, wire, group, device, repeats) for wire in pair)
        added_us.append(max(0.0, many_us - one_us) / (_NUM_PARCELS - 1))
    return statistics.mean(added_us)


def _collective_us(
    kind: TransferKind, num_bytes: int, group: Any, device: torch.device, repeats: int
) -> float:
    world = group.size()
    part = torch.zeros(max(num_bytes // 4 // world, 1), device=device)
    wire = (
        part
        if kind == TransferKind.ALL_GATHER
        else torch.zeros(world * part.numel(), device=device)
    )
    return _sent_us(kind, [wire], group, device, repeats)


def _sent_us(
    kind: TransferKind, tensors: list[Tensor], group: Any, device: torch.device, repeats: int
) -> float:
    """From the launch of a collective to the end of its wait."""

    def send() -> None:
        for buffer in collectives.launch(run, kind, tensors, group.group_name, group.size()):
            collectives.wait(run, buffer)

    return median_us(send, device, repeats, times=4, group=group)


# --- from times to rates -------------------------------------------------------------------------


def rate(points: Iterable[tuple[float, float]]) -> Rate:
    """Of ``(amount, microseconds)``.

    Disturbances only ever add time, so an amount takes no longer than a larger one was measured to.
    """
    least, per_s = math.inf, {}
    for amount, time_us in sorted(points, reverse=True):
        least = min(least, max(time_us, 1e-3))
        per_s[amount] = amount / least * 1e6
    peak = max(per_s.values())
    return Rate(peak, tuple((amount, per_s[amount] / peak) for amount in sorted(per_s)))


def interconnect(
    times: dict[TransferKind, list[tuple[int, float]]], world: int, buffer_us: float
) -> Interconnect:
    """Of ``(bytes of the full buffer, microseconds)`` of each kind of collective.

    The latency is the shortest time of all; with one number of ranks it cannot be told from hops.
    """
    latency_us = min(time_us for points in times.values() for _, time_us in points)
    bus = {}
    for kind, points in times.items():
        rounds = (2 if kind == TransferKind.ALL_REDUCE else 1) * (world - 1) / world
        # At least a fiftieth of the time is for the bytes, or their rate would be without bounds.
        moved = [(size, max(us - latency_us, us / 50) / rounds) for size, us in points]
        bus[kind] = rate(moved)
    return Interconnect(latency_us, 0.0, buffer_us, bus)


# --- timing --------------------------------------------------------------------------------------


def median_us(
    work: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    times: int | None = None,
    group: Any = None,
) -> float:
    """The median of ``repeats`` samples, in each of which ``work`` runs ``times`` times.

    Args:
        times: None: as often as ``SAMPLE_US`` allow.
        group: its ranks start each sample together.
    """
    first_us = min(_sample_us(work, device, 1) for _ in range(3))
    times = times or max(1, min(200, int(SAMPLE_US / first_us)))
    samples = []
    for _ in range(repeats):
        if group is not None:
            dist.barrier(group)
        samples.append(_sample_us(work, device, times))
    return statistics.median(samples)


def _sample_us(work: Callable[[], object], device: torch.device, times: int) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    _synchronize(device)
    return (time.perf_counter() - start) / times * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cold(num_bytes: int) -> int:
    """How many operands of so many bytes do not fit into caches together."""
    return max(1, min(256, COLD_BYTES // num_bytes))


def _rotating(work: Callable[[Tensor], object], operands: list[Tensor]) -> Callable[[], object]:
    turn = 0

    def next_turn() -> object:
        nonlocal turn
        turn = (turn + 1) % len(operands)
        return work(operands[turn])

    return next_turn
