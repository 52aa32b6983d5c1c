"""A gloo process group for CPUs, with collectives that are no faster than a modelled wire.

Each rank's wire carries one collective at a time. A transfer takes ``latency_s`` seconds, plus the
number of bytes that a rank sends in a ring algorithm divided by ``bytes_per_s``. As on a GPU's
interconnect, a transfer needs no core, so compute can hide it: a wait sleeps until the transfer
ends. Broadcasts, barriers and all-gathers into lists of tensors take only gloo's time. c10d
determines the method names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

BACKEND = "modelled_wire"
# Number of times that a ring sends a collective's full buffers; other kinds of collectives take
# only gloo's time.
TIMES_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}

Tensors = list[Tensor]

# DDP calls a group in a compiled forward, where Dynamo would trace these Python methods.
_eager = torch.compiler.disable


class ModelledWire:
    """The wire of this process; without ``bytes_per_s``, collectives take as long as in gloo."""

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._free_at = 0.0

    def send(self, num_bytes: float) -> float:
        """Occupy the wire with a transfer; return its end on the ``time.perf_counter`` clock.

        Return 0 if ``bytes_per_s`` is not set.
        """
        if not self.bytes_per_s:
            return 0.0
        start = max(self._free_at, time.perf_counter())
        self._free_at = start + self.latency_s + num_bytes / self.bytes_per_s
        return self._free_at


WIRE = ModelledWire()


class WireWork(dist.Work):
    """Work of one collective, done when its gloo works and its transfer are done."""

    def __init__(self, works: Sequence[dist.Work], done_at: float) -> None:
        super().__init__()
        self._works, self._done_at = works, done_at

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            # None and zero mean the group's timeout; gloo would take zero literally.
            work.wait(timeout) if timeout else work.wait()
        self._await_wire()
        return True

    def is_completed(self) -> bool:
        arrived = time.perf_counter() >= self._done_at
        return arrived and all(work.is_completed() for work in self._works)

    def result(self) -> Tensors:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:  # for DDP
        futures = [work.get_future() for work in self._works]
        future = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        # ``_value`` may block a gloo thread: later collectives have to wait for the wire anyway.
        return future.then(self._value)

    def _value(self, done: Future[Any]) -> Any:
        self._await_wire()
        return done.value()

    def _await_wire(self) -> None:
        time.sleep(max(0.0, self._done_at - time.perf_counter()))


class WireGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._share = (size - 1) / size  # fraction of a full buffer that each rank of a ring sends
        self._register_backend(torch.device("cpu"), self.BackendType.GLOO, self._gloo)
        self._set_default_backend(self.BackendType.GLOO)

    def _send(
        self, kind: str, full: Sequence[Tensor], works: Callable[[], Sequence[dist.Work]]
    ) -> dist.Work:
        sent = TIMES_SENT.get(kind, 0) * self._share * sum(tensor.nbytes for tensor in full)
        done_at = WIRE.send(sent) if sent else 0.0
        return WireWork(works(), done_at)

    # Method names of torch 2.13.

    @_eager
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @_eager
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        gather = self._gloo._allgather_base
        return self._send(
            "all_gather", outputs, lambda: [gather(o, i) for o, i in zip(outputs, inputs)]
        )

    @_eager
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @_eager
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> dist.Work:
        scatter = self._gloo._reduce_scatter_base
        return self._send(
            "reduce_scatter", inputs, lambda: [scatter(o, i, opts) for o, i in zip(outputs, inputs)]
        )

    # Method names of torch 2.11.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Method names of both versions.

    @_eager
    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._send("all_reduce", tensors, lambda: [self._gloo.allreduce(tensors, opts)])

    @_eager
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._send(
            "all_reduce", tensors, lambda: [self._gloo.allreduce_coalesced(tensors, opts)]
        )

    @_eager
    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._send("broadcast", tensors, lambda: [self._gloo.broadcast(tensors, opts)])

    @_eager
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        full = [tensor for per_input in outputs for tensor in per_input]
        return self._send("all_gather_list", full, lambda: [self._gloo.allgather(outputs, inputs)])

    @_eager
    def barrier(self, opts: Any = None) -> dist.Work:
        return self._send("barrier", [], lambda: [self._gloo.barrier()])

    def getBackendName(self) -> str:
        return BACKEND


def register() -> None:
    dist.Backend.register_backend(BACKEND, WireGroup, devices=["cpu"])


def gather_ahead(model: Any) -> None:
    """Make the all-gathers that FSDP2 prefetches asynchronous on a CPU, as they are on a GPU."""
    model._set_unshard_async_op(True)
