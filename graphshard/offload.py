"""When shards that the host keeps are copied to the device, and reduced ones to the host. Pure.

Buckets are cut and placed as if all shards were on the device. Then each bucket that gathers such shards
gets one that copies them, launched as late as it can be to be through in time, behind one another, and
waited for where the gather is launched. What reduces to such shards gets one that is launched where the
reduction is waited for; only the end of the graph waits for it, because the host would stand still.

    to device      [shards of a][shards of b]
    communication               [gather a   ][gather b]              [reduce a]
    to host                                                                    [shards of a]
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence

from .cuts import Group
from .limits import Limits, Room
from .plan import ALL_GATHER, TO_DEVICE, TO_HOST, Bucket, Problem, goes_on
from .simulate import Prices, alive_bytes, clock, cost_of

MARGIN = 2.0
"""A copy that takes this many times longer than predicted is still in time."""


def with_copies(
    problem: Problem, buckets: Sequence[Bucket], prices: Prices | None, limits: Limits
) -> tuple[Bucket, ...]:
    """``buckets`` with copies of the shards that the host keeps, in launch order.

    Args:
        prices: None: a copy is launched where it is waited for.
    """
    after = goes_on(buckets)
    gathers: list[Bucket] = []
    reduced: list[Bucket] = []
    for i, bucket in enumerate(buckets):
        if problem.transfers[bucket.transfers[0]].host and i not in after:
            (gathers if bucket.kind == ALL_GATHER else reduced).append(bucket)
    loads = [_copy(problem, bucket, TO_DEVICE, bucket.launch, bucket.launch) for bucket in gathers]
    stores = [_copy(problem, b, TO_HOST, b.wait, problem.num_steps) for b in reduced]
    if prices is not None:
        loads = _ahead(problem, buckets, loads, prices, limits)
    return tuple(sorted([*loads, *buckets, *stores], key=lambda bucket: bucket.launch))


def _copy(problem: Problem, of: Bucket, kind: str, launch: int, wait: int) -> Bucket:
    num_bytes = sum(problem.transfers[i].shard_bytes for i in of.transfers)
    return Bucket(kind, of.parcels, num_bytes, "", 1, launch, wait)


def _ahead(
    problem: Problem,
    buckets: Sequence[Bucket],
    loads: Sequence[Bucket],
    prices: Prices,
    limits: Limits,
) -> list[Bucket]:
    """``loads``, launched early enough to be through, as far as there is room."""
    start_us = clock(problem, buckets, prices).step_us
    room = Room(alive_bytes(problem, buckets), limits)
    free_us = float("inf")
    placed = []
    for load in reversed(loads):
        cost = cost_of(problem, load, prices)
        free_us = min(free_us, start_us[load.wait]) - MARGIN * cost.wire_us
        wish = max(0, bisect_right(start_us, free_us, hi=load.wait + 1) - 1)
        group = Group(0, 0, load, cost, load.num_bytes, None)
        placed.append(dataclasses.replace(load, launch=room.earliest(group, wish, load.wait)))
    return placed[::-1]
