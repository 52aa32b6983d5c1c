"""A process group that records collectives: a Python class over gloo.

It is registered as the backend "recording" for CPU tensors. Each collective, and each wait for one,
appends an `Event` to a per-process list (`events()`, `clear()`), with which tests check the bytes
and order of collectives, and how many were in flight. `wire()` adds a modelled network: each rank's
wire carries one collective at a time, in alpha + bytes / rate seconds, and a wait sleeps until the
wire is done. The group supports eager FSDP2, DDP, and object and functional collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

BACKEND = "recording"
WAIT = "wait"

Tensors = list[Tensor]


@dataclass(frozen=True)
class Event:
    """A collective, or a wait for one (kind "wait"; other fields as for the collective)."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", ..., or "wait"
    index: int  # number of the collective on this rank since clear(), shared by its waits
    bytes: int  # size of the full buffers: gathered output, unreduced input
    dtype: torch.dtype | None  # dtype of the first tensor; None for a barrier
    group_size: int
    group_name: str
    num_tensors: int = 1  # more than one in a coalesced call


class _Wire:
    def __init__(self, alpha_s: float, bytes_per_s: float) -> None:
        self.alpha_s = alpha_s
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0

    @property
    def instant(self) -> bool:
        return self.alpha_s == 0.0 and math.isinf(self.bytes_per_s)

    def send(self, num_bytes: int) -> float:
        start = max(self.free_at, time.perf_counter())
        self.free_at = start + self.alpha_s + num_bytes / self.bytes_per_s
        return self.free_at


_events: list[Event] = []
_num_collectives = 0
_wire = _Wire(0.0, math.inf)


def clear() -> None:
    global _num_collectives
    _events.clear()
    _num_collectives = 0


def events(*kinds: str) -> list[Event]:
    return [event for event in _events if not kinds or event.kind in kinds]


def collectives() -> list[Event]:
    return [event for event in _events if event.kind != WAIT]


def wire(alpha_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
    """Model a wire for collectives issued from now on: each takes alpha_s + bytes / bytes_per_s.

    Without arguments they take no extra time.
    """
    global _wire
    _wire = _Wire(alpha_s, bytes_per_s)


def max_in_flight(*kinds: str) -> int:
    """Return the largest number of collectives (of `kinds`, if given) issued but not waited for."""
    return _peak(kinds, lambda event: 1)


def max_bytes_in_flight(*kinds: str) -> int:
    """Return the most full-buffer bytes of collectives (of `kinds`) issued but not waited for."""
    return _peak(kinds, lambda event: event.bytes)


def _peak(kinds: Sequence[str], size: Callable[[Event], int]) -> int:
    in_flight: dict[int, int] = {}
    peak = 0
    for event in _events:
        if event.kind == WAIT:
            in_flight.pop(event.index, None)
        elif not kinds or event.kind in kinds:
            in_flight[event.index] = size(event)
            peak = max(peak, sum(in_flight.values()))
    return peak


class _RecordedWork(dist.Work):
    """The gloo works of one collective, completed when all works and the wire are done."""

    def __init__(self, event: Event, works: list[dist.Work], done_at: float | None) -> None:
        super().__init__()
        self._event = event
        self._works = works
        self._done_at = done_at

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            # None and zero mean the group's timeout; gloo would take zero literally.
            work.wait(timeout) if timeout else work.wait()
        self._await_wire()
        _events.append(replace(self._event, kind=WAIT))
        return True

    def is_completed(self) -> bool:
        sent = self._done_at is None or time.perf_counter() >= self._done_at
        return sent and all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()

    def get_future(self) -> Future[Any]:
        """Return the future that DDP waits for instead of the work; records no wait."""
        futures = [work.get_future() for work in self._works]
        future = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        if self._done_at is None:
            return future
        # The callback may block a gloo thread: later collectives have to wait for the wire anyway.
        return future.then(lambda done: (self._await_wire(), done.value())[1])

    def _await_wire(self) -> None:
        if self._done_at is not None:
            time.sleep(max(0.0, self._done_at - time.perf_counter()))


class RecordingProcessGroup(dist.ProcessGroup):
    """Gloo with a log; methods have the names that c10d calls on a Python process group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._num_ranks = size
        # C++ code requires a backend that knows the group's name, devices and store.
        self._register_backend(torch.device("cpu"), self.BackendType.GLOO, self._gloo)
        self._set_default_backend(self.BackendType.GLOO)

    def _record(
        self, kind: str, full: Sequence[Tensor], issue: Callable[[], list[dist.Work]]
    ) -> dist.Work:
        """Record a collective with these full buffers, issue it on gloo, and occupy the wire."""
        global _num_collectives
        num_bytes = sum(tensor.nbytes for tensor in full)
        event = Event(
            kind=kind,
            index=_num_collectives,
            bytes=num_bytes,
            dtype=full[0].dtype if full else None,
            group_size=self._num_ranks,
            group_name=self.group_name,
            num_tensors=len(full),
        )
        _num_collectives += 1
        _events.append(event)
        alone = self._num_ranks == 1
        done_at = None if alone or _wire.instant else _wire.send(num_bytes)
        return _RecordedWork(event, issue(), done_at)

    # Method names of torch 2.13.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        gather = self._gloo._allgather_base
        return self._record(
            "all_gather", outputs, lambda: [gather(o, i) for o, i in zip(outputs, inputs)]
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> dist.Work:
        scatter = self._gloo._reduce_scatter_base
        return self._record(
            "reduce_scatter", inputs, lambda: [scatter(o, i, opts) for o, i in zip(outputs, inputs)]
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        exchange = self._gloo.alltoall_base
        return self._record(
            "all_to_all",
            [input],
            lambda: [exchange(output, input, output_splits, input_splits)],
        )

    # Method names of torch 2.11.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Method names of both versions.

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._record("all_reduce", tensors, lambda: [self._gloo.allreduce(tensors, opts)])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._record(
            "all_reduce", tensors, lambda: [self._gloo.allreduce_coalesced(tensors, opts)]
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._record("broadcast", tensors, lambda: [self._gloo.broadcast(tensors, opts)])

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._record("reduce", tensors, lambda: [self._gloo.reduce(tensors, opts)])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        full = [tensor for per_input in outputs for tensor in per_input]
        return self._record(
            "all_gather_list", full, lambda: [self._gloo.allgather(outputs, inputs)]
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._record("gather", inputs, lambda: [self._gloo.gather(outputs, inputs, opts)])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        return self._record("scatter", outputs, lambda: [self._gloo.scatter(outputs, inputs, opts)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._record("all_to_all", inputs, lambda: [self._gloo.alltoall(outputs, inputs)])

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._record("barrier", [], lambda: [self._gloo.barrier()])

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        return self._record("send", tensors, lambda: [self._gloo.send(tensors, dst, tag)])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        return self._record("recv", tensors, lambda: [self._gloo.recv(tensors, src, tag)])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._record("recv", tensors, lambda: [self._gloo.recv_anysource(tensors, tag)])

    def getBackendName(self) -> str:
        return BACKEND


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, RecordingProcessGroup, devices=["cpu"])
