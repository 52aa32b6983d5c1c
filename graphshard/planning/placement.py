"""Place the buckets of a candidate schedule, and score it.

Placement is greedy list scheduling. A gather is waited for at its first use and launched as early
as the in-flight and memory limits allow. A reduction is launched once its last gradient exists and
waited for as late as these limits allow (``place_waits``); without a memory limit, late waits do
not raise the peak above the modest peak (see ``Placer``). Predicted times do not affect placement:
they only rank candidate schedules, at several link speeds.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from .bucketing import CandidateBucket, CostedBucket, Split
from .buckets import in_launch_order, next_in_chain
from .live_bytes import (
    Footprint,
    Span,
    count_transfers,
    fixed_by_point,
    num_points,
    smallest_peak,
    sum_spans,
)
from .memory_budget import FreeMemory, ScheduleLimits, Sent, place_waits
from .plan import Bucket, Problem
from .simulate import (
    AS_PREDICTED,
    Scenario,
    TransferCostModel,
    start_times_us,
    sweep,
    user_costs,
)

# Price of memory in time, without a memory budget. If the peak exceeds the modest peak (see
# ``Placer``) by a fraction ``x``, the score multiplies the simulated time by
# ``1 + MEMORY_PRICE * x**2``: 10 % more memory must save 1 % of the time, 20 % more must save 4 %.
# The slowdown of compute by all collectives is added afterwards. Measured with
# ``benchmarks/robustness.py``: at 0.5, 405B on 1,024 GPUs with slow links takes 5 % more memory
# than with FSDP2's rule, and 1 % less time than at 1.0.
MEMORY_PRICE = 1.0
# Number of modest buckets for which the modest peak has room (see ``Placer``). Measured: at 1, if
# links are slower than planned, 70B on 1,024 GPUs takes up to 5 % longer than with FSDP2's rule.
MODEST_BUCKETS = 1.5

# Transfer speeds for scoring: as predicted, low bandwidth, and high latency.
SCENARIOS = (AS_PREDICTED, Scenario(2.0, 2.5), Scenario(5.0, 1.5))


class BucketSizes(NamedTuple):
    """Maximum bytes of a gather bucket, a reduction bucket and all gathers in flight."""

    gather: int
    reduction: int
    in_flight: int


_Placed = tuple[CandidateBucket | CostedBucket, int, int]  # a bucket, its launch and its wait


class Splits(NamedTuple):
    """Candidate buckets: gathers in due order, reductions from the last to the first."""

    gathers: Split
    reductions: Split

    @property
    def averages(self) -> list[CostedBucket]:
        return [c.replica_average for c in self.reductions if c.replica_average]


class Score(NamedTuple):
    """Score of a candidate schedule; lower is better, compared field by field.

    Attributes:
        over_budget_bytes: peak memory above ``ScheduleLimits.peak``, or 0 without a budget.
        price_us: mean predicted time in ``SCENARIOS``, plus the slowdown of compute by concurrent
            collectives, plus the penalty for memory.
    """

    over_budget_bytes: int
    price_us: float
    peak_bytes: int


class CandidateSchedule(NamedTuple):
    """A candidate schedule with its score.

    Attributes:
        sizes: sizes that the search started from. Local search changes the splits, but keeps
            ``in_flight``.
    """

    score: Score
    sizes: BucketSizes
    splits: Splits
    placed: Sequence[_Placed]

    def buckets(self) -> tuple[Bucket, ...]:
        return in_launch_order(
            [
                dataclasses.replace(sent.bucket, launch=launch, wait=wait)
                for sent, launch, wait in self.placed
            ]
        )


class Placer:
    """Places and scores candidate schedules of one problem.

    Without a memory limit, memory costs nothing up to the modest peak: the smallest peak of any
    schedule plus ``MODEST_BUCKETS`` buckets of ``modest_bytes``.

    With b buckets and s steps, one candidate schedule takes O(b log b + s) time. With a memory or
    in-flight limit, each gather adds the number of points in time at which it is in flight.
    """

    def __init__(
        self,
        problem: Problem,
        cost_model: TransferCostModel,
        limits: ScheduleLimits,
        modest_bytes: int,
    ) -> None:
        self._num_steps, self._copies_sent = problem.num_steps, problem.copies_sent
        self._cost_model, self._limits = cost_model, limits
        self._start_us = start_times_us(problem)
        self._users = problem.user_collectives
        self._after_user = [problem.after_user_launch(s) for s in range(problem.num_steps + 1)]
        self._user_costs = user_costs(problem, cost_model)
        self._room = int(MODEST_BUCKETS * modest_bytes)
        least = smallest_peak(problem, exchanges=limits.reduce == "exchange")
        self._modest_peak = max(1, least + self._room)
        # Memory that every schedule allocates and frees is counted once, here. A candidate schedule
        # then adds only its buckets: O(b) instead of O(transfers).
        self._fixed_bytes = fixed_by_point(problem)
        self._changes = [0] * (num_points(problem.num_steps) + 1)
        count_transfers(self._changes, problem.transfers)

    def place(self, splits: Splits, sizes: BucketSizes, room: float = 1.0) -> CandidateSchedule:
        """Place and score ``splits``.

        Args:
            room: fraction of the room for modest buckets that late waits may use; ignored with a
                memory limit.
        """
        launches = self._place_gathers(splits.gathers, sizes.in_flight, self._free_memory(splits))
        max_alive = self._modest_peak - int((1 - room) * self._room)
        waits, average_waits = self._place_reductions(splits, launches, max_alive)
        placed = _placed(splits, launches, waits, average_waits)
        return CandidateSchedule(self._score(splits, placed), sizes, splits, placed)

    def _free_memory(self, splits: Splits) -> FreeMemory | None:
        """Return the memory left if buckets live as briefly as possible, or None if unlimited."""
        if self._limits.peak is None and self._limits.in_flight is None:
            return None
        due = [candidate.bucket.wait for candidate in splits.gathers]
        ready = [candidate.bucket.launch for candidate in splits.reductions]
        return FreeMemory(self._alive(_placed(splits, due, ready)), self._limits)

    def _place_reductions(
        self, splits: Splits, gather_launches: Sequence[int], max_alive: int
    ) -> tuple[list[int], list[int]]:
        """Return the waits of the reductions, and of their all-reduces over replicas."""
        reductions = splits.reductions[::-1]  # in launch order
        at_once = [c.bucket.launch for c in splits.reductions]
        alive = self._alive(_placed(splits, gather_launches, at_once))
        gather_waits = [c.bucket.wait for c in splits.gathers]
        in_flight = self._in_flight(splits.gathers, gather_launches, gather_waits)
        sent = [
            Sent(c.bucket.launch, self._due(reductions, k), _with_average(c))
            for k, c in enumerate(reductions)
        ]
        waits = self._place_waits(sent, alive, max_alive, in_flight)
        averaged = [(c.replica_average, w) for c, w in zip(reductions, waits) if c.replica_average]
        if not averaged:
            return waits[::-1], []
        alive = self._alive(_placed(splits, gather_launches, waits[::-1]))
        launches = [c.bucket.launch for c in reductions]
        reducing = self._in_flight(reductions, launches, waits)
        in_flight = list(map(add, in_flight, reducing))
        sent = [
            Sent(wait, max(wait, average.bucket.wait), average.footprint)
            for average, wait in averaged
        ]
        return waits[::-1], self._place_waits(sent, alive, max_alive, in_flight)[::-1]

    def _place_waits(
        self,
        sent: Sequence[Sent],
        alive: Sequence[int],
        max_alive: int,
        in_flight: Sequence[int],
    ) -> list[int]:
        if self._limits.peak is None:
            peak: float = max(max_alive, *alive)
            if self._copies_sent:
                sent = [each.with_copy() for each in sent]
        else:
            peak = self._limits.peak
        limit = math.inf if self._limits.in_flight is None else self._limits.in_flight
        return place_waits(sent, alive, peak, in_flight, limit)

    def _due(self, reductions: Sequence[CandidateBucket], k: int) -> int:
        candidate = reductions[k]
        due = candidate.bucket.wait
        # An all-reduce or a host copy of the reduced shards starts only at this wait, which should
        # not come after the launch of the next reduction.
        if candidate.continues and k + 1 < len(reductions):
            due = min(due, max(candidate.bucket.launch, reductions[k + 1].bucket.launch))
        return due

    def _place_gathers(
        self, gathers: Split, in_flight: int, memory: FreeMemory | None
    ) -> list[int]:
        """Launch each gather as early as in-flight and memory limits allow; return the launches."""
        bytes_before = [0, *accumulate(candidate.bucket.num_bytes for candidate in gathers)]
        launch = 0
        launches = []
        for k, candidate in enumerate(gathers):
            bucket = candidate.bucket
            # In wait order: the number of gathers to wait for before this one may be launched.
            done = min(bisect_left(bytes_before, bytes_before[k + 1] - in_flight), k)
            launch = max(launch, bucket.launch, gathers[done - 1].bucket.wait if done else 0)
            if launch < bucket.wait:
                launch = self._after_user[launch]
            if memory is not None:
                launch = memory.take_earliest(candidate.footprint, launch, bucket.wait)
            launches.append(launch)
        return launches

    def _score(self, splits: Splits, placed: Sequence[_Placed]) -> Score:
        peak = max(self._alive(placed), default=0)
        if self._limits.peak is None:
            over_budget, excess = 0, max(0.0, peak / self._modest_peak - 1)
        else:  # memory up to the budget is free
            over_budget, excess = max(0, peak - self._limits.peak), 0.0
        # ``sweep`` needs launch order, and the all-reduce over replicas that continues each
        # reduction.
        order = sorted(range(len(placed)), key=lambda i: placed[i][1])
        launches, waits = [placed[i][1] for i in order], [placed[i][2] for i in order]
        costs = [*(placed[i][0].cost for i in order), *self._user_costs]
        successors = next_in_chain([placed[i][0].bucket for i in order]) if splits.averages else {}
        total_us = 0.0
        for scenario in SCENARIOS:
            times = sweep(
                self._start_us,
                launches=launches,
                waits=waits,
                costs=list(map(scenario.cost, costs)),
                successors=successors,
                users=self._users,
            )
            total_us += times.total_us / len(SCENARIOS)
        price_us = total_us * (1 + MEMORY_PRICE * excess**2)
        price_us += sum(self._cost_model.slowdown_us(sent.cost.lane_us) for sent, _, _ in placed)
        return Score(over_budget, price_us, peak)

    def _alive(self, placed: Iterable[_Placed]) -> list[int]:
        """Return the bytes alive at each point in time, like ``live_bytes.alive_by_point``."""
        changes = self._changes.copy()
        for sent, launch, wait in placed:
            sent.footprint.launch(changes, launch)
            sent.footprint.wait(changes, wait)
        return list(map(add, self._fixed_bytes, accumulate(changes)))

    def _in_flight(
        self, candidates: Split, launches: Sequence[int], waits: Sequence[int]
    ) -> list[int]:
        # A bucket that is waited for at its launch counts in the step after its launch or, at the
        # graph's end, in the last step.
        begins = [min(launch, self._num_steps - 1) for launch in launches]
        spans = (
            Span(begin, max(wait, begin + 1), candidate.bucket.num_bytes)
            for candidate, begin, wait in zip(candidates, begins, waits)
        )
        return sum_spans(spans, self._num_steps)


def _with_average(candidate: CandidateBucket) -> Footprint:
    """Return a reduction's footprint, including that of its all-reduce over replicas, if any.

    The all-reduce is assumed to be launched and waited for at the reduction's wait.
    """
    taken, average = candidate.footprint, candidate.replica_average
    if average is None:
        return taken
    return taken._replace(
        at_wait=taken.at_wait + average.footprint.at_wait,
        after_wait=taken.after_wait + average.footprint.after_wait,
    )


def _placed(
    splits: Splits,
    gather_launches: Sequence[int],
    reduction_waits: Sequence[int],
    average_waits: Sequence[int] | None = None,
) -> list[_Placed]:
    """Return all gathers, then all reductions, then ``splits.averages``, with launches and waits.

    An average is launched where its reduction is waited for.

    Args:
        average_waits: waits of the averages (default: their launches).
    """
    gathers, reductions = splits
    placed: list[_Placed] = [
        (c, launch, c.bucket.wait) for c, launch in zip(gathers, gather_launches)
    ]
    placed += [(c, c.bucket.launch, wait) for c, wait in zip(reductions, reduction_waits)]
    launches = [wait for c, wait in zip(reductions, reduction_waits) if c.replica_average]
    placed += zip(splits.averages, launches, launches if average_waits is None else average_waits)
    return placed
