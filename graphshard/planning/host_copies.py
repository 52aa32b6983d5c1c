"""Schedule host copies: of shards that live in host memory, and of offloaded activations.

Buckets are first formed and placed as if all shards were on the device. Then host copies are added;
the host link runs one copy at a time in each direction.

- A gather of host shards gets a copy to the device. It is waited for where the gather is launched,
  and launched as late as it can be to arrive in time.
- A reduction to host shards gets a copy to the host. It is launched where the reduction is waited
  for, and waited for when it is done; the host itself waits at the graph's end.
- Activations are copied one by one: to the host after their last use in forward, back like shards.

    to device      [shards of a][shards of b]
    communication               [gather a   ][gather b]              [reduce a]
    to host                                                                    [shards of a]
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..kinds import HOST_COPIES, TransferKind
from .lanes import MARGIN, Lane
from .live_bytes import alive_by_point, fixed_by_point, footprint, with_fixed_bytes
from .memory_budget import FreeMemory, ScheduleLimits
from .plan import Bucket, Problem, bucket_of, in_launch_order, next_in_chain
from .simulate import TransferCostModel, bucket_cost, clock
from .time_points import LiveBytes, Span, launches, running


def without_host_copies(problem: Problem) -> Problem:
    """Return the problem without host copies, as if they took no time.

    An activation leaves the device as soon as it is ready, and is back when it is due.
    """
    if not any(t.kind in HOST_COPIES for t in problem.transfers):
        return problem
    other = LiveBytes(fixed_by_point(problem))
    for t in problem.transfers:
        if t.kind == TransferKind.COPY_TO_DEVICE:
            other.add(Span(launches(t.due), launches(t.last + 1), t.num_bytes))
        elif t.kind == TransferKind.COPY_TO_HOST:
            other.add(Span(launches(t.ready), running(t.ready), t.num_bytes))
    problem = with_fixed_bytes(problem, other.by_point)
    collectives = tuple(t for t in problem.transfers if t.kind not in HOST_COPIES)
    return dataclasses.replace(problem, transfers=collectives)


def add_host_copies(
    problem: Problem,
    buckets: Sequence[Bucket],
    cost_model: TransferCostModel | None,
    limits: ScheduleLimits,
) -> tuple[Bucket, ...]:
    """Return ``buckets`` and the host copies of shards and activations, in launch order.

    Args:
        buckets: buckets of ``without_host_copies(problem)``, whose transfers come first in
            ``problem``.
        cost_model: predicts when copies are done; None: each is waited for at its launch.
    """
    to_device = _copies_to_device(problem, buckets)
    to_host = _copies_to_host(problem, buckets)
    if cost_model is not None:
        placed = [*to_device, *buckets, *to_host]
        memory = FreeMemory(alive_by_point(problem, placed), limits)
        step_us = clock(problem, buckets, cost_model).step_us
        to_device = _launch_early(problem, to_device, cost_model, memory, step_us)
        to_host = _wait_late(problem, to_host, cost_model, memory, step_us)
    return in_launch_order([*to_device, *buckets, *to_host])


def _copies_to_device(problem: Problem, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return copies that are launched and waited for where their data is due, in that order."""
    copies = [
        _copy_of_shards(problem, bucket, TransferKind.COPY_TO_DEVICE, bucket.launch)
        for bucket in buckets
        if bucket.kind == TransferKind.ALL_GATHER and _is_on_host(problem, bucket)
    ]
    for i, t in enumerate(problem.transfers):
        if t.kind == TransferKind.COPY_TO_DEVICE:
            copies.append(bucket_of(problem, ((i,),), launch=t.due, wait=t.due))
    return sorted(copies, key=lambda copy: copy.wait)


def _copies_to_host(problem: Problem, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return copies that are launched and waited for where their data is ready."""
    successors = next_in_chain(buckets)
    copies = [
        _copy_of_shards(problem, bucket, TransferKind.COPY_TO_HOST, bucket.wait)
        for i, bucket in enumerate(buckets)
        # If an all-reduce over replicas follows, the shards are copied after that.
        if bucket.kind != TransferKind.ALL_GATHER
        and _is_on_host(problem, bucket)
        and i not in successors
    ]
    for i, t in enumerate(problem.transfers):
        if t.kind == TransferKind.COPY_TO_HOST:
            copies.append(bucket_of(problem, ((i,),), launch=t.ready, wait=t.ready))
    return copies


def _is_on_host(problem: Problem, bucket: Bucket) -> bool:
    return problem.transfers[bucket.transfers[0]].host


def _copy_of_shards(problem: Problem, bucket: Bucket, kind: TransferKind, step: int) -> Bucket:
    """Return the host copy of the shards of a collective, in the same buffers."""
    return Bucket(
        kind=kind,
        buffers=bucket.buffers,
        num_bytes=sum(problem.transfers[i].shard_bytes for i in bucket.transfers),
        group="",
        world=1,
        launch=step,
        wait=step,
    )


def _launch_early(
    problem: Problem,
    copies: Sequence[Bucket],
    cost_model: TransferCostModel,
    memory: FreeMemory,
    step_us: Sequence[float],
) -> list[Bucket]:
    """Launch copies early enough to be done when they are waited for, if memory allows.

    Predicted durations are multiplied by ``MARGIN``.
    """
    # In reversed time, from the last copy to the first: a copy begins at its wait, once the copies
    # after it have left the lane, and ends at its launch.
    lane = Lane(-math.inf)
    placed = []
    for copy in reversed(copies):
        cost = bucket_cost(problem, copy, cost_model)
        launch_us = -lane.run(MARGIN * cost.lane_us, -step_us[copy.wait])
        wish = max(0, bisect_right(step_us, launch_us, hi=copy.wait + 1) - 1)
        launch = memory.take_earliest(footprint(problem, copy), wish, copy.wait)
        placed.append(dataclasses.replace(copy, launch=launch))
    return placed[::-1]


def _wait_late(
    problem: Problem,
    copies: Sequence[Bucket],
    cost_model: TransferCostModel,
    memory: FreeMemory,
    step_us: Sequence[float],
) -> list[Bucket]:
    """Wait for copies when they are done, or earlier if memory runs out.

    Predicted durations are multiplied by ``MARGIN``.
    """
    lane = Lane()
    placed = []
    for copy in sorted(copies, key=lambda copy: copy.launch):
        cost = bucket_cost(problem, copy, cost_model)
        end_us = lane.run(MARGIN * cost.lane_us, step_us[copy.launch])
        due = min(problem.transfers[i].due for i in copy.transfers)
        wish = max(copy.launch, min(bisect_left(step_us, end_us, lo=copy.launch), due))
        wait = memory.take_latest(footprint(problem, copy), copy.launch, wish)
        placed.append(dataclasses.replace(copy, wait=wait))
    return placed
