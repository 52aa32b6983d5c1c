"""Actions of a training step on a device, in the order in which the host issues them.

A *block* is one allocation. Work on one stream runs in order; work on two streams is unordered
unless one stream waits for an event recorded on the other. The host's own reads and writes are work
on the stream ``HOST``.

    Allocate(0)  Work("copy_in", compute)  Record(e, compute)  WaitEvent(e, nccl)
    Work("all_gather", nccl)  Record(f, nccl)  WaitEvent(f, compute)  Work("mm", compute)  Free(0)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

HOST = "host"  # stream of the host's own work


@dataclass(frozen=True)
class Allocate:
    """An allocation of a new block."""

    block: int  # number of the allocation, never reused
    num_bytes: int  # requested size, not rounded
    stream: str  # stream on which later allocations may reuse the memory; ``HOST`` for host memory


@dataclass(frozen=True)
class Free:
    """The end of a block: its last reference was dropped, or its size changed.

    The next allocation on its stream may reuse the memory.
    """

    block: int


@dataclass(frozen=True)
class Work:
    """A kernel, a copy, a collective, or the host's own work, such as a wait for the device."""

    name: str  # name of the kernel or operator
    stream: str
    reads: tuple[int, ...] = ()  # blocks
    writes: tuple[int, ...] = ()
    # Number of device kernels; 0 for collectives, copies to or from the host, and work of the host.
    kernels: int = 0
    blocks_host: bool = False  # whether the host blocks until the work is done


@dataclass(frozen=True)
class Record:
    """An event that completes once all earlier work on ``stream`` is done."""

    event: int
    stream: str


@dataclass(frozen=True)
class WaitEvent:
    """A wait for an event by later work on ``stream`` or, with ``HOST``, by the host itself."""

    event: int
    stream: str


@dataclass(frozen=True)
class RecordStream:
    """A call to ``record_stream``: ``stream`` also uses the block.

    After the block is freed, its memory is reused only once all earlier work on ``stream`` is done.
    """

    block: int
    stream: str


Action: TypeAlias = Allocate | Free | Work | Record | WaitEvent | RecordStream


class Launch(NamedTuple):
    """A launched collective or group of host copies."""

    op: str
    group: str  # name of the process group; "" for host copies


@dataclass
class GraphCall:
    """One call to a graph."""

    launches: list[Launch] = field(default_factory=list)
    # Launches and waits, as ``i`` for launch ``i`` and ``~i`` for the first wait for it.
    order: list[int] = field(default_factory=list)
    arguments: tuple[int, ...] = ()  # blocks of the arguments
    actions: tuple[int, int] = (0, 0)  # start and stop positions of the call's actions

    def launch(self, launch: Launch) -> int:
        self.launches.append(launch)
        self.order.append(len(self.launches) - 1)
        return self.order[-1]

    def wait(self, number: int) -> None:
        if ~number not in self.order:  # further waits for the same launch do nothing
            self.order.append(~number)
