"""A process group that records collectives: gloo with a log.

It is registered as the backend "recording" for CPU tensors. Each collective, and each wait for one,
appends an `Event` to a per-process list (`events()`, `clear()`), with which tests check the bytes
and order of collectives, and how many were in flight. `wire()` adds a modelled network: each rank's
wire carries one collective at a time, in alpha + bytes / rate seconds, and a wait sleeps until the
wire is done. The group supports eager FSDP2, DDP, and object and functional collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard._torch.modelled_wire import ModelledWire, Tensors, WireGroup, WireWork

BACKEND = "recording"
WAIT = "wait"


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


_events: list[Event] = []
_num_collectives = 0
_wire = ModelledWire()


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
    _wire = ModelledWire(alpha_s, bytes_per_s)


def max_in_flight() -> int:
    """Return the largest number of collectives issued but not waited for."""
    in_flight: set[int] = set()
    peak = 0
    for event in _events:
        if event.kind == WAIT:
            in_flight.discard(event.index)
        else:
            in_flight.add(event.index)
            peak = max(peak, len(in_flight))
    return peak


class _RecordedWork(WireWork):
    def __init__(self, event: Event, works: Sequence[dist.Work], done_at: float) -> None:
        super().__init__(works, done_at)
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        _events.append(replace(self._event, kind=WAIT))
        return True

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()


class RecordingProcessGroup(WireGroup):
    def _send(
        self, kind: str, full: Sequence[Tensor], works: Callable[[], Sequence[dist.Work]]
    ) -> dist.Work:
        global _num_collectives
        num_bytes = sum(tensor.nbytes for tensor in full)
        event = Event(
            kind=kind,
            index=_num_collectives,
            bytes=num_bytes,
            dtype=full[0].dtype if full else None,
            group_size=self.size(),
            group_name=self.group_name,
            num_tensors=len(full),
        )
        _num_collectives += 1
        _events.append(event)
        done_at = _wire.send(num_bytes) if self.size() > 1 else 0.0
        return _RecordedWork(event, works(), done_at)

    # Collectives that WireGroup lacks, under the names that c10d calls.

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        exchange = self._gloo.alltoall_base
        return self._send(
            "all_to_all",
            [input],
            lambda: [exchange(output, input, output_splits, input_splits)],
        )

    alltoall_base = all_to_all_single  # in torch 2.11

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._send("reduce", tensors, lambda: [self._gloo.reduce(tensors, opts)])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._send("gather", inputs, lambda: [self._gloo.gather(outputs, inputs, opts)])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        return self._send("scatter", outputs, lambda: [self._gloo.scatter(outputs, inputs, opts)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._send("all_to_all", inputs, lambda: [self._gloo.alltoall(outputs, inputs)])

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        return self._send("send", tensors, lambda: [self._gloo.send(tensors, dst, tag)])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        return self._send("recv", tensors, lambda: [self._gloo.recv(tensors, src, tag)])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._send("recv", tensors, lambda: [self._gloo.recv_anysource(tensors, tag)])

    def getBackendName(self) -> str:
        return BACKEND


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, RecordingProcessGroup, devices=["cpu"])
