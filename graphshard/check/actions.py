"""Actions that a training step asks of a device, in the order in which the host asks for them.

A *block* is one allocation. Work on one stream is done in order; work on two streams is in no order
unless one of them waits for an event that the other has recorded. What the host itself reads and
writes stands on the stream `HOST`.

    Allocate(0)  Work("copy_in", compute)  Record(e, compute)  WaitEvent(e, nccl)
    Work("all_gather", nccl)  Record(f, nccl)  WaitEvent(f, compute)  Work("mm", compute)  Free(0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

HOST = "host"
"""The stream of what the host itself does."""


@dataclass(frozen=True)
class Allocate:
    """Memory that an allocator hands out.

    Attributes:
        block: number of the allocation; each has its own.
        num_bytes: as asked for.
        stream: the one whose allocations may get the memory once it is freed; `HOST`: host memory.
    """

    block: int
    num_bytes: int
    stream: str


@dataclass(frozen=True)
class Free:
    """Nobody refers to a block any more, or its size changes: the next allocation of its stream may
    get the memory."""

    block: int


@dataclass(frozen=True)
class Work:
    """A kernel, a copy or a collective.

    Attributes:
        name: of the kernel or operator.
        reads: blocks.
        writes: blocks.
        kernels: that it is on a device; 0 of a collective, of a copy to or from the host, and of
            what the host does.
        blocks_host: whether the host stands still until it is done.
    """

    name: str
    stream: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    kernels: int = 0
    blocks_host: bool = False


@dataclass(frozen=True)
class Record:
    """An event that is reached once all work so far on ``stream`` is done."""

    event: int
    stream: str


@dataclass(frozen=True)
class WaitEvent:
    """Later work on ``stream`` waits for an event; the host's own, if it is `HOST`."""

    event: int
    stream: str


@dataclass(frozen=True)
class RecordStream:
    """The allocator is told that ``stream`` uses a block, too: once freed, the block is handed out
    again only when the work so far on that stream is done."""

    block: int
    stream: str


Action: TypeAlias = Allocate | Free | Work | Record | WaitEvent | RecordStream
