"""A process group over modelled links, in which one process is the first of many ranks.

The other ranks do not exist. A collective copies as many bytes as it would write, then occupies the
link for ``alpha + bytes of its full buffers / rate``, as on ``tests.recording.wire``; collectives
run one after the other. On a GPU, a collective is one kernel on the group's own stream, which
starts after the work already on the current stream; it spins on one block, whereas NCCL uses more.
On a CPU, the host copies at once, and ``wait`` sleeps.

So steps take as long as over such links, under any scheduler. Their values are wrong: nothing is
sent, and a gather repeats the first rank's shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.links import Wire

Tensors = list[Tensor]


class _GpuLink:
    """A link of a GPU: a stream, on which a collective is a kernel that copies and spins."""

    def __init__(self, wire: Wire) -> None:
        from benchmarks.gpu_link import run

        self._wire, self._run_kernel = wire, run
        self._stream = torch.cuda.Stream()

    def launch(self, outputs: Tensors, inputs: Tensors, num_bytes: int) -> dist.Work:
        """Run after the work on the current stream; tensors stay alive until ``wait``."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run_kernel(outputs, inputs, self._wire.seconds(num_bytes))
            done = torch.cuda.Event()
            done.record()
        kept = [*outputs, *inputs]
        return _Work(lambda: torch.cuda.current_stream().wait_event(done), kept)


class _CpuLink:
    """A link of a CPU: the host copies, and the link is occupied until ``_free_at``."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._free_at = wire, 0.0

    def launch(self, outputs: Tensors, inputs: Tensors, num_bytes: int) -> dist.Work:
        """Copy now; the link is occupied from now on, or once it is free."""
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
        """Make the current stream (on a GPU) or the host (on a CPU) wait."""
        self._wait()
        self._kept = []
        return True


Link: TypeAlias = _GpuLink | _CpuLink
"""A link that runs the collectives of a device, one after the other."""


class ModelledLinks(dist.ProcessGroup):
    """A process group whose collectives run on a modelled link.

    It has the methods that FSDP2, graphshard and ``init_device_mesh`` call through c10d; other
    collectives take no time.
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

    # The same on both.

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
    """Fill ``output`` with copies of a gather's shard, or with the mean of a reduction's shards."""
    if output.data_ptr() == sent.data_ptr() and output.numel() == sent.numel():
        return
    if output.numel() >= sent.numel():
        output.view(-1, sent.numel()).copy_(sent.expand(output.numel() // sent.numel(), -1))
    else:
        torch.mean(sent.view(-1, output.numel()), 0, out=output)


@contextmanager
def modelled_group(wire: Wire, num_ranks: int, device: torch.device) -> Iterator[DeviceMesh]:
    """Create a process group of ``num_ranks`` over a modelled link, and yield its mesh.

    It is registered as "fake", so graphshard knows that there are no other ranks to agree with.
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
