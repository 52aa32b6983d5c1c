"""Measure the rates of a device and of the interconnects of a process group, for ``calibrate``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..kinds import TransferKind
from ..ops import collectives
from ..ops.groups import uses_all_to_all
from ..ops.nodes import run
from .devices import find_hardware_or_default
from .hardware import ALL_TO_ALL, CALIBRATED, COLLECTIVE_KINDS, Hardware, Interconnect, Rate

_KiB, _MiB = 1 << 10, 1 << 20
_NUM_BUFFERS = 8  # buffers in the coalesced collective that is compared with a single buffer
_BUFFER_ELEMENTS = 1 << 14
_CALLS_PER_SAMPLE = 4  # calls of a collective; fixed, because all ranks must make the same number


# --- timing --------------------------------------------------------------------------------------

# Total bytes of rotating operands: more than caches hold (a B200 caches 126 MB).
COLD_BYTES = 256 << 20
SAMPLE_US = 2000.0  # duration of a sample; short work is repeated to fill it
_MAX_CALLS = 200  # per sample
_MAX_OPERANDS = 256


@dataclass(frozen=True)
class Timer:
    """A timer that takes the median of ``num_samples`` samples of work on ``device``."""

    device: torch.device
    num_samples: int

    def median_us(
        self,
        work: Callable[[], object],
        *,
        num_calls: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> float:
        """Return the median time of one call of ``work`` in microseconds.

        Args:
            num_calls: number of calls in a sample (default: as many as fit in ``SAMPLE_US``, 1 to
                ``_MAX_CALLS``).
            group: ranks that start each sample together (default: this rank alone).
        """
        first_us = min(self._sample_us(work, 1) for _ in range(3))
        if num_calls is None:
            num_calls = max(1, min(_MAX_CALLS, int(SAMPLE_US / first_us)))
        samples_us = []
        for _ in range(self.num_samples):
            if group is not None:
                dist.barrier(group)
            samples_us.append(self._sample_us(work, num_calls))
        return statistics.median(samples_us)

    def _sample_us(self, work: Callable[[], object], num_calls: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            work()
        self._synchronize()
        return (time.perf_counter() - start) / num_calls * 1e6

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def num_cold(num_bytes: int) -> int:
    """Return how many operands of ``num_bytes`` to rotate: 1 to ``_MAX_OPERANDS``."""
    return max(1, min(_MAX_OPERANDS, COLD_BYTES // num_bytes))


def rotating(work: Callable[[Tensor], object], operands: Sequence[Tensor]) -> Callable[[], object]:
    """Return a function that calls ``work`` with the next of ``operands``, cyclically."""
    cycle = itertools.cycle(operands)
    return lambda: work(next(cycle))


@dataclass(frozen=True)
class Effort:
    """The sizes to measure, and the number of samples for each median."""

    dtypes: tuple[str, ...]  # dtypes of matrix products; "tf32" means float32 in tf32 mode
    matmul_sizes: tuple[int, ...]  # ``n`` of the matrix products, ``[n, n]`` by ``[n, n]``
    copy_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]  # sizes of full buffers
    num_samples: int

    @classmethod
    def for_device(cls, device: torch.device, *, quick: bool) -> Effort:
        if device.type == "cuda":  # takes minutes, or seconds if ``quick``
            return cls(
                dtypes=("float32", "tf32", "bfloat16", "float16"),
                matmul_sizes=(512, 1024, 2048, 4096, 8192)[:: 2 if quick else 1],
                copy_bytes=tuple(_MiB << n for n in range(0, 11, 4 if quick else 2)),
                collective_bytes=tuple(_KiB << n for n in range(2, 21, 6 if quick else 2)),
                num_samples=5 if quick else 15,
            )
        return cls(
            dtypes=("float32", "bfloat16"),
            matmul_sizes=(64, 128, 256, 512) if quick else (64, 128, 256, 512, 1024, 2048),
            copy_bytes=tuple(_KiB << n for n in range(6, 17 if quick else 19, 2)),
            collective_bytes=tuple(
                _KiB << n for n in range(0, 15 if quick else 17, 3 if quick else 2)
            ),
            num_samples=5 if quick else 15,
        )


def measure(device: torch.device, effort: Effort) -> Hardware:
    """Measure ``device`` and, if there is a process group of several ranks, its interconnects.

    Every rank of the default group must call this. Rates that are not measured come from the
    device's table entry or, with a warning, from the default entry.
    """
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    table_entry = find_hardware_or_default(name)
    timer = Timer(device, effort.num_samples)
    launch_us = _launch_us(timer)
    flops = {
        dtype: _matmul_rate(dtype, effort.matmul_sizes, timer, launch_us) for dtype in effort.dtypes
    }
    memory = host_memory = _copy_rate(effort.copy_bytes, timer, launch_us)
    if device.type != "cpu":  # CPU copies depend on this rank's number of threads
        host = Timer(torch.device("cpu"), effort.num_samples)
        host_memory = _copy_rate(effort.copy_bytes, host, launch_us=0.0)
    hardware = dataclasses.replace(
        table_entry,
        name=f"{name}, calibrated",
        source=CALIBRATED,
        device_type=device.type,
        flops={**table_entry.flops, **flops},
        memory=memory,
        host=_host_copy_rate(effort.copy_bytes, timer, launch_us),
        special_per_s=_special_per_s(timer),
        launch_us=launch_us,
        host_memory=host_memory,
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        hardware = _with_interconnects(hardware, effort.collective_bytes, timer)
    return hardware


# --- one device ----------------------------------------------------------------------------------


class Sample(NamedTuple):
    """An amount of work, and its time in microseconds."""

    amount: float
    us: float


def _launch_us(timer: Timer) -> float:
    x = torch.ones(1, device=timer.device)
    return timer.median_us(lambda: torch.add(x, x, out=x))


def _matmul_rate(name: str, sizes: Sequence[int], timer: Timer, launch_us: float) -> Rate:
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    samples = []
    with _float32_precision("tf32" if name == "tf32" else "ieee"):
        for n in sizes:
            operands = torch.randn(2, n, n, device=timer.device).to(dtype)
            copies = [operands.clone() for _ in range(num_cold(3 * n * n * dtype.itemsize))]
            out = torch.empty(n, n, device=timer.device, dtype=dtype)
            us = statistics.mean(timer.median_us(rotating(f, copies)) for f in _products(out))
            samples.append(Sample(2 * n**3, us - launch_us))  # the launch is priced separately
    return fit_rate(samples)


@contextlib.contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        yield
    finally:
        products.fp32_precision = before


def _products(out: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return a linear's forward, input gradient and weight gradient, as functions of [2, n, n]."""
    return (
        lambda pair: torch.mm(pair[0], pair[1].t(), out=out),
        lambda pair: torch.mm(pair[0], pair[1], out=out),
        lambda pair: torch.mm(pair[0].t(), pair[1], out=out),
    )


def _copy_rate(sizes: Sequence[int], timer: Timer, launch_us: float) -> Rate:
    samples = []
    for num_bytes in sizes:
        pairs = [
            torch.zeros(2, num_bytes // 4, device=timer.device)
            for _ in range(num_cold(2 * num_bytes))
        ]
        us = timer.median_us(rotating(lambda pair: pair[0].copy_(pair[1]), pairs))
        samples.append(Sample(2 * num_bytes, us - launch_us))  # each byte is read and written
    return fit_rate(samples)


def _host_copy_rate(sizes: Sequence[int], timer: Timer, launch_us: float) -> Rate:
    pinned, samples = timer.device.type != "cpu", []
    for num_bytes in sizes:
        sources = [
            torch.zeros(num_bytes // 4, pin_memory=pinned) for _ in range(num_cold(num_bytes))
        ]
        target = torch.zeros(num_bytes // 4, device=timer.device)
        us = timer.median_us(rotating(partial(target.copy_, non_blocking=True), sources))
        samples.append(Sample(num_bytes, us - launch_us))
    return fit_rate(samples)


def _special_per_s(timer: Timer) -> float:
    # Average the times of exponentials and error functions.
    num_elements = _MiB // 4 if timer.device.type == "cpu" else 64 * _MiB
    x = torch.rand(num_elements, device=timer.device)
    out = torch.empty_like(x)
    functions = (torch.exp, torch.erf)
    us = statistics.mean(timer.median_us(partial(f, x, out=out)) for f in functions)
    return num_elements / us * 1e6


# --- interconnects -------------------------------------------------------------------------------


def _with_interconnects(hardware: Hardware, sizes: Sequence[int], timer: Timer) -> Hardware:
    world = dist.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    # All ranks together measure the interconnect of a single node, or the network between several
    # nodes. With several nodes, the ranks of each node then measure the interconnect within it.
    assert dist.group.WORLD is not None
    everyone = _interconnect(dist.group.WORLD, sizes, timer, ranks_per_node)
    if ranks_per_node == world:
        at_least = max(world, hardware.ranks_per_node)
        return dataclasses.replace(hardware, intra=everyone, ranks_per_node=at_least)
    intra = hardware.intra
    if ranks_per_node > 1:
        own_node, _ = dist.new_subgroups(ranks_per_node)
        intra = _interconnect(own_node, sizes, timer, ranks_per_node)
    return dataclasses.replace(hardware, ranks_per_node=ranks_per_node, intra=intra, inter=everyone)


def _interconnect(
    group: dist.ProcessGroup, sizes: Sequence[int], timer: Timer, ranks_per_node: int
) -> Interconnect:
    kinds: list[str] = [*COLLECTIVE_KINDS]
    if not uses_all_to_all(group.group_name, torch.float32):  # else measured as reduce-scatter
        kinds.append(ALL_TO_ALL)
    samples = {
        kind: [Sample(size, _collective_us(kind, size, group, timer)) for size in sizes]
        for kind in kinds
    }
    return fit_interconnect(samples, group.size(), _buffer_us(group, timer), ranks_per_node)


def _collective_us(kind: str, num_bytes: int, group: dist.ProcessGroup, timer: Timer) -> float:
    # ``num_bytes``: size of the full buffer
    world = group.size()
    shard_elements = max(num_bytes // 4 // world, 1)
    gathers = kind == TransferKind.ALL_GATHER
    num_elements = shard_elements if gathers else world * shard_elements
    return _launch_to_wait_us(kind, [torch.zeros(num_elements, device=timer.device)], group, timer)


def _buffer_us(group: dist.ProcessGroup, timer: Timer) -> float:
    num_elements = {
        TransferKind.ALL_GATHER: _BUFFER_ELEMENTS,
        TransferKind.REDUCE_SCATTER: group.size() * _BUFFER_ELEMENTS,
    }
    added_us = []
    for kind, size in num_elements.items():
        many = [torch.zeros(size, device=timer.device) for _ in range(_NUM_BUFFERS)]
        many_us = _launch_to_wait_us(kind, many, group, timer)
        # Compare with one tensor of the same total size.
        one_us = _launch_to_wait_us(kind, [torch.cat(many)], group, timer)
        added_us.append(max(0.0, many_us - one_us) / (_NUM_BUFFERS - 1))
    return statistics.mean(added_us)


def _launch_to_wait_us(
    kind: str, buffers: list[Tensor], group: dist.ProcessGroup, timer: Timer
) -> float:
    name = group.group_name
    exchanges = kind == ALL_TO_ALL or (
        kind == TransferKind.REDUCE_SCATTER and uses_all_to_all(name, buffers[0].dtype)
    )
    launched = TransferKind.REDUCE_SCATTER if exchanges else TransferKind(kind)

    def launch_and_wait() -> None:
        for buffer in collectives.launch_collective(
            run, launched, buffers, name, group.size(), exchanges=exchanges
        ):
            collectives.wait_tensor(run, buffer)

    return timer.median_us(launch_and_wait, num_calls=_CALLS_PER_SAMPLE, group=group)


# --- from times to rates -------------------------------------------------------------------------


def fit_rate(samples: Iterable[Sample]) -> Rate:
    """Fit a rate to the times of ``samples``."""
    # Noise only adds time: cap the time of each amount by the times of larger amounts.
    least_us, per_s = math.inf, {}
    for amount, us in sorted(samples, reverse=True):
        least_us = min(least_us, max(us, 1e-3))
        per_s[amount] = amount / least_us * 1e6
    peak = max(per_s.values())
    return Rate(peak, tuple((amount, per_s[amount] / peak) for amount in sorted(per_s)))


def fit_interconnect(
    samples: Mapping[str, Sequence[Sample]], world: int, buffer_us: float, ranks_per_node: int
) -> Interconnect:
    """Fit an interconnect to ``samples`` of each kind of collective on ``world`` ranks.

    ``hop_us`` is 0: samples from a single world size cannot separate it from ``latency_us``.
    """
    # Estimate the latency as the shortest time of any collective.
    latency_us = min(us for points in samples.values() for _, us in points)
    bus: dict[str, Rate] = {}
    for kind, points in samples.items():
        rounds = (2 if kind == TransferKind.ALL_REDUCE else 1) * (world - 1) / world
        if kind == ALL_TO_ALL and world > ranks_per_node:  # only bytes between nodes
            rounds = (world - ranks_per_node) / world
        # Attribute at least 2 % of the time to the bytes; otherwise their rate would be unbounded.
        bus[kind] = fit_rate(
            Sample(num_bytes, max(us - latency_us, us / 50) / rounds) for num_bytes, us in points
        )
    return Interconnect(latency_us=latency_us, hop_us=0.0, buffer_us=buffer_us, bus=bus)
