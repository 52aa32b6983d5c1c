"""Bytes alive at each point in time of a graph, for a given list of buckets.

Each step has three points: buckets are launched before it (with copy-in), buckets are waited for
before it (with copy-out), and its nodes run. The graph's end has the first two:

    point    0 launches  1 waits  2 step 0   3 launches  4 waits  5 step 1   6 launches  7 waits

A gather allocates memory at its launch, for packed and received data, and at its wait, for copies
out of shared buffers. A reduction packs gradients at its launch, then frees them; its wait frees
the sent data, except after an all-reduce, which is in place. A tensor that is alone in its buffer
is not copied out, and is packed only to be cast, padded or made contiguous.

    parameters   shards ──► packed ~~~► full ──► copies    gradients   grads ──► packed ~~~► shards
                     launch ┴─────┴ wait                           launch ┴──────────┴ wait
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ..kinds import TransferKind
from .buckets import is_copied_in, replica_bucket, shortest_lived
from .plan import Bucket, Problem, Transfer, sent_buffers


def launches(step: int) -> int:
    """Return the point at which buckets are launched before ``step``."""
    return 3 * step


def waits(step: int) -> int:
    """Return the point at which buckets are waited for before ``step``."""
    return 3 * step + 1


def running(step: int) -> int:
    """Return the point at which the nodes of ``step`` run."""
    return 3 * step + 2


def num_points(num_steps: int) -> int:
    """Return the number of points of a graph with ``num_steps`` steps."""
    return running(num_steps)


class Span(NamedTuple):
    """Bytes alive over the range ``[begin, end)`` of points or steps."""

    begin: int
    end: int
    num_bytes: int


# Bytes allocated (or, if negative, freed) at each point, and after the last one. Their running sum
# is the bytes alive.
ByteChanges = list[int]


class LiveBytes:
    """Bytes alive at each point, updated span by span."""

    def __init__(self, by_point: Iterable[int]) -> None:
        self.by_point = list(by_point)

    def add(self, span: Span) -> None:
        for point in range(span.begin, span.end):
            self.by_point[point] += span.num_bytes

    def remove(self, span: Span) -> None:
        self.add(span._replace(num_bytes=-span.num_bytes))

    def has_room(self, span: Span, budget: float) -> bool:
        return not self.exceeds(budget - span.num_bytes, span)

    def exceeds(self, budget: float, span: Span) -> bool:
        return any(num_bytes > budget for num_bytes in self.by_point[span.begin : span.end])


def sum_spans(spans: Iterable[Span], length: int) -> list[int]:
    """Return, for each of ``length`` points or steps, the bytes of all spans that include it."""
    changes = [0] * (length + 1)
    for begin, end, num_bytes in spans:
        if begin < end:
            changes[begin] += num_bytes
            changes[end] -= num_bytes
    return list(accumulate(changes[:-1]))


def max_by_step(by_point: Sequence[int]) -> list[int]:
    """Return the maximum of each step's points; the last step includes the graph's end."""
    num_steps = len(by_point) // 3
    ends = [launches(step + 1) for step in range(num_steps - 1)] + [len(by_point)]
    return [max(by_point[launches(step) : end]) for step, end in zip(range(num_steps), ends)]


class Footprint(NamedTuple):
    """Changes that one bucket makes to the bytes alive; negative numbers free memory.

    Attributes:
        in_flight_bytes: ``Bucket.num_bytes``, in flight between launch and wait.
        at_launch: packed and received bytes, and shards from the host that are not packed. If
            gradients are packed, only the packed bytes.
        after_launch: if gradients are packed, received bytes minus the gradients; otherwise 0.
        at_wait: copies, sums and casts of the received data, minus the sent data.
        after_wait: minus the received bytes that were copied out, summed or cast, and minus the
            bytes sent to the host.
    """

    in_flight_bytes: int
    at_launch: int = 0
    after_launch: int = 0
    at_wait: int = 0
    after_wait: int = 0

    def launch(self, changes: ByteChanges, step: int) -> None:
        changes[launches(step)] += self.at_launch
        changes[waits(step)] += self.after_launch

    def wait(self, changes: ByteChanges, step: int) -> None:
        changes[waits(step)] += self.at_wait
        changes[running(step)] += self.after_wait


def footprint(problem: Problem, bucket: Bucket) -> Footprint:
    """Return the memory changes that depend on when ``bucket`` is launched and waited for.

    ``count_transfers`` counts the others, such as full parameters freed after their last use.
    """
    # A collective of host shards is counted as if its host copies took no time.
    if bucket.kind == TransferKind.COPY_TO_DEVICE:
        return Footprint(bucket.num_bytes, at_launch=bucket.num_bytes)
    if bucket.kind == TransferKind.COPY_TO_HOST:
        return Footprint(bucket.num_bytes, after_wait=-bucket.num_bytes)
    part_of = {
        TransferKind.ALL_GATHER: _gather_footprint,
        TransferKind.REDUCE_SCATTER: _reduction_footprint,
        TransferKind.ALL_REDUCE: _reduction_footprint,
        TransferKind.ALL_REDUCE_MAX: _reduction_footprint,
        TransferKind.ALL_REDUCE_SHARDS: _average_footprint,
    }[bucket.kind]
    buffers = sent_buffers(problem.transfers, bucket)
    return Footprint(*map(sum, zip(*map(part_of, buffers))))


def _gather_footprint(buffer: Sequence[Transfer]) -> Footprint:
    full = sum(t.num_bytes for t in buffer)
    copies = full if len(buffer) > 1 else 0
    from_host = sum(t.shard_bytes for t in buffer if t.host)
    is_packed = is_copied_in(buffer)
    packed = full // buffer[0].world if is_packed else 0
    return Footprint(
        in_flight_bytes=full,
        # Packed copies of host shards are freed before the full parameters are allocated.
        at_launch=packed + full + (0 if is_packed else from_host),
        at_wait=copies - packed - (0 if is_packed else from_host),
        after_wait=-copies,
    )


def _reduction_footprint(buffer: Sequence[Transfer]) -> Footprint:
    sent, grads = sum(t.num_bytes for t in buffer), sum(t.grad_bytes for t in buffer)
    is_packed = is_copied_in(buffer)  # otherwise the gradient itself is sent
    is_split = buffer[0].kind == TransferKind.REDUCE_SCATTER  # all-reduces are in place
    reduced = sum(t.reduced_bytes for t in buffer) if is_split else 0
    exchanges = bool(buffer[0].summed_in)
    received = sent if exchanges else reduced
    averaged = bool(buffer[0].replicas)
    results = Footprint(0) if averaged else _results_footprint(buffer, reduced or sent)
    return Footprint(
        in_flight_bytes=sent,
        at_launch=sent if is_packed else received,
        # Packed gradients are freed before the results are allocated.
        after_launch=received - grads if is_packed else 0,
        at_wait=results.at_wait
        - ((sent if is_packed else grads) if is_split else 0)
        + (reduced if exchanges else 0),
        after_wait=results.after_wait - (received if exchanges else 0),
    )


def _average_footprint(buffer: Sequence[Transfer]) -> Footprint:
    shards = sum(t.reduced_bytes for t in buffer)
    # The all-reduce over replicas is in place.
    return _results_footprint(buffer, shards)._replace(in_flight_bytes=shards)


def _results_footprint(buffer: Sequence[Transfer], received: int) -> Footprint:
    """Return the footprint of casting reduced shards, and of freeing shards sent to the host."""
    shards = sum(t.shard_bytes for t in buffer)
    cast = shards if shards != received else 0
    to_host = shards if buffer[0].host else 0
    return Footprint(0, at_wait=cast, after_wait=-(received if cast else 0) - to_host)


def count_transfers(changes: ByteChanges, transfers: Iterable[Transfer]) -> None:
    """Add to ``changes`` the schedule-independent memory changes of ``transfers``."""
    for t in transfers:
        # A full parameter is freed after its last use; a gradient is allocated when it is ready.
        if t.kind.is_fetch:
            changes[launches(t.last + 1)] -= t.num_bytes
        elif t.kind == TransferKind.COPY_TO_HOST:
            changes[launches(t.ready)] += t.num_bytes
        else:
            changes[launches(t.ready)] += t.grad_bytes


def fixed_by_point(problem: Problem) -> list[int]:
    """Return the schedule-independent bytes alive at each point in time."""
    by_point = [0] * num_points(problem.num_steps)
    by_point[0::3] = by_point[1::3] = problem.fixed_boundary_bytes
    by_point[2::3] = problem.fixed_bytes
    return by_point


def with_fixed_bytes(problem: Problem, by_point: Sequence[int]) -> Problem:
    """Return ``problem`` with ``by_point`` as its schedule-independent bytes."""
    return dataclasses.replace(
        problem, fixed_bytes=tuple(by_point[2::3]), fixed_boundary_bytes=tuple(by_point[0::3])
    )


def alive_bytes(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the peak bytes of each step, over its launches, waits and nodes.

    The bytes include ``fixed_bytes``. The last step includes the end of the graph.
    """
    return max_by_step(alive_by_point(problem, buckets))


def alive_by_point(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the bytes alive at each point in time."""
    changes = [0] * (num_points(problem.num_steps) + 1)
    for bucket in buckets:
        taken = footprint(problem, bucket)
        taken.launch(changes, bucket.launch)
        taken.wait(changes, bucket.wait)
        transfers = [problem.transfers[i] for i in bucket.transfers]
        if transfers[0].kind == bucket.kind:
            count_transfers(changes, transfers)
        elif bucket.kind == TransferKind.COPY_TO_DEVICE:  # from here on, the gather counts them
            changes[launches(bucket.wait)] -= bucket.num_bytes
        elif bucket.kind == TransferKind.COPY_TO_HOST:  # up to here, the reduction counts them
            changes[running(bucket.launch)] += bucket.num_bytes
    return list(map(add, fixed_by_point(problem), accumulate(changes)))


def gathered_bytes(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the bytes of full parameters in each step, from gather launch to last use."""
    spans = (
        Span(bucket.launch, problem.transfers[i].last + 1, problem.transfers[i].num_bytes)
        for bucket in buckets
        if bucket.kind == TransferKind.ALL_GATHER
        for i in bucket.transfers
    )
    return sum_spans(spans, problem.num_steps)


def in_flight_bytes(problem: Problem, buckets: Iterable[Bucket]) -> list[int]:
    """Return the bytes of all buckets between launch and wait, in each step."""
    spans = (Span(bucket.launch, bucket.wait, bucket.num_bytes) for bucket in buckets)
    return sum_spans(spans, problem.num_steps)


def least_by_point(problem: Problem, *, exchanges: bool = False) -> list[int]:
    """Return the bytes alive at each point in time with the smallest, shortest-lived buckets.

    Args:
        exchanges: whether gradients with an ``exchange_dtype`` are exchanged, which takes less
            memory.
    """
    numbers = range(len(problem.transfers))
    buckets = [shortest_lived(problem, [i], exchanges=exchanges) for i in numbers]
    averages = filter(None, (replica_bucket(bucket, problem.transfers) for bucket in buckets))
    return alive_by_point(problem, [*buckets, *averages])


def smallest_peak(problem: Problem, *, exchanges: bool = False) -> int:
    """Return the smallest peak memory of any schedule of ``problem``, in bytes.

    For ``exchanges``, see ``least_by_point``.
    """
    return max(least_by_point(problem, exchanges=exchanges), default=0)
