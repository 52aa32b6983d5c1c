"""Places candidates in time and scores the result: a draft of a schedule.

Placement is greedy list scheduling. A reduction is launched when its last gradient exists, and
waited for once it is predicted to be done. A gather is waited for at its first use, and launched as
early as may be. Both keep within a number of bytes in flight, but for a bucket that is alone, and
within the limits of memory.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from .bucketing import Candidate, CostedBucket, Split
from .lanes import MARGIN, Lane
from .live_bytes import Footprint, count_transfers, least_by_moment, other_by_moment
from .memory_budget import FreeMemory, ScheduleLimits
from .moments import ByteChanges, Span, num_moments, running, sum_spans
from .plan import Bucket, Problem, in_launch_order
from .simulate import TransferCostModel, start_times_us, sweep

MEMORY_PRICE = 1.0
"""Without a budget, each 10 % of memory above a modest peak (see ``Placer``) has to save 10 % of
the time.

Judged: memory and time count alike. If it is larger, gathers are launched late and stay exposed; at
0 a schedule takes all memory that saves a microsecond.
"""


class BucketSizes(NamedTuple):
    """The sizes that determine a draft, in bytes.

    Nothing hides the first gather and the last reduction, so each has a size of its own.

    Attributes:
        gather, first_gather, reduction, last_reduction: the largest candidates.
        in_flight: bytes of one direction between launch and wait.
    """

    gather: int
    first_gather: int
    reduction: int
    last_reduction: int
    in_flight: int


class Splits(NamedTuple):
    """The candidates of a draft: gathers as they are due, reductions from the last one on."""

    gathers: Split
    reductions: Split

    @property
    def averages(self) -> list[CostedBucket]:
        """The all-reduces over replicas, in the order of ``reductions``."""
        return [c.replica_average for c in self.reductions if c.replica_average]


class Score(NamedTuple):
    """How good a draft is; the smaller is the better one, field by field.

    Attributes:
        over_budget_bytes: peak above ``ScheduleLimits.peak``; 0 without a budget.
        price_us: predicted time, what compute loses beside collectives, and the price of memory.
    """

    over_budget_bytes: int
    price_us: float
    peak_bytes: int


class Draft(NamedTuple):
    """A schedule under consideration.

    Steps of launches and waits are in the order of ``splits``.

    Attributes:
        sizes: those that the search began with; ``in_flight`` is also that of this draft.
        average_waits: of ``splits.averages``, which are launched where reductions are waited for.
    """

    score: Score
    sizes: BucketSizes
    splits: Splits
    gather_launches: Sequence[int]
    reduction_waits: Sequence[int]
    average_waits: Sequence[int]

    def buckets(self) -> tuple[Bucket, ...]:
        gathers, reductions = self.splits
        buckets = [
            dataclasses.replace(candidate.bucket, launch=launch)
            for candidate, launch in zip(gathers, self.gather_launches, strict=True)
        ]
        buckets += [
            dataclasses.replace(candidate.bucket, wait=wait)
            for candidate, wait in zip(reductions, self.reduction_waits, strict=True)
        ]
        launches = _average_launches(reductions, self.reduction_waits)
        buckets += [
            dataclasses.replace(average.bucket, launch=launch, wait=wait)
            for average, launch, wait in zip(
                self.splits.averages, launches, self.average_waits, strict=True
            )
        ]
        return in_launch_order(buckets)


class Placer:
    """Makes drafts of one problem.

    With b buckets and s steps, a draft takes O(b log b + s); the part in s only copies lists.
    A limit of memory adds the moments in which each bucket is in flight.

    Args:
        modest_bytes: size of a bucket that costs no memory. A modest peak is the least peak of any
            schedule plus this, and has no price.
    """

    def __init__(
        self,
        problem: Problem,
        cost_model: TransferCostModel,
        limits: ScheduleLimits,
        modest_bytes: int,
    ) -> None:
        self._num_steps, self._cost_model, self._limits = problem.num_steps, cost_model, limits
        self._start_us = start_times_us(problem)
        least_peak = max(least_by_moment(problem), default=0)
        self._modest_peak = max(1, least_peak + modest_bytes)
        # A draft adds what its buckets take and free: O(b), not O(transfers).
        self._other_bytes = other_by_moment(problem)
        self._changes = ByteChanges(num_moments(problem.num_steps))
        count_transfers(self._changes, problem.transfers)

    @property
    def has_limits(self) -> bool:
        """Return whether memory is limited, and so counted step by step."""
        return self._limits.peak is not None or self._limits.in_flight is not None

    def draft(self, splits: Splits, sizes: BucketSizes) -> Draft:
        """Place and score ``splits``."""
        memory = self._free_memory(splits)
        # Reductions first: what they hold until they are done is not free for gathers, while a
        # gather that finds no memory is only launched later.
        waits = self._place_reductions(splits.reductions[::-1], sizes.in_flight, memory)[::-1]
        launches = self._place_gathers(splits.gathers, sizes.in_flight, memory)
        average_waits = self._place_averages(splits.reductions[::-1], waits[::-1], memory)[::-1]
        score = self._score(splits, launches, waits, average_waits)
        return Draft(score, sizes, splits, launches, waits, average_waits)

    def _free_memory(self, splits: Splits) -> FreeMemory | None:
        """Return the memory beside ``splits`` as late and short as can be; None: no limit."""
        if not self.has_limits:
            return None
        due = [candidate.bucket.wait for candidate in splits.gathers]
        ready = [candidate.bucket.launch for candidate in splits.reductions]
        averaged = _average_launches(splits.reductions, ready)
        return FreeMemory(self._alive(splits, due, ready, averaged), self._limits)

    def _place_reductions(
        self, reductions: Split, in_flight: int, memory: FreeMemory | None
    ) -> list[int]:
        """Return waits: when reductions are done, or earlier if those behind need the bytes.

        Args:
            reductions: in the order of their launches, each as early as can be.
        """
        bytes_before = _bytes_before(reductions)
        lane = Lane()  # as if there were nothing else on the wire
        waits = []
        for k, candidate in enumerate(reductions):
            launch, lane_us = candidate.bucket.launch, candidate.cost.lane_us
            end_us = lane.run(lane_us, self._start_us[launch]) + (MARGIN - 1) * lane_us
            wait = bisect_left(self._start_us, end_us, lo=launch)
            # The first reduction behind this one with which too many bytes would be in flight.
            over = max(bisect_right(bytes_before, bytes_before[k] + in_flight) - 1, k + 1)
            limit = reductions[over].bucket.launch if over < len(reductions) else math.inf
            wait = int(min(wait, limit, candidate.bucket.wait))
            if memory is not None:
                wait = memory.take_latest(_with_average(candidate), launch, wait)
            waits.append(wait)
        return waits

    def _place_gathers(
        self, gathers: Split, in_flight: int, memory: FreeMemory | None
    ) -> list[int]:
        """Return launches: as early as the bytes in flight and memory allow, in order.

        Args:
            gathers: in the order of their waits, each at the first use.
        """
        bytes_before = _bytes_before(gathers)
        launch = 0
        launches = []
        for k, candidate in enumerate(gathers):
            bucket = candidate.bucket
            # The number of gathers that have to be waited for before this one may be in flight.
            done = min(bisect_left(bytes_before, bytes_before[k + 1] - in_flight), k)
            launch = max(launch, bucket.launch, gathers[done - 1].bucket.wait if done else 0)
            if memory is not None:
                launch = memory.take_earliest(candidate.footprint, launch, bucket.wait)
            launches.append(launch)
        return launches

    def _place_averages(
        self, reductions: Split, reduction_waits: Sequence[int], memory: FreeMemory | None
    ) -> list[int]:
        """Return waits of the averages over replicas: when they are done, as far as memory allows.

        Args:
            reductions: in the order of their launches; some have an average.
        """
        lane = Lane()
        waits = []
        averages = (c.replica_average for c in reductions if c.replica_average)
        for average, launch in zip(averages, _average_launches(reductions, reduction_waits)):
            lane_us = average.cost.lane_us
            end_us = lane.run(lane_us, self._start_us[launch]) + (MARGIN - 1) * lane_us
            wait = bisect_left(self._start_us, end_us, lo=launch)
            wait = min(wait, max(launch, average.bucket.wait))
            if memory is not None:
                wait = memory.take_latest(average.footprint, launch, wait)
            waits.append(wait)
        return waits

    def _score(
        self,
        splits: Splits,
        gather_launches: Sequence[int],
        reduction_waits: Sequence[int],
        average_waits: Sequence[int],
    ) -> Score:
        gathers, reductions = splits
        alive = self._alive(splits, gather_launches, reduction_waits, average_waits)
        peak = max(alive, default=0)
        launches = [*gather_launches, *(c.bucket.launch for c in reductions)]
        waits = [*(c.bucket.wait for c in gathers), *reduction_waits]
        if self._limits.peak is None:
            # Bytes in flight may be there twice: backends copy, allocators keep them to the wait.
            in_flight = self._in_flight([*gathers, *reductions], launches, waits)
            held = max(map(add, alive[running(0) :: 3], in_flight), default=0)
            over_budget, excess = 0, max(0.0, held / self._modest_peak - 1)
        else:
            over_budget, excess = max(0, peak - self._limits.peak), 0.0
        costs = [candidate.cost for candidates in splits for candidate in candidates]
        costs += [average.cost for average in splits.averages]
        launches += _average_launches(reductions, reduction_waits)
        waits += average_waits
        # ``sweep`` takes buckets in launch order, and which average continues which reduction.
        order = sorted(range(len(costs)), key=launches.__getitem__)
        times = sweep(
            self._start_us,
            launches=[launches[i] for i in order],
            waits=[waits[i] for i in order],
            costs=[costs[i] for i in order],
            successors=_successors(splits, order),
        )
        price_us = times.total_us * (1 + MEMORY_PRICE * excess)
        price_us += sum(self._cost_model.lost_us(cost.lane_us) for cost in costs)
        return Score(over_budget, price_us, peak)

    def _alive(
        self,
        splits: Splits,
        gather_launches: Sequence[int],
        reduction_waits: Sequence[int],
        average_waits: Sequence[int],
    ) -> list[int]:
        """Return ``live_bytes.alive_by_moment`` of the buckets of ``splits``."""
        changes = self._changes.copy()
        for candidate, launch in zip(splits.gathers, gather_launches):
            candidate.footprint.launch(changes, launch)
            candidate.footprint.wait(changes, candidate.bucket.wait)
        for candidate, wait in zip(splits.reductions, reduction_waits):
            candidate.footprint.launch(changes, candidate.bucket.launch)
            candidate.footprint.wait(changes, wait)
        launches = _average_launches(splits.reductions, reduction_waits)
        for average, launch, wait in zip(splits.averages, launches, average_waits):
            average.footprint.launch(changes, launch)
            average.footprint.wait(changes, wait)
        return list(map(add, self._other_bytes, changes.by_moment()))

    def _in_flight(
        self, candidates: Split, launches: Sequence[int], waits: Sequence[int]
    ) -> list[int]:
        """Return the bytes in flight in each step.

        A bucket that is waited for at once counts in the step behind it, or in the last one.
        """
        begins = [min(launch, self._num_steps - 1) for launch in launches]
        spans = (
            Span(begin, max(wait, begin + 1), candidate.bucket.num_bytes)
            for candidate, begin, wait in zip(candidates, begins, waits)
        )
        return sum_spans(spans, self._num_steps)


def _bytes_before(split: Split) -> list[int]:
    """Return the bytes of the candidates before each one, and of all of them."""
    return [0, *accumulate(candidate.bucket.num_bytes for candidate in split)]


def _with_average(candidate: Candidate) -> Footprint:
    """Return the footprint of a reduction, and of its average, which is waited for with it."""
    taken, average = candidate.footprint, candidate.replica_average
    if average is None:
        return taken
    return taken._replace(
        at_wait=taken.at_wait + average.footprint.at_wait,
        after_wait=taken.after_wait + average.footprint.after_wait,
    )


def _average_launches(reductions: Sequence[Candidate], reduction_waits: Sequence[int]) -> list[int]:
    """Return the launches of averages over replicas: where their reductions are waited for."""
    return [wait for c, wait in zip(reductions, reduction_waits) if c.replica_average]


def _successors(splits: Splits, order: Sequence[int]) -> dict[int, int]:
    """Return which average continues which reduction, as places in ``order``.

    Args:
        order: positions among gathers, reductions and averages, one after the other.
    """
    num_gathers = len(splits.gathers)
    averaged = [i for i, c in enumerate(splits.reductions, num_gathers) if c.replica_average]
    if not averaged:
        return {}
    places = {i: place for place, i in enumerate(order)}
    averages = range(len(order) - len(averaged), len(order))
    return {places[i]: places[average] for i, average in zip(averaged, averages)}
