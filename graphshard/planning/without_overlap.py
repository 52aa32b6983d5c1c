"""Build the schedule without overlap: launch transfers when needed or ready, and wait at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..kinds import TransferKind
from .plan import Bucket, Problem, Transfer, bucket_of, in_launch_order, replica_bucket

SMALL_BYTES, SMALL_CAP_BYTES = 1 << 20, 4 << 20
"""Largest transfer that shares a bucket, and largest shared bucket.

By the cost model, 1 MiB on the wire takes about as long as the fixed cost of a collective, within a
factor of a few: 5 us compared with 11 us on 8 H100 with NVLink, 36 us compared with 103 us on 64
over a network. Larger sizes copy more into buffers, which nothing hides; smaller sizes need more
launches.
"""


def schedule_without_overlap(problem: Problem) -> tuple[Bucket, ...]:
    """Return buckets that are waited for at their launch; small transfers share buckets.

    The result depends only on the transfers, not on predicted times.
    """
    members: list[list[int]] = []
    filling: dict[tuple[str, ...], list[int]] = {}  # by key: the bucket that is being filled
    for i, transfer in enumerate(problem.transfers):
        key = _key(problem, transfer)
        if key is None:
            members.append([i])
            continue
        bucket = filling.get(key)
        if bucket and _fits([*(problem.transfers[j] for j in bucket), transfer]):
            bucket.append(i)
        else:
            filling[key] = [i]
            members.append(filling[key])
    buckets = [_bucket(problem, bucket) for bucket in members]
    averages = [replica_bucket(bucket, problem.transfers) for bucket in buckets]
    return in_launch_order([*buckets, *filter(None, averages)])


def _fits(transfers: Sequence[Transfer]) -> bool:
    """Return whether small transfers fit into a bucket, and all are ready before one is due."""
    in_time = max(t.ready for t in transfers) <= min(t.due for t in transfers)
    return in_time and sum(t.num_bytes for t in transfers) <= SMALL_CAP_BYTES


def _key(problem: Problem, transfer: Transfer) -> tuple[str, ...] | None:
    """Return a key that is equal for transfers that may share a bucket; None: it travels alone."""
    used_in_graph = transfer.kind != TransferKind.ALL_GATHER and transfer.due < problem.num_steps
    if used_in_graph or transfer.num_bytes > SMALL_BYTES:
        return None
    return (
        transfer.kind,
        transfer.group,
        transfer.replicas,
        transfer.dtype,
        str(transfer.host),
    )


def _bucket(problem: Problem, members: list[int]) -> Bucket:
    transfers = [problem.transfers[i] for i in members]
    if transfers[0].kind == TransferKind.ALL_GATHER:
        step = min(t.due for t in transfers)
    else:
        step = max(t.ready for t in transfers)
    return bucket_of(problem, (tuple(members),), launch=step, wait=step)
