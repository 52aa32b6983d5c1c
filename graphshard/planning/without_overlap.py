"""The schedule without overlap: each transfer where it is needed or ready, waited for at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..kinds import TransferKind
from .plan import Bucket, Problem, Transfer, bucket_of, in_launch_order, replica_bucket

SMALL_BYTES, SMALL_CAP_BYTES = 1 << 20, 4 << 20
"""The largest transfer that shares a bucket, and the largest shared bucket.

By the cost model a MiB on the wire takes about as long as the fixed cost of a collective, within a
factor of a few: 5 us beside 11 for 8 H100 on NVLink, 36 us beside 103 for 64 on a network. With
larger sizes more is copied into buffers, and nothing hides that; with smaller ones there are more
launches.
"""


def schedule_without_overlap(problem: Problem) -> tuple[Bucket, ...]:
    """Return buckets that are waited for where they are launched; small transfers share them.

    The result depends on the transfers alone, not on predicted times.
    """
    members: list[list[int]] = []
    filling: dict[tuple[str, ...], list[int]] = {}  # by key, the bucket that takes more
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
    """Return whether small transfers may share a bucket: all are ready before one is due."""
    in_time = max(t.ready for t in transfers) <= min(t.due for t in transfers)
    return in_time and sum(t.num_bytes for t in transfers) <= SMALL_CAP_BYTES


def _key(problem: Problem, transfer: Transfer) -> tuple[str, ...] | None:
    """Return what transfers of one bucket have in common; None for one that travels alone."""
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
