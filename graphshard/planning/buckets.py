"""Make the buckets of a plan, and sort their launches and waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..kinds import TransferKind
from .plan import Bucket, Problem, Transfer, UserCollective, sent_buffers


def bucket_of(
    problem: Problem,
    buffers: tuple[tuple[int, ...], ...],
    *,
    launch: int,
    wait: int,
    exchanges: bool = False,
) -> Bucket:
    """Return the bucket for ``buffers``, whose transfers have the same kind and group."""
    first = problem.transfers[buffers[0][0]]
    bucket = Bucket(
        kind=first.kind,
        buffers=buffers,
        num_bytes=0,
        group=first.group,
        world=first.world,
        launch=launch,
        wait=wait,
        stride=first.stride,
        exchanges=exchanges,
    )
    sent = sent_buffers(problem.transfers, bucket)
    return dataclasses.replace(bucket, num_bytes=sum(t.num_bytes for buf in sent for t in buf))


def may_exchange(problem: Problem, members: Sequence[int]) -> bool:
    """Return whether all ``members`` may be exchanged (see ``Transfer.exchange_dtype``)."""
    return all(problem.transfers[i].exchange_dtype for i in members)


def shortest_lived(problem: Problem, members: Sequence[int], *, exchanges: bool = False) -> Bucket:
    """Return a one-buffer bucket that holds memory for the shortest possible time.

    It is launched and waited for at one step: the last possible for a fetch, otherwise the first.

    Args:
        exchanges: whether gradients that all have an ``exchange_dtype`` are exchanged.
    """
    transfers = [problem.transfers[i] for i in members]
    if transfers[0].kind.is_fetch:
        step = min(t.due for t in transfers)
    else:
        step = max(t.ready for t in transfers)
    exchanged = exchanges and may_exchange(problem, members)
    return bucket_of(problem, (tuple(members),), launch=step, wait=step, exchanges=exchanged)


def is_copied_in(buffer: Sequence[Transfer]) -> bool:
    """Return whether the transfers of a buffer must be copied into it."""
    return len(buffer) > 1 or buffer[0].copied_in or buffer[0].casts


def replica_bucket(bucket: Bucket, transfers: Sequence[Transfer]) -> Bucket | None:
    """Return the all-reduce over replicas that follows ``bucket``, or None if none follows.

    It reduces the output buffers of ``bucket``; its launch and wait are both ``bucket.wait``.
    """
    reduced = [transfers[i] for i in bucket.transfers]
    first = reduced[0]
    if bucket.kind != TransferKind.REDUCE_SCATTER or not first.replicas:
        return None
    return dataclasses.replace(
        bucket,
        kind=TransferKind.ALL_REDUCE_SHARDS,
        num_bytes=sum(transfer.reduced_bytes for transfer in reduced),
        group=first.replicas,
        world=first.num_replicas,
        stride=first.replica_stride,
        launch=bucket.wait,
        exchanges=False,
    )


class BucketEvent(NamedTuple):
    """A launch or wait of a bucket or user collective.

    Attributes:
        bucket: position in ``Plan.buckets``; user collectives are numbered after the buckets.
    """

    bucket: int
    is_wait: bool


def events_by_step(
    num_steps: int, buckets: Sequence[Bucket], users: Sequence[UserCollective] = ()
) -> list[list[BucketEvent]]:
    """Return the sorted events before each step and, as the last list, at the graph's end."""
    events: list[list[BucketEvent]] = [[] for _ in range(num_steps + 1)]
    launches, waits = [bucket.launch for bucket in buckets], [bucket.wait for bucket in buckets]
    for step, _, _, is_launch, i in sorted_events(launches, waits, next_in_chain(buckets), users):
        events[step].append(BucketEvent(i, is_wait=not is_launch))
    return events


def sorted_events(
    launches: Sequence[int],
    waits: Sequence[int],
    successors: Mapping[int, int],
    users: Sequence[UserCollective] = (),
) -> list[tuple[int, bool, int, bool, int]]:
    """Return the launches and waits of buckets and user collectives, in order.

    Before each step, launches come before waits, both in the order of the buckets. One exception:
    the wait for a bucket with a successor comes right before the successor's launch. User
    collectives come last: the step begins with their launch or wait.

    Args:
        launches: launch step of each bucket.
        waits: wait step of each bucket; equal to the launch step of its successor, if any.
        successors: result of ``next_in_chain``.
        users: user collectives, numbered after the buckets.

    Returns:
        For each event: step, two sort keys, whether it is a launch, and the number of the bucket or
        user collective.
    """
    events = [(launch, False, i, True, i) for i, launch in enumerate(launches)]
    for i, wait in enumerate(waits):
        if i in successors:
            events.append((wait, False, successors[i], False, i))
        else:
            events.append((wait, True, i, False, i))
    for i, user in enumerate(users, len(launches)):
        events += [(user.launch, True, i, True, i), (user.wait, True, i, False, i)]
    events.sort()
    return events


# Order of the kinds in a chain of buckets with the same buffers.
_CHAIN = (
    TransferKind.COPY_TO_DEVICE,
    TransferKind.ALL_GATHER,
    TransferKind.REDUCE_SCATTER,
    TransferKind.ALL_REDUCE,
    TransferKind.ALL_REDUCE_MAX,
    TransferKind.ALL_REDUCE_SHARDS,
    TransferKind.COPY_TO_HOST,
)


def next_in_chain(buckets: Sequence[Bucket]) -> dict[int, int]:
    """Map each bucket's position to that of the next bucket with the same buffers.

    Shards are copied to the device, then gathered; gradients are reduced, then averaged over
    replicas, then copied to the host. The last bucket of a chain has no entry.
    """
    chains: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i, bucket in enumerate(buckets):
        chains.setdefault(bucket.buffers, []).append(i)
    successors: dict[int, int] = {}
    for stages in chains.values():
        successors.update(pairwise(sorted(stages, key=lambda i: _CHAIN.index(buckets[i].kind))))
    return successors


def in_launch_order(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return ``buckets``, sorted by the step at which they are launched."""
    return tuple(sorted(buckets, key=lambda bucket: bucket.launch))
