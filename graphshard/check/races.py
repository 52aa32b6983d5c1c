"""Find data races: unordered accesses to the same block.

Each stream has a vector clock, which counts, for every stream, the work items that are done before
this stream's next one begins (Lamport 1978; Fidge, Mattern 1988). Recording an event copies a
stream's clock; waiting for the event merges the copy into another stream's clock. The host issues
all work, so all work that the host has waited for is done before any work that it issues later.

    compute   mm(a) ── record e          a is freed; compute may reuse it at once
    nccl               wait e ── all_gather(a)          unordered: reported
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .actions import HOST, Action, Allocate, Free, Record, RecordStream, WaitEvent, Work


class Access(NamedTuple):
    """A read or write of a block, by the ``number``-th work item on its stream."""

    name: str
    stream: str
    number: int


@dataclass(frozen=True)
class Race:
    """Two unordered accesses to a block, or an access to a block that may be reused too early."""

    block: int
    first: Access
    second: Access | None  # None: the block's memory may be reused while ``first`` runs
    stream: str  # stream of ``second``, or the stream that may reuse the memory

    def __str__(self) -> str:
        if self.second is None:
            return (
                f"block {self.block} is freed while {self.first.name} on stream "
                f"{self.first.stream} may still use it: stream {self.stream} does not wait"
            )
        return (
            f"block {self.block}: {self.second.name} on stream {self.stream} does not wait for "
            f"{self.first.name} on stream {self.first.stream}"
        )


@dataclass
class _Block:
    stream: str
    write: Access | None = None  # last write
    reads: list[Access] = field(default_factory=list)  # reads since the last write
    recorded: set[str] = field(default_factory=set)  # streams passed to ``record_stream``

    def accesses(self) -> list[Access]:
        return [*([self.write] if self.write else []), *self.reads]


Clock = Counter[str]


class _Checker:
    # Vector clocks need a single pass and no path search, unlike a happens-before graph.
    def __init__(self) -> None:
        self.races: list[Race] = []
        self._clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, _Block] = {}

    def take(self, action: Action) -> None:
        match action:
            case Work():
                self._work(action)
            case Allocate(block, _, stream):
                self._blocks[block] = _Block(stream)
            case Free(block):
                self._free(block)
            case Record(event, stream):
                self._events[event] = self._known(stream)
            case WaitEvent(event, stream):
                # An event that was recorded before the step orders nothing in it.
                self._clocks[stream] |= self._events.get(event, Clock())
            case RecordStream(block, stream):
                self._blocks[block].recorded.add(stream)

    def _known(self, stream: str) -> Clock:
        # The clock of the next work on ``stream``. ``|`` of counters is their elementwise maximum.
        return self._clocks[stream] | self._clocks[HOST]

    def _work(self, work: Work) -> None:
        done = self._known(work.stream)
        access = Access(work.name, work.stream, done[work.stream] + 1)
        for number in dict.fromkeys((*work.reads, *work.writes)):
            block = self._blocks[number]
            earlier = block.accesses() if number in work.writes else [block.write]
            for other in earlier:
                if other is not None and done[other.stream] < other.number:
                    self.races.append(Race(number, other, access, work.stream))
            if number in work.writes:
                block.write, block.reads = access, []
            else:
                block.reads.append(access)
        self._clocks[work.stream][work.stream] = access.number

    def _free(self, number: int) -> None:
        """Report accesses that the next owner of the memory would not wait for."""
        block = self._blocks.pop(number)
        done = self._known(block.stream)
        for other in block.accesses():
            in_order = done[other.stream] >= other.number or other.stream in block.recorded
            # Host memory is exempt: its allocator waits for copies (``CachingHostAllocator``).
            if not in_order and block.stream != HOST:
                self.races.append(Race(number, other, None, block.stream))


def find_races(actions: Iterable[Action]) -> list[Race]:
    """Return the races of a step, in the order in which they are found.

    A freed block is assumed to be reused at once on its own stream: the allocator may do that.
    """
    checker = _Checker()
    for action in actions:
        checker.take(action)
    return checker.races
