"""Modelled wires: links that this machine lacks.

``with_wire`` describes a modelled wire to the planner; ``modelled_group`` and ``tests.recording``
run collectives on one.

In a ``modelled_group``, this process is the first of many ranks; the others do not exist. A
collective copies as many bytes as it would write, and occupies the link for ``alpha + bytes of its
full buffers / rate``; collectives run one after the other. On a GPU, this time includes the copy: a
collective is one kernel on the group's own stream, which starts after the work already on the
current stream; it spins on one block, whereas NCCL uses more. On a CPU, the host copies at once,
the link is occupied from then on, and ``wait`` sleeps. Steps thus take as long as over real links,
under any scheduler, but compute wrong values: nothing is sent, and a gather repeats the first
rank's shard.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard.cost.hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Rate
from graphshard.kinds import TransferKind


class Wire(NamedTuple):
    alpha_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.alpha_s + num_bytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{self.alpha_s * 1e3:g} ms and {self.bytes_per_s / 1e9:g} GB/s"


def with_wire(base: Hardware, wire: Wire, world: int) -> Hardware:
    """Return ``base`` with a modelled wire between all ``world`` ranks.

    A collective takes the latency of the wire plus the time of all bytes of its full buffer.
    """
    share = (world - 1) / world  # fraction of a buffer that a ring moves; twice in an all-reduce
    bus = {
        kind: Rate(
            wire.bytes_per_s * share * (2 if kind == TransferKind.ALL_REDUCE else 1), ((1.0, 1.0),)
        )
        for kind in COLLECTIVE_KINDS
    }
    link = Interconnect(wire.alpha_s * 1e6, 0.0, base.intra.buffer_us, bus)
    return dataclasses.replace(base, name="wire", intra=link, inter=link)


def write_with_wire(base: Hardware, wire: Wire, world: int, folder: str) -> str:
    path = Path(folder, "wire.json")
    path.write_text(with_wire(base, wire, world).to_json())
    return str(path)


def parse_wire(text: str) -> Wire:
    try:
        alpha_ms, gb_per_s = map(float, text.split(","))
        if alpha_ms < 0 or gb_per_s <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be milliseconds and GB/s, as in 4,1"
        ) from None
    return Wire(alpha_s=alpha_ms / 1e3, bytes_per_s=gb_per_s * 1e9)


def add_planned_wire(parser: argparse.ArgumentParser) -> None:
    text = "wire to plan for; default: the wire that steps run on"
    metavar = "ALPHA_MS,GB_PER_S"
    parser.add_argument("--planned-wire", type=parse_wire, metavar=metavar, help=text)


# --- a process group on a modelled wire ----------------------------------------------------------

Tensors = list[Tensor]


class _GpuLink:
    def __init__(self, wire: Wire) -> None:
        from benchmarks.gpu_link import run

        self._wire, self._run_kernel = wire, run
        self._stream = torch.cuda.Stream()

    def launch(self, outputs: Tensors, inputs: Tensors, num_bytes: int) -> dist.Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run_kernel(outputs, inputs, self._wire.seconds(num_bytes))
            done = torch.cuda.Event()
            done.record()
        kept = [*outputs, *inputs]
        return _Work(lambda: torch.cuda.current_stream().wait_event(done), kept)


class _CpuLink:
    def __init__(self, wire: Wire) -> None:
        self._wire, self._free_at = wire, 0.0

    def launch(self, outputs: Tensors, inputs: Tensors, num_bytes: int) -> dist.Work:
        for output, sent in zip(outputs, inputs):
            _fill(output.view(-1), sent.reshape(-1))
        start = max(self._free_at, time.perf_counter())
        self._free_at = done_at = start + self._wire.seconds(num_bytes)
        kept = [*outputs, *inputs]
        return _Work(lambda: time.sleep(max(0.0, done_at - time.perf_counter())), kept)


class _Work(dist.Work):
    """A collective, which keeps its tensors alive until it is waited for."""

    def __init__(self, wait: Callable[[], object], kept: Tensors) -> None:
        super().__init__()
        self._wait, self._kept = wait, kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait()
        self._kept = []
        return True


Link: TypeAlias = _GpuLink | _CpuLink
"""A link that runs the collectives of a device, one after the other."""


class ModelledLinks(dist.ProcessGroup):
    """A process group whose collectives run on a modelled link.

    It implements the methods that FSDP2, graphshard and ``init_device_mesh`` call through c10d;
    other collectives take no time.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device, link: Link) -> None:
        super().__init__(rank, num_ranks)
        fake: Any = FakeProcessGroup._create_internal(rank, num_ranks)
        self._register_backend(device, self.BackendType.CUSTOM, fake)
        self._set_default_backend(self.BackendType.CUSTOM)
        self._link = link

    def _run(self, outputs: Tensors, inputs: Tensors) -> dist.Work:
        """Fill outputs from inputs; the larger side counts as the full buffers."""
        num_bytes = max(sum(t.nbytes for t in side) for side in (outputs, inputs))
        return self._link.launch(outputs, inputs, num_bytes)

    # The names of torch 2.13.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._run([output], [input])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self._run(outputs, inputs)

    reduce_scatter_single = all_gather_single
    reduce_scatter_single_coalesced = all_gather_single_coalesced

    # The names of torch 2.11.

    _allgather_base = _reduce_scatter_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = all_gather_single_coalesced

    # Names in both versions.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self._run(tensors, tensors)

    allreduce_coalesced = broadcast = allreduce

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._run([t for each in outputs for t in each], inputs * len(outputs[0]))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run([], [])

    def getBackendName(self) -> str:
        return dist.Backend.FAKE


def _fill(output: Tensor, sent: Tensor) -> None:
    if output.data_ptr() == sent.data_ptr() and output.numel() == sent.numel():
        return
    if output.numel() >= sent.numel():
        output.view(-1, sent.numel()).copy_(sent.expand(output.numel() // sent.numel(), -1))
    else:
        torch.mean(sent.view(-1, output.numel()), 0, out=output)


@contextmanager
def modelled_group(wire: Wire, num_ranks: int, device: torch.device) -> Iterator[DeviceMesh]:
    """Create a process group of ``num_ranks`` over a modelled link, and yield its mesh.

    The group is registered as "fake", so graphshard does not wait for other ranks. On a CPU, torch
    uses one thread.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    link: Link = _GpuLink(wire) if device.type == "cuda" else _CpuLink(wire)

    def make(options: Any, _: Any) -> ModelledLinks:
        return ModelledLinks(options.group_rank, options.group_size, device, link)

    dist.Backend.register_backend(dist.Backend.FAKE, make, extended_api=True, devices=[device.type])
    dist.init_process_group(dist.Backend.FAKE, store=dist.HashStore(), rank=0, world_size=num_ranks)
    yield init_device_mesh(device.type, (num_ranks,))
    dist.destroy_process_group()
