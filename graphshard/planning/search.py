"""Decides what travels together, when it is launched and when it is waited for. Pure.

A schedule is two lists of cuts (which gathers share a bucket, which reductions do) and a placement.
Placement is greedy list scheduling: a reduction is launched when its last gradient exists and waited
for once it is predicted to be through; a gather is waited for at its first use and launched as early
as may be. Both keep within a number of bytes in flight, but for a bucket that is alone, and within
the memory that there is.

The search is coordinate descent over ``_Sizes``, five numbers of bytes on a geometric scale, that cut
and place; then neighbours are cut in other ways while that helps, beginning with what nothing hides:
the first gathers and the last reductions. With n transfers, s steps and b buckets, a draft is placed
and priced in O(b log b + s), where s is a matter of copying lists; a budget adds the steps that all
buckets are in flight. Descent makes 70 drafts in each of a few rounds; then follow O(b log n), but no
more than ``WORK / n``.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ..errors import BackendError
from ..kinds import TransferKind
from .bucketing import Cuts, Queue, freed_bytes
from .memory_budget import FreeMemory, ScheduleLimits
from .plan import Bucket, Problem, replica_bucket
from .simulate import BucketCost, TransferCostModel, alive_bytes, sweep

SMALL_BYTES, SMALL_CAP_BYTES = 1 << 20, 4 << 20
"""Without overlap: what shares a bucket, and how large that gets. A launch costs as much as a megabyte
on the wire does, within a factor of a few, on NVLink and on Ethernet alike."""
MARGIN = 2.0
"""A reduction that takes this many times longer than predicted is still not waited for."""
NUM_SIZES = 14
"""On the scale of sizes, each half of the one before, from all bytes on; and 0, each alone. The
smallest, a four-thousandth, is less than a matrix of any model."""
MEMORY_PRICE = 1.0
"""Beyond what is modest (see ``_modest_bytes``), a tenth more memory has to save a tenth of the time,
unless a budget allows it."""
CAP_BUCKETS = 2
"""A bucket is no larger than so many modest ones, unless a budget allows it."""
WORK, WORK_IN_ROOM = 3_000_000, 1_000_000
"""The drafts of the local search, times transfers: about two seconds for a thousand transfers, and
three where there is a budget, whose room is counted step by step."""


class BudgetError(BackendError):
    """No schedule keeps ``Limits.peak``; the least that one needs is ``needed`` bytes."""

    def __init__(self, graph: str, budget: int, needed: int) -> None:
        super().__init__(
            f"memory_budget_gb={budget / 1e9:g}: the {graph} graph needs {needed / 1e9:.3f} GB with "
            "every parameter gathered on its own at its first use; give at least that, or have more "
            "recomputed, by schedule.activation_memory_budget"
        )
        self.needed = needed


class _Sizes(NamedTuple):
    """In bytes: how large a bucket gets, and how much is between launch and wait, of gathers and of
    reductions each. What nothing hides, the first gather and the last reduction, has a size of its
    own."""

    gather: int
    first_gather: int
    reduction: int
    last_reduction: int
    in_flight: int


_Pair = tuple[Cuts, Cuts]
"""Of gathers, and of reductions from the last one on."""
_Span = tuple[int, int]
"""Launch and wait."""


class _Draft(NamedTuple):
    """A schedule under consideration; a better one has a smaller score.

    Attributes:
        spans: of ``cuts``, and of what averages reduced shards, where anything does.
    """

    score: tuple[int, float, int]
    cuts: _Pair
    spans: tuple[Sequence[_Span], Sequence[_Span], Sequence[_Span]]
    in_flight: int

    def buckets(self) -> tuple[Bucket, ...]:
        averages = [group.then[0] for group in self.cuts[1] if group.then]
        buckets = [*(group.bucket for cuts in self.cuts for group in cuts), *averages]
        spans = [span for spans in self.spans for span in spans]
        return _in_launch_order(
            [
                dataclasses.replace(bucket, launch=launch, wait=wait)
                for bucket, (launch, wait) in zip(buckets, spans, strict=True)
            ]
        )


def find_schedule(
    problem: Problem, prices: TransferCostModel, limits: ScheduleLimits, *, refine: bool = True
) -> tuple[Bucket, ...]:
    """The buckets of ``problem``, in launch order.

    Args:
        refine: False: of uniform sizes, found in a tenth of the time.

    Raises:
        BudgetError: ``limits.peak`` cannot be kept.
    """
    if limits.peak is not None and limits.peak < (needed := smallest_peak(problem)):
        raise BudgetError(problem.graph, limits.peak, needed)
    search = _Search(problem, prices, limits)
    found = search.sized()
    return (search.refined(found) if refine else found).buckets()


def schedule_without_overlap(problem: Problem) -> tuple[Bucket, ...]:
    """Each transfer where it is needed or ready, and waited for at once; small ones share buckets.

    It depends on parameters alone, not on predicted times.
    """
    cuts: list[list[int]] = []
    filling: dict[tuple[str, ...], list[int]] = {}
    for i, transfer in enumerate(problem.transfers):
        needed_early = transfer.kind != TransferKind.ALL_GATHER and transfer.due < problem.num_steps
        if needed_early or transfer.num_bytes > SMALL_BYTES:
            cuts.append([i])
            continue
        alike = transfer.kind, transfer.group, transfer.replicas, transfer.dtype, transfer.host
        key = tuple(map(str, alike))
        cut = filling.get(key)
        if cut and sum(problem.transfers[j].num_bytes for j in [*cut, i]) <= SMALL_CAP_BYTES:
            cut.append(i)
        else:
            cuts.append([i])
            filling[key] = cuts[-1]
    buckets = []
    for cut in cuts:
        transfers = [problem.transfers[i] for i in cut]
        first = transfers[0]
        gathers = first.kind == TransferKind.ALL_GATHER
        at = min(t.due for t in transfers) if gathers else max(t.ready for t in transfers)
        num_bytes = sum(t.num_bytes for t in transfers)
        of = first.group, first.world, at, at, first.stride
        buckets.append(Bucket(first.kind, (tuple(cut),), num_bytes, *of))
    averages = [replica_bucket(bucket, problem.transfers) for bucket in buckets]
    return _in_launch_order([*buckets, *filter(None, averages)])


def smallest_peak(problem: Problem) -> int:
    """The least peak of any schedule, in bytes."""
    return max(least_bytes(problem), default=0)


def least_bytes(problem: Problem) -> list[int]:
    """By step, with each transfer alone, as late and for as short as it can be."""
    buckets = []
    for i, t in enumerate(problem.transfers):
        at = t.due if t.kind == TransferKind.ALL_GATHER else t.ready
        buckets.append(Bucket(t.kind, ((i,),), t.num_bytes, t.group, t.world, at, at, t.stride))
    return alive_bytes(problem, buckets)


class _Search:
    def __init__(self, problem: Problem, prices: TransferCostModel, limits: ScheduleLimits) -> None:
        self._problem, self._limits, self._prices = problem, limits, prices
        self._start_us = [0.0, *accumulate(problem.compute_us)]
        gathers, reductions = _in_order(problem)
        modest = int(_modest_bytes(problem, prices))
        free = CAP_BUCKETS * modest if limits.peak is None else None
        self._cap = free if limits.cap is None else limits.cap
        self._queues = (
            Queue(problem, prices, self._cap, gathers),
            Queue(problem, prices, self._cap, reductions[::-1]),
        )
        self._least_bytes = least_bytes(problem)
        self._modest = max(1, max(self._least_bytes, default=0) + modest)
        # What ``_alive`` begins with: buckets that are launched and waited for at once, at step 0.
        self._change = [0] * (problem.num_steps + 1)
        for t in problem.transfers:
            sign, step = (-1, t.due) if t.kind == TransferKind.ALL_GATHER else (1, t.ready)
            self._change[step] += sign * freed_bytes(t)

    def sized(self) -> _Draft:
        """The best of uniform sizes that coordinate descent finds. All alone and one after the other
        is among them, which needs the least memory."""
        scale = self._scale()
        best, sizes = min((self._sized(_Sizes(*[size] * 5)) for size in scale), key=_score)
        improves = True
        while improves:
            improves = False
            for axis in _Sizes._fields:
                tried = (self._sized(sizes._replace(**{axis: size})) for size in scale)
                found = min(tried, key=_score)
                if found[0].score < best.score:
                    (best, sizes), improves = found, True
        return best

    def _scale(self) -> list[int]:
        total, cap = sum(t.num_bytes for t in self._problem.transfers), self._cap
        sizes = [0, *(total >> shift for shift in reversed(range(NUM_SIZES - 1)))]
        return sizes if cap is None else [*(size for size in sizes if size < cap), cap]

    def _sized(self, sizes: _Sizes) -> tuple[_Draft, _Sizes]:
        gathers = self._queues[0].cut(sizes.first_gather, sizes.gather)
        reductions = self._queues[1].cut(sizes.last_reduction, sizes.reduction)
        return self._draft((gathers, reductions), sizes.in_flight), sizes

    def refined(self, best: _Draft) -> _Draft:
        """Change neighbours while that helps, from the fronts of both queues on."""
        work = WORK_IN_ROOM if self._has_limits() else WORK
        tries = work // max(1, len(self._problem.transfers))
        at = 0
        while tries > 0 and at < max(map(len, best.cuts)):
            before = best
            for pair in [*self._moved(best, 0, at), *self._moved(best, 1, at)]:
                best = min(best, self._draft(pair, best.in_flight), key=lambda draft: draft.score)
                tries -= 1
            at += best is before
        return best

    def _moved(self, draft: _Draft, side: int, at: int) -> Iterator[_Pair]:
        if at < len(draft.cuts[side]):
            for cuts in self._queues[side].moved(draft.cuts[side], at):
                yield (cuts, draft.cuts[1]) if side == 0 else (draft.cuts[0], cuts)

    def _draft(self, cuts: _Pair, in_flight: int) -> _Draft:
        """Place and price ``cuts``."""
        gathers, reductions = cuts
        room = self._room(cuts)
        reduced = self._place_reductions(reductions[::-1], in_flight, room)[::-1]
        gathered = self._place_gathers(gathers, in_flight, room)
        averaged = self._place_averages(reductions[::-1], reduced[::-1])[::-1]
        alive = self._alive(cuts, [span[0] for span in gathered], [span[1] for span in reduced])
        groups, spans = [*gathers, *reductions], [*gathered, *reduced]
        # What is in flight may be there twice: backends copy, allocators hold it until the wait.
        held = max(map(add, alive, self._in_flight(groups, spans)), default=0)
        peak = max(alive, default=0)
        limit = self._limits.peak
        over, excess = 0, max(0.0, held / self._modest - 1)
        if limit is not None:
            over, excess = max(0, peak - limit), 0.0
        costs = [group.cost for group in groups]
        costs += [group.then[1] for group in reductions if group.then]
        price_us = self._total_us(cuts, [*spans, *averaged], costs) * (1 + MEMORY_PRICE * excess)
        price_us += sum(self._prices.lost_us(cost.lane_us) for cost in costs)
        return _Draft((over, price_us, peak), cuts, (gathered, reduced, averaged), in_flight)

    def _total_us(self, cuts: _Pair, spans: Sequence[_Span], costs: Sequence[BucketCost]) -> float:
        """
        Args:
            spans: of gathers, of reductions, and of what averages some of those; ``costs`` likewise.
        """
        order = sorted(range(len(spans)), key=lambda i: spans[i][0])
        reductions = [i for i, group in enumerate(cuts[1], len(cuts[0])) if group.then]
        averages = range(len(spans) - len(reductions), len(spans))
        at = {i: place for place, i in enumerate(order)} if reductions else {}
        averaged = {at[i]: at[by] for i, by in zip(reductions, averages)}
        ordered = [spans[i] for i in order], [costs[i] for i in order]
        return sweep(self._start_us, *ordered, averaged).total_us

    def _alive(self, cuts: _Pair, launches: Sequence[int], waits: Sequence[int]) -> list[int]:
        """``alive_bytes``, from the launches of gathers and the waits for reductions."""
        change = self._change.copy()
        for group, launch in zip(cuts[0], launches):
            change[launch] += group.freed_bytes
        for group, wait in zip(cuts[1], waits):
            change[wait] -= group.freed_bytes
        return list(map(add, self._least_bytes, accumulate(change)))

    def _in_flight(self, groups: Cuts, spans: Sequence[_Span]) -> Iterator[int]:
        """By step; what is waited for at once is in flight with the step there, or the last one."""
        change = [0] * (self._problem.num_steps + 1)
        for group, (launch, wait) in zip(groups, spans):
            begin = min(launch, self._problem.num_steps - 1)
            change[begin] += group.bucket.num_bytes
            change[max(wait, begin + 1)] -= group.bucket.num_bytes
        return accumulate(change)

    def _room(self, cuts: _Pair) -> FreeMemory | None:
        """With every bucket as late and for as short as can be; None: there is no limit."""
        if not self._has_limits():
            return None
        due = [group.bucket.wait for group in cuts[0]]
        ready = [group.bucket.launch for group in cuts[1]]
        return FreeMemory(self._alive(cuts, due, ready), self._limits)

    def _has_limits(self) -> bool:
        return self._limits.peak is not None or self._limits.in_flight is not None

    def _place_reductions(
        self, groups: Cuts, in_flight: int, room: FreeMemory | None
    ) -> list[_Span]:
        """As early as can be; waited for when they are through, or when those behind need the room."""
        sums = [0, *accumulate(group.bucket.num_bytes for group in groups)]
        spans = []
        through_us = self._through_us(groups)
        for k, group in enumerate(groups):
            launch = group.bucket.launch
            end_us = through_us[k] + (MARGIN - 1) * group.cost.lane_us
            wait = bisect_left(self._start_us, end_us, lo=launch)
            behind = max(bisect_right(sums, sums[k] + in_flight) - 1, k + 1)
            limit = groups[behind].bucket.launch if behind < len(groups) else math.inf
            wait = int(min(wait, limit, group.bucket.wait))
            spans.append((launch, wait if room is None else room.latest(group, launch, wait)))
        return spans

    def _place_averages(self, groups: Cuts, reduced: Sequence[_Span]) -> list[_Span]:
        """Launched where their reductions are waited for; waited for when they are through."""
        spans, free_us = [], 0.0
        for group, (_, launch) in zip(groups, reduced):
            if group.then is None:
                continue
            bucket, cost = group.then
            free_us = max(free_us, self._start_us[launch]) + cost.lane_us
            end_us = free_us + (MARGIN - 1) * cost.lane_us
            wait = bisect_left(self._start_us, end_us, lo=launch)
            spans.append((launch, min(wait, max(launch, bucket.wait))))
        return spans

    def _place_gathers(self, groups: Cuts, in_flight: int, room: FreeMemory | None) -> list[_Span]:
        """Waited for at their first use; launched as early as those before leave room, in order."""
        sums = [0, *accumulate(group.bucket.num_bytes for group in groups)]
        spans = []
        launch = 0
        for k, group in enumerate(groups):
            ahead = min(bisect_left(sums, sums[k + 1] - in_flight), k)
            launch = max(launch, group.bucket.launch, groups[ahead - 1].bucket.wait if ahead else 0)
            if room is not None:
                launch = room.earliest(group, launch, group.bucket.wait)
            spans.append((launch, group.bucket.wait))
        return spans

    def _through_us(self, reductions: Cuts) -> list[float]:
        """When each reduction would be, if there were nothing else on the wire."""
        ends, free_us = [], 0.0
        for group in reductions:
            free_us = max(free_us, self._start_us[group.bucket.launch]) + group.cost.lane_us
            ends.append(free_us)
        return ends


def _in_launch_order(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(buckets, key=lambda bucket: bucket.launch))


def _score(tried: tuple[_Draft, _Sizes]) -> tuple[int, float, int]:
    return tried[0].score


def _in_order(problem: Problem) -> tuple[list[int], list[int]]:
    """Gathers by when they are due, reductions by when they are ready."""
    transfers = problem.transfers
    gathers = [i for i, t in enumerate(transfers) if t.kind == TransferKind.ALL_GATHER]
    reductions = [i for i, t in enumerate(transfers) if t.kind != TransferKind.ALL_GATHER]
    return (
        sorted(gathers, key=lambda i: transfers[i].due),
        sorted(reductions, key=lambda i: transfers[i].ready),
    )


def _modest_bytes(problem: Problem, prices: TransferCostModel) -> float:
    """A bucket that nobody minds: as large as the largest tensor, or as one of which one half is
    what every bucket costs, latency and what compute loses to it."""
    if not problem.transfers:
        return 0
    total = sum(t.num_bytes for t in problem.transfers)
    largest = max(problem.transfers, key=lambda t: t.num_bytes)
    latency_us, all_us = (
        prices.collective_us(largest.kind, num_bytes, largest.world, largest.stride)
        for num_bytes in (1, total)
    )
    share = (latency_us + prices.lost_us(0.0)) / max(all_us - latency_us, 1e-9)
    return max(largest.num_bytes, min(1.0, share) * total)
