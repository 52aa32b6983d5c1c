"""The bytes that are alive in each step of a graph: spans of steps, and what sums and changes them.

All accounting of memory in this room goes through ``Span``: functions of a schedule
(``alive_bytes``, ``gathered_bytes``, ``in_flight_bytes``) sum spans, ``LiveBytes`` changes a sum in
place while something is being placed, and ``ByteChanges`` holds one in the form in which adding a
span takes constant time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import add
from typing import NamedTuple

from ..kinds import HOST_COPIES, TransferKind
from .plan import Bucket, Problem, Transfer, bucket_of


class Span(NamedTuple):
    """Bytes that are alive in steps ``[begin, end)``; an empty range holds none."""

    begin: int
    end: int
    num_bytes: int


class Footprint(NamedTuple):
    """The memory that a bucket takes in each step between its launch and its wait.

    Attributes:
        in_flight_bytes: full tensors that travel.
        held_bytes: bytes that are alive then, and would not be if the bucket took no time. These
            exclude reduced shards on the device, since they replace a part of the gradients.
    """

    in_flight_bytes: int
    held_bytes: int


class ByteChanges:
    """Live bytes as differences from each step to the next; their running sum is the bytes."""

    __slots__ = ("_changes",)

    def __init__(self, num_steps: int) -> None:
        self._changes = [0] * (num_steps + 1)

    def copy(self) -> ByteChanges:
        other = ByteChanges(0)
        other._changes = self._changes.copy()
        return other

    def begin(self, step: int, num_bytes: int) -> None:
        """Add bytes from ``step`` on."""
        self._changes[step] += num_bytes

    def end(self, step: int, num_bytes: int) -> None:
        """Take bytes away from ``step`` on."""
        self._changes[step] -= num_bytes

    def by_step(self) -> Iterator[int]:
        """Yield the bytes of each step."""
        return islice(accumulate(self._changes), len(self._changes) - 1)


class LiveBytes:
    """Bytes alive in each step, changed span by span.

    Attributes:
        by_step: the bytes of each step.
    """

    def __init__(self, by_step: Iterable[int]) -> None:
        self.by_step = list(by_step)

    def add(self, span: Span) -> None:
        for step in range(span.begin, span.end):
            self.by_step[step] += span.num_bytes

    def remove(self, span: Span) -> None:
        self.add(span._replace(num_bytes=-span.num_bytes))

    def has_room(self, span: Span, budget: float) -> bool:
        """Return whether ``span`` could be added with no step in it above ``budget`` bytes."""
        return not self.exceeds(budget - span.num_bytes, span)

    def exceeds(self, budget: float, span: Span) -> bool:
        """Return whether a step in the range of ``span`` holds more than ``budget`` bytes."""
        return any(num_bytes > budget for num_bytes in self.by_step[span.begin : span.end])


def bytes_by_step(spans: Iterable[Span], num_steps: int) -> list[int]:
    """Return, for each of ``num_steps`` steps, the bytes of all spans that include it."""
    changes = ByteChanges(num_steps)
    for begin, end, num_bytes in spans:
        if begin < end:
            changes.begin(begin, num_bytes)
            changes.end(end, num_bytes)
    return list(changes.by_step())


def alive_bytes(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the bytes alive in each step, ``Problem.other_bytes`` included.

    Gathered parameters live from launch to last use, gradients from their completion to the end of
    their reduction, reduced shards from then on. Shards whose home is the host are on the device
    only until they are gathered, or until their host copy is done.
    """
    spans = (span for bucket in buckets for span in _alive_spans(problem, bucket))
    return list(map(add, problem.other_bytes, bytes_by_step(spans, problem.num_steps)))


def _alive_spans(problem: Problem, bucket: Bucket) -> Iterator[Span]:
    transfers = [problem.transfers[i] for i in bucket.transfers]
    launch, wait = bucket.launch, bucket.wait
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        return  # in place, in the buffers of the reduce-scatter
    if bucket.kind in HOST_COPIES and any(t.kind != bucket.kind for t in transfers):
        yield Span(launch, wait, bucket.num_bytes)  # shards; transfers are those of the collective
        return
    for t in transfers:
        if bucket.kind == TransferKind.COPY_TO_DEVICE:
            yield Span(launch, t.last + 1, t.num_bytes)
        elif bucket.kind == TransferKind.COPY_TO_HOST:
            yield Span(t.ready, wait, t.num_bytes)
        elif bucket.kind == TransferKind.ALL_GATHER:
            yield Span(launch, t.last + 1, t.num_bytes)
            if t.host:
                yield Span(launch, wait, t.shard_bytes)
        else:
            yield Span(t.ready, wait, t.num_bytes)
            if not t.host:
                yield Span(wait, problem.num_steps, t.shard_bytes)


def gathered_bytes(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the bytes of full parameters in each step, from the launch of a gather to last use."""
    spans = (
        Span(bucket.launch, problem.transfers[i].last + 1, problem.transfers[i].num_bytes)
        for bucket in buckets
        if bucket.kind == TransferKind.ALL_GATHER
        for i in bucket.transfers
    )
    return bytes_by_step(spans, problem.num_steps)


def in_flight_bytes(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the bytes of all buckets between launch and wait, in each step."""
    spans = (Span(bucket.launch, bucket.wait, bucket.num_bytes) for bucket in buckets)
    return bytes_by_step(spans, problem.num_steps)


def least_bytes(problem: Problem) -> list[int]:
    """Return the bytes of each step where every transfer is alone, as late and short as can be."""
    buckets = []
    for i, t in enumerate(problem.transfers):
        step = t.due if t.kind == TransferKind.ALL_GATHER else t.ready
        buckets.append(bucket_of(problem, ((i,),), launch=step, wait=step))
    return alive_bytes(problem, buckets)


def smallest_peak(problem: Problem) -> int:
    """Return the least peak of any schedule of ``problem``, in bytes."""
    return max(least_bytes(problem), default=0)


def held_bytes(transfer: Transfer) -> int:
    """Return the bytes that ``transfer`` holds while it is under way; see ``Footprint``.

    A gather holds its full parameter, and the shard if that came from the host. A reduction holds
    the full gradient, of which the shard stays unless its home is the host.
    """
    if transfer.kind == TransferKind.ALL_GATHER:
        return transfer.num_bytes + transfer.host * transfer.shard_bytes
    return transfer.num_bytes - (not transfer.host) * transfer.shard_bytes


def footprint(transfers: Sequence[Transfer]) -> Footprint:
    """Return the footprint of a collective that carries ``transfers``."""
    return Footprint(sum(t.num_bytes for t in transfers), sum(map(held_bytes, transfers)))
