"""When shards that the host keeps are copied to the device, and reduced ones to the host. Pure.

Buckets are cut and placed as if all shards were on the device. Then each bucket that gathers such shards
gets one that copies them, launched as late as it can be to be through in time, behind one another, and
waited for where the gather is launched. What reduces to such shards gets one that is launched where the
reduction is waited for, and waited for when it is through; the host itself waits at the end of the graph.
Activations are copied each alone: away behind their last use in forward, and back like shards.

    to device      [shards of a][shards of b]
    communication               [gather a   ][gather b]              [reduce a]
    to host                                                                    [shards of a]
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import add

from ..kinds import HOST_COPIES, TransferKind
from .bucketing import Candidate
from .memory_budget import FreeMemory, ScheduleLimits
from .plan import Bucket, Problem, next_in_chain
from .simulate import TransferCostModel, alive_bytes, bucket_cost, clock

MARGIN = 2.0
"""A copy that takes this many times longer than predicted is still in time."""


def without_host_copies(problem: Problem) -> Problem:
    """The problem of collectives alone: activations come back where they are used."""
    others = [t for t in problem.transfers if t.kind in HOST_COPIES]
    if not others:
        return problem
    fetched = [t for t in others if t.kind == TransferKind.COPY_TO_DEVICE]
    back = [
        sum(t.num_bytes for t in fetched if t.due <= step <= t.last)
        for step in range(problem.num_steps)
    ]
    return dataclasses.replace(
        problem,
        transfers=tuple(t for t in problem.transfers if t.kind not in HOST_COPIES),
        other_bytes=tuple(map(add, problem.other_bytes, back)),
    )


def add_host_copies(
    problem: Problem,
    buckets: Sequence[Bucket],
    prices: TransferCostModel | None,
    limits: ScheduleLimits,
) -> tuple[Bucket, ...]:
    """``buckets`` with copies of the shards that the host keeps, and of activations, in launch order.

    Args:
        buckets: of ``without_copies(problem)``; collectives are the first transfers of ``problem``.
        prices: None: a copy is launched where it is waited for.
    """
    after = next_in_chain(buckets)
    loads: list[Bucket] = []
    stores: list[Bucket] = []
    for i, bucket in enumerate(buckets):
        if not problem.transfers[bucket.transfers[0]].host or i in after:
            continue
        if bucket.kind == TransferKind.ALL_GATHER:
            loads.append(
                _copy(problem, bucket, TransferKind.COPY_TO_DEVICE, bucket.launch, bucket.launch)
            )
        else:
            stores.append(
                _copy(problem, bucket, TransferKind.COPY_TO_HOST, bucket.wait, bucket.wait)
            )
    for i, t in enumerate(problem.transfers):
        if t.kind == TransferKind.COPY_TO_DEVICE:
            loads.append(Bucket(t.kind, ((i,),), t.num_bytes, "", 1, t.due, t.due))
        elif t.kind == TransferKind.COPY_TO_HOST:
            stores.append(Bucket(t.kind, ((i,),), t.num_bytes, "", 1, t.ready, t.ready))
    loads.sort(key=lambda load: load.wait)
    placed = [*loads, *buckets, *stores]
    if prices is not None:
        room = FreeMemory(alive_bytes(problem, placed), limits)
        start_us = clock(problem, buckets, prices).step_us
        loads = _ahead(problem, loads, prices, room, start_us)
        stores = _behind(problem, stores, prices, room, start_us)
    return tuple(sorted([*loads, *buckets, *stores], key=lambda bucket: bucket.launch))


def _copy(problem: Problem, of: Bucket, kind: TransferKind, launch: int, wait: int) -> Bucket:
    num_bytes = sum(problem.transfers[i].shard_bytes for i in of.transfers)
    return Bucket(kind, of.buffers, num_bytes, "", 1, launch, wait)


def _ahead(
    problem: Problem,
    loads: Sequence[Bucket],
    prices: TransferCostModel,
    room: FreeMemory,
    start_us: Sequence[float],
) -> list[Bucket]:
    """``loads``, launched early enough to be through, as far as there is room."""
    free_us = float("inf")
    placed = []
    for load in reversed(loads):
        cost = bucket_cost(problem, load, prices)
        free_us = min(free_us, start_us[load.wait]) - MARGIN * cost.lane_us
        wish = max(0, bisect_right(start_us, free_us, hi=load.wait + 1) - 1)
        group = Candidate(0, 0, load, cost, load.num_bytes, None)
        placed.append(dataclasses.replace(load, launch=room.earliest(group, wish, load.wait)))
    return placed[::-1]


def _behind(
    problem: Problem,
    stores: Sequence[Bucket],
    prices: TransferCostModel,
    room: FreeMemory,
    start_us: Sequence[float],
) -> list[Bucket]:
    """``stores``, waited for when they are through, or when there is no more room."""
    free_us = 0.0
    placed = []
    for store in sorted(stores, key=lambda store: store.launch):
        cost = bucket_cost(problem, store, prices)
        free_us = max(free_us, start_us[store.launch]) + MARGIN * cost.lane_us
        due = min(problem.transfers[i].due for i in store.transfers)
        wish = max(store.launch, min(bisect_left(start_us, free_us, lo=store.launch), due))
        group = Candidate(0, 0, store, cost, store.num_bytes, None)
        placed.append(dataclasses.replace(store, wait=room.latest(group, store.launch, wish)))
    return placed
