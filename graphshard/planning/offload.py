"""Choose activations to offload, and place the host copies of shards and activations.

Buckets are first formed and placed as if all shards were on the device. Then host copies are added:
to the device before a gather, to the host after a reduction. Activations are copied one by one, to
the host after their last use in forward, and back before their first use in backward. The host link
runs one copy at a time in each direction.

    to device      [shards of a][shards of b]
    communication               [gather a   ][gather b]              [reduce a]
    to host                                                                    [shards of a]
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kinds import HOST_COPIES, TransferKind
from .buckets import in_launch_order, next_in_chain, shortest_lived
from .live_bytes import (
    LiveBytes,
    Span,
    alive_by_point,
    fixed_by_point,
    footprint,
    in_flight_bytes,
    launches,
    least_by_point,
    num_points,
    running,
    smallest_peak,
    with_fixed_bytes,
)
from .memory_budget import FreeMemory, ScheduleLimits
from .plan import Bucket, Problem, Transfer
from .search import find_schedule
from .simulate import Lane, TransferCostModel, bucket_cost, clock

# Factor on the predicted duration of host copies. Judgement call: concurrent with compute or on a
# shared link, a copy can take twice as long as alone. A larger margin holds buffers longer; with a
# smaller one, compute waits for late copies.
HOST_COPY_MARGIN = 2.0
# Fractions of the budget to try as the limit of each graph's smallest peak; the rest lets gathers
# launch earlier. Judgement call: each fraction costs a search for both graphs (without local
# search), and neighboring fractions differ little in time. Fewer would miss a good one.
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
# Minimum fraction of the predicted time that offloading more than necessary must save. Judgement
# call: predictions are no more accurate than that. A larger value leaves gathers exposed that could
# be hidden; with 0, copies load the host link for a gain that may not be real.
MIN_GAIN = 0.02


def without_host_copies(problem: Problem) -> Problem:
    """Return the problem without host copies, as if they took no time."""
    if not any(t.kind in HOST_COPIES for t in problem.transfers):
        return problem
    other = LiveBytes(fixed_by_point(problem))
    # An activation leaves the device as soon as it is ready, and is back when it is due.
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
        buckets: schedule of ``without_host_copies(problem)``, whose transfers have the same
            positions in ``problem``.
        cost_model: cost model of all transfers. If None, each copy is waited for at its launch.
    """
    to_device = _copies_to_device(problem, buckets)
    to_host = _copies_to_host(problem, buckets)
    if cost_model is not None:
        placed = [*to_device, *buckets, *to_host]
        in_flight = in_flight_bytes(problem, placed)
        memory = FreeMemory(alive_by_point(problem, placed), limits, in_flight)
        step_us = clock(problem, buckets, cost_model).step_us
        to_device = _launch_early(problem, to_device, cost_model, memory, step_us)
        to_host = _wait_late(problem, to_host, cost_model, memory, step_us)
    return in_launch_order([*to_device, *buckets, *to_host])


def _copies_to_device(problem: Problem, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the copies to the device, each launched and waited for where its data is due."""
    copies = [
        _copy_of_shards(problem, bucket, TransferKind.COPY_TO_DEVICE, bucket.launch)
        for bucket in buckets
        if bucket.kind == TransferKind.ALL_GATHER and _is_on_host(problem, bucket)
    ]
    copies += _copies_of_activations(problem, TransferKind.COPY_TO_DEVICE)
    return sorted(copies, key=lambda copy: copy.wait)


def _copies_to_host(problem: Problem, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the copies to the host, each launched and waited for where its data is ready."""
    successors = next_in_chain(buckets)
    copies = [
        _copy_of_shards(problem, bucket, TransferKind.COPY_TO_HOST, bucket.wait)
        for i, bucket in enumerate(buckets)
        # If an all-reduce over replicas follows, the shards are copied after that.
        if bucket.kind.is_reduction and _is_on_host(problem, bucket) and i not in successors
    ]
    return copies + _copies_of_activations(problem, TransferKind.COPY_TO_HOST)


def _copies_of_activations(problem: Problem, kind: TransferKind) -> list[Bucket]:
    transfers = enumerate(problem.transfers)
    return [shortest_lived(problem, [i]) for i, transfer in transfers if transfer.kind == kind]


def _is_on_host(problem: Problem, bucket: Bucket) -> bool:
    return problem.transfers[bucket.transfers[0]].host


def _copy_of_shards(problem: Problem, bucket: Bucket, kind: TransferKind, step: int) -> Bucket:
    num_bytes = sum(problem.transfers[i].shard_bytes for i in bucket.transfers)
    # ``next_in_chain`` relies on the copy having the same buffers as the collective.
    return Bucket(kind, bucket.buffers, num_bytes, group="", world=1, launch=step, wait=step)


def _launch_early(
    problem: Problem,
    copies: Sequence[Bucket],
    cost_model: TransferCostModel,
    memory: FreeMemory,
    step_us: Sequence[float],
) -> list[Bucket]:
    """Return ``copies``, each launched early enough to be done at its wait, if memory allows."""
    # Simulate the lane backwards in time, from the last copy to the first: a copy begins at its
    # wait, once later copies have left the lane, and ends at its launch.
    lane = Lane(-math.inf)
    placed = []
    for copy in reversed(copies):
        cost = bucket_cost(problem, copy, cost_model)
        launch_us = -lane.run(HOST_COPY_MARGIN * cost.lane_us, -step_us[copy.wait])
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
    """Return ``copies``, each waited for where it is predicted to be done.

    The wait is earlier if the data is needed earlier, or memory requires it.
    """
    # These waits block the device's stream; the host itself waits only at the graph's end.
    lane = Lane()
    placed = []
    for copy in sorted(copies, key=lambda copy: copy.launch):
        cost = bucket_cost(problem, copy, cost_model)
        end_us = lane.run(HOST_COPY_MARGIN * cost.lane_us, step_us[copy.launch])
        due = min(problem.transfers[i].due for i in copy.transfers)
        wish = max(copy.launch, min(bisect_left(step_us, end_us, lo=copy.launch), due))
        wait = memory.take_latest(footprint(problem, copy), copy.launch, wish)
        placed.append(dataclasses.replace(copy, wait=wait))
    return placed


class SavedActivation(NamedTuple):
    """An activation that forward saves for backward.

    Attributes:
        last: last step of the forward graph that uses it.
        first: first step of the backward graph that uses it.
        until: last step of the backward graph that uses it.
    """

    num_bytes: int
    last: int
    first: int
    until: int


def choose_offloaded(
    forward: Problem,
    backward: Problem,
    saved: Sequence[SavedActivation],
    cost_model: TransferCostModel,
    limits: ScheduleLimits,
) -> list[int]:
    """Return the positions in ``saved`` of the activations to offload; none without a peak limit.

    A graph may need offloading to fit ``limits.peak``. Offloading more can save time, because the
    freed memory lets gathers launch earlier. So for each fraction in ``SHARES``, offload until the
    least memory of both graphs fits into that fraction of the limit. Of the choices that fit the
    limit, return the smallest whose predicted time exceeds the best by at most the fraction
    ``MIN_GAIN``. If none fits, return the choice for the first fraction: scheduling will report the
    missing memory.
    """
    if limits.peak is None:
        return []
    budgets = [int(limits.peak * share) for share in SHARES]
    graphs, exchanges = (forward, backward), limits.reduce == "exchange"
    least = [least_by_point(problem, exchanges=exchanges) for problem in graphs]
    amounts = (tuple(_offload_enough(least, forward.num_steps, saved, b)) for b in budgets)
    choices = list(dict.fromkeys(amounts))
    times_us: dict[tuple[int, ...], float] = {}
    for chosen in choices if len(choices) > 1 else ():
        problems = _offloaded(forward, backward, [saved[i] for i in chosen])
        peaks = [smallest_peak(without_host_copies(p), exchanges=exchanges) for p in problems]
        if max(peaks) <= limits.peak:
            times_us[chosen] = sum(_predicted_us(p, limits, cost_model) for p in problems)
    if not times_us:
        # There is only one choice, or none fits.
        return list(choices[0])
    within_us = min(times_us.values()) * (1 + MIN_GAIN)
    return list(next(chosen for chosen, us in times_us.items() if us <= within_us))


def _absence(activation: SavedActivation, forward_steps: int) -> tuple[Span, Span]:
    """Return when an offloaded activation is off the device, in forward and in backward."""
    return (
        Span(launches(activation.last + 1), num_points(forward_steps), activation.num_bytes),
        Span(0, launches(activation.first), activation.num_bytes),
    )


def _offload_enough(
    least: Sequence[Sequence[int]],
    forward_steps: int,
    saved: Sequence[SavedActivation],
    budget: int,
) -> list[int]:
    """Return the positions in ``saved`` to offload so that both graphs fit into ``budget``.

    If no choice makes them fit, return those of all activations whose offloading lowers memory that
    exceeds ``budget``.

    Args:
        least: least live bytes at each point, of forward and of backward.
    """
    alive = [LiveBytes(list(by_point)) for by_point in least]
    chosen = []
    # Activations that backward needs last come first: their copies are the easiest to hide.
    for i in sorted(range(len(saved)), key=lambda i: (-saved[i].first, saved[i].last)):
        absences = _absence(saved[i], forward_steps)
        if any(graph.exceeds(budget, span) for graph, span in zip(alive, absences)):
            chosen.append(i)
            for graph, span in zip(alive, absences):
                graph.remove(span)
    return sorted(chosen)


def _offloaded(
    forward: Problem, backward: Problem, chosen: Sequence[SavedActivation]
) -> tuple[Problem, Problem]:
    """Return both problems as if read from graphs in which ``chosen`` is offloaded."""
    to_host, to_device = TransferKind.COPY_TO_HOST, TransferKind.COPY_TO_DEVICE
    end = forward.num_steps
    offloads = [_host_copy(to_host, a.num_bytes, a.last + 1, end, end - 1) for a in chosen]
    reloads = [_host_copy(to_device, a.num_bytes, 0, a.first, a.until) for a in chosen]
    # From the last use in forward to the last use in backward, the transfers count these bytes.
    saved = [_absence(activation, end)[0] for activation in chosen]
    taken = [Span(0, launches(a.until + 1), a.num_bytes) for a in chosen]
    return _with_transfers(forward, offloads, saved), _with_transfers(backward, reloads, taken)


def _host_copy(kind: TransferKind, num_bytes: int, ready: int, due: int, last: int) -> Transfer:
    unused: Any = {"dtype": "", "shard_bytes": 0, "casts": False, "group": "", "world": 1}
    return Transfer(None, kind, num_bytes, ready=ready, due=due, last=last, **unused)


def _with_transfers(
    problem: Problem, transfers: Sequence[Transfer], replaced: Sequence[Span]
) -> Problem:
    other = LiveBytes(fixed_by_point(problem))
    for span in replaced:
        other.remove(span)
    problem = with_fixed_bytes(problem, other.by_point)
    return dataclasses.replace(problem, transfers=(*problem.transfers, *transfers))


def _predicted_us(problem: Problem, limits: ScheduleLimits, cost_model: TransferCostModel) -> float:
    collectives = without_host_copies(problem)
    buckets = find_schedule(collectives, cost_model, limits, refine=False)
    placed = add_host_copies(problem, buckets, cost_model, limits)
    return clock(problem, placed, cost_model).total_us
