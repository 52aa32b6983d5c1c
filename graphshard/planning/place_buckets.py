"""Place the buckets of the first rank's plan in this rank's graph, in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

from ..errors import BackendError
from ..kinds import HOST_COPIES, TransferKind
from .offload import without_host_copies
from .plan import Bucket, Plan, PlanParam, Problem, Transfer


class _LaunchRange(NamedTuple):
    """Steps at which a bucket can be launched without changing the order of launches."""

    earliest: int
    latest: int


def place_buckets(problem: Problem, params: Sequence[PlanParam], plan: Plan) -> tuple[Bucket, ...]:
    """Return the collectives of ``plan`` in order, with launches and waits that fit ``problem``.

    A bucket keeps its position among the user collectives. Its launch moves to the nearest step at
    which its transfers are ready in ``problem`` and not yet due. Its wait moves to the step at
    which the bucket is due. If that is the end of the graph, the wait stays, or moves to the launch
    if the launch is later. The wait for a reduction that is then averaged over replicas moves to
    the launch of the average.

    Args:
        plan: first rank's plan for the same transfers, possibly in a different order and with
            different steps. ``PlanParam.input`` already refers to this rank's graph inputs.

    Raises:
        BackendError: ``problem`` has different transfers or user collectives, or does not allow
            their order.
    """
    _check_user_collectives(problem, plan.problem)
    end, buckets = problem.num_steps, _buckets_for(problem, params, plan)
    bucket_transfers = [[problem.transfers[i] for i in bucket.transfers] for bucket in buckets]
    due = [min([end, *(t.due for t in transfers)]) for transfers in bucket_transfers]
    sections = [_section(problem, plan, bucket) for bucket in buckets]
    ranges = _launch_ranges(bucket_transfers, due, sections)
    placed: list[Bucket] = []
    for bucket, bounds, wait in zip(buckets, ranges, due):
        if bounds.earliest > bounds.latest:
            raise BackendError(
                f"the {problem.graph} graph cannot follow the first rank's plan: {bucket} cannot "
                f"be launched before step {bounds.earliest}, but must be by step {bounds.latest}. "
                "Use the same model and similar batches on all ranks"
            )
        launch = min(max(bucket.launch, bounds.earliest), bounds.latest)
        wait = wait if wait < end else min(max(bucket.wait, launch), end)
        placed.append(dataclasses.replace(bucket, launch=launch, wait=wait))
    return tuple(_waited_before_replicas(bucket, placed) for bucket in placed)


def _check_user_collectives(problem: Problem, theirs: Problem) -> None:
    names = [
        [f"{i}: {user}" for i, user in enumerate(some.user_collectives)]
        for some in (problem, theirs)
    ]
    for our, their in zip_longest(*names, fillvalue="none"):
        if our != their:
            raise BackendError(
                f"this rank's {problem.graph} graph and the first rank's have different user "
                f"collectives: {our} instead of {their}. The forward must call the same "
                "collectives in the same order on all ranks"
            )


def _section(problem: Problem, plan: Plan, bucket: Bucket) -> _LaunchRange:
    """Return the steps between the same user collectives as the bucket's launch in ``plan``."""
    number, users = plan.problem.num_user_launches(bucket.launch), problem.user_collectives
    return _LaunchRange(
        earliest=users[number - 1].launch + 1 if number else 0,
        latest=users[number].launch if number < len(users) else problem.num_steps,
    )


def _buckets_for(problem: Problem, params: Sequence[PlanParam], plan: Plan) -> list[Bucket]:
    collectives = without_host_copies(plan.problem).transfers
    ours = _positions(problem.transfers)
    theirs = _positions(_numbered(collectives, plan.params, params))
    if {t: len(positions) for t, positions in ours.items()} != {
        t: len(positions) for t, positions in theirs.items()
    }:
        raise BackendError(
            f"this rank's {problem.graph} graph does not gather and reduce the same parameters, in "
            "the same dtypes and sizes, as the first rank's: use the same model and options, and "
            "similar batches, on all ranks"
        )
    moved = {i: j for t, positions in theirs.items() for i, j in zip(positions, ours[t])}
    return [
        dataclasses.replace(b, buffers=tuple(tuple(moved[i] for i in buf) for buf in b.buffers))
        for b in plan.buckets
        if b.kind not in HOST_COPIES
    ]


def _numbered(
    transfers: Sequence[Transfer], theirs: Sequence[PlanParam], ours: Sequence[PlanParam]
) -> list[Transfer]:
    """Return ``transfers`` with the positions of their parameters in ``ours``, or -1 if missing."""
    numbers = {param.input: i for i, param in enumerate(ours)}
    return [
        t
        if t.param is None
        else dataclasses.replace(t, param=numbers.get(theirs[t.param].input, -1))
        for t in transfers
    ]


def _positions(transfers: Sequence[Transfer]) -> dict[Transfer, list[int]]:
    positions: dict[Transfer, list[int]] = {}
    for i, transfer in enumerate(transfers):
        # Transfers that differ only in steps share a key and are matched in order.
        positions.setdefault(_without_steps(transfer), []).append(i)
    return positions


def _launch_ranges(
    bucket_transfers: Sequence[Sequence[Transfer]],
    due: Sequence[int],
    sections: Sequence[_LaunchRange],
) -> list[_LaunchRange]:
    ready = (max(t.ready for t in transfers) for transfers in bucket_transfers)
    # Buckets are in launch order: none may be launched before an earlier one, or after a later one.
    earliest = accumulate(map(max, ready, (section.earliest for section in sections)), max)
    last = [min(step, section.latest) for step, section in zip(due, sections)]
    latest = list(accumulate(reversed(last), min))[::-1]
    return [_LaunchRange(*bounds) for bounds in zip(earliest, latest)]


def _waited_before_replicas(bucket: Bucket, buckets: Sequence[Bucket]) -> Bucket:
    """Return ``bucket`` with its wait moved to the launch of its shards' all-reduce, if any."""
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        return bucket
    averages = [
        other
        for other in buckets
        if other.kind == TransferKind.ALL_REDUCE_SHARDS and other.buffers == bucket.buffers
    ]
    return dataclasses.replace(bucket, wait=averages[0].launch) if averages else bucket


def _without_steps(transfer: Transfer) -> Transfer:
    """Return ``transfer`` with constants for the fields that may differ between ranks."""
    return dataclasses.replace(
        transfer,
        ready=0,
        due=0,
        last=0,
        stride=1,
        replica_stride=1,
        grad_bytes=0,
        copied_in=False,
    )
