"""Decides what travels together, when it is launched and when it is waited for. Pure.

A schedule is two lists of cuts (which gathers share a bucket, which reductions do) and a placement.
Placement is greedy list scheduling: a reduction is launched when its last gradient exists and waited
for once it is predicted to be through; a gather is waited for at its first use and launched as late
as hides it ``MARGIN`` times over behind the compute and the reductions in between, but not before
memory allows. The search tries bucket sizes on a geometric scale, for gathers, then for reductions,
and then merges and splits neighbours while that helps.

With n transfers and s steps, one schedule is placed, and its time predicted, in O(n log s + s). The
search makes O(log(bytes)) of them, and at most ``MAX_MOVES`` more.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ._torch import BackendError
from .plan import ALL_GATHER, Bucket, Problem, Transfer
from .simulate import Prices, alive_bytes, clock, in_flight_bytes

PACKED_LATENCY, PACKED_US = 0.1, 20.0
"""A tensor is copied into a shared buffer if the copy takes less than this part of a collective's
latency, and less than that: about what another tensor in a coalesced collective costs, which does
not grow with the number of ranks as the latency does."""
SMALL_BYTES, SMALL_CAP_BYTES = 1 << 20, 4 << 20
"""Without overlap: what shares a bucket, and how large that gets. A launch costs as much as a megabyte
on the wire does, within a factor of a few, on NVLink and on Ethernet alike."""
MARGIN = 2.0
"""A collective that takes this many times longer than predicted is still hidden."""
DEPTHS = (1, 2, 4, 16)
"""How many buckets ahead, to choose from. Where the wire is what all wait for, one keeps it busy, and
more would fill the memory; where many are due at once after much compute, more hide."""
MODEST_BYTES = 25 << 20
"""Memory that fewer collectives may cost without more ado; the size of DDP's buckets."""
MEMORY_PRICE = 1.0
"""Beyond that, a tenth more memory has to save a tenth of the time, unless a budget allows it."""
LAUNCH_PRICE_US = 30.0
"""Time that one collective less may cost; about what the host needs to issue one."""
MAX_MOVES = 200

Cuts = list[list[int]]
"""Positions in ``Problem.transfers`` by bucket."""


@dataclass(frozen=True)
class Limits:
    """What a schedule may not exceed, in bytes; None: no limit.

    Attributes:
        cap: a bucket; a larger tensor travels alone. None: found by the search.
        in_flight: all buffers between launch and wait; one alone may be larger.
        peak: all that is alive in a step.
    """

    cap: int | None = None
    in_flight: int | None = None
    peak: int | None = None


class BudgetError(BackendError):
    """No schedule keeps ``Limits.peak``; the least that one needs is ``needed`` bytes."""

    def __init__(self, graph: str, budget: int, needed: int) -> None:
        super().__init__(
            f"memory_budget_gb={budget / 1e9:g}: the {graph} graph needs {needed / 1e9:.3f} GB with "
            "every parameter gathered on its own at its first use; give at least that"
        )
        self.needed = needed


@dataclass(frozen=True)
class _Draft:
    """A schedule under consideration; a better one has a smaller score."""

    gathers: Cuts
    reductions: Cuts
    depth: int
    buckets: tuple[Bucket, ...]
    score: tuple[int, float, int]


def schedule(problem: Problem, prices: Prices, limits: Limits) -> tuple[Bucket, ...]:
    """The buckets of ``problem``, in launch order.

    Raises:
        BudgetError: ``limits.peak`` cannot be kept.
    """
    if limits.peak is not None and limits.peak < (needed := smallest_peak(problem)):
        raise BudgetError(problem.graph, limits.peak, needed)
    search = _Search(problem, prices, limits)
    best = search.sized()
    return (search.refined(best) if limits.cap is None else best).buckets


def without_overlap(problem: Problem) -> tuple[Bucket, ...]:
    """Each transfer where it is needed or ready, and waited for at once; small ones share buckets.

    It depends on parameters alone, not on predicted times.
    """
    cuts: Cuts = []
    filling: dict[tuple[str, ...], list[int]] = {}
    for i, transfer in enumerate(problem.transfers):
        needed_early = transfer.kind != ALL_GATHER and transfer.due < problem.num_steps
        if needed_early or transfer.num_bytes > SMALL_BYTES:
            cuts.append([i])
            continue
        cut = filling.get(key := (transfer.kind, transfer.group, transfer.dtype))
        if cut and sum(problem.transfers[j].num_bytes for j in [*cut, i]) <= SMALL_CAP_BYTES:
            cut.append(i)
        else:
            cuts.append([i])
            filling[key] = cuts[-1]
    buckets = []
    for cut in cuts:
        transfers = [problem.transfers[i] for i in cut]
        first = transfers[0]
        gathers = first.kind == ALL_GATHER
        at = min(t.due for t in transfers) if gathers else max(t.ready for t in transfers)
        num_bytes = sum(t.num_bytes for t in transfers)
        buckets.append(
            Bucket(first.kind, (tuple(cut),), num_bytes, first.group, first.world, at, at)
        )
    return _in_launch_order(buckets)


def smallest_peak(problem: Problem) -> int:
    """The least peak of any schedule, in bytes."""
    return max(least_bytes(problem), default=0)


def least_bytes(problem: Problem) -> list[int]:
    """By step, with each transfer alone, as late and for as short as it can be."""
    buckets = []
    for i, t in enumerate(problem.transfers):
        at = t.due if t.kind == ALL_GATHER else t.ready
        buckets.append(Bucket(t.kind, ((i,),), t.num_bytes, t.group, t.world, at, at))
    return alive_bytes(problem, buckets)


class _Search:
    def __init__(self, problem: Problem, prices: Prices, limits: Limits) -> None:
        self._problem, self._prices, self._limits = problem, prices, limits
        self._least_bytes = least_bytes(problem)
        least = max(self._least_bytes, default=0)
        self._modest = least + max(least // 20, MODEST_BYTES)
        self._start_us = [0.0, *accumulate(problem.compute_us)]
        self._small = [_is_small(transfer, prices) for transfer in problem.transfers]
        positions = range(len(problem.transfers))
        gathers = [i for i in positions if problem.transfers[i].kind == ALL_GATHER]
        reductions = [i for i in positions if problem.transfers[i].kind != ALL_GATHER]
        self._gathers = sorted(gathers, key=lambda i: problem.transfers[i].due)
        self._reductions = sorted(reductions, key=lambda i: problem.transfers[i].ready)

    def sized(self) -> _Draft:
        """The best of uniform sizes; what nothing can hide behind, the first gather and the last
        reduction, may be smaller. All alone is among them, which needs the least memory."""
        pairs = _size_pairs(self._problem, self._limits.cap)
        gathers = [_cut(self._problem, self._gathers, *pair) for pair in pairs]
        mirrored = [_cut(self._problem, self._reductions[::-1], *pair) for pair in pairs]
        reductions = [[cut[::-1] for cut in cuts[::-1]] for cuts in mirrored]
        best = min(
            (self._draft(cuts, reductions[-1], depth) for cuts in gathers for depth in DEPTHS),
            key=_score,
        )
        pairs_tried = [(best.gathers, cuts) for cuts in reductions] + [(gathers[0], reductions[0])]
        return min((self._draft(*p, depth) for p in pairs_tried for depth in DEPTHS), key=_score)

    def refined(self, best: _Draft) -> _Draft:
        """Merge and split buckets while that helps, in at most ``MAX_MOVES`` tries."""
        tries, at = 0, 0
        while tries < MAX_MOVES and at < len(best.gathers) + len(best.reductions):
            moved = [draft for move in (_merged, _split) for draft in self._moved(best, move, at)]
            tries += len(moved)
            better = min([best, *moved], key=_score)
            at += better is best
            best = better
        return best

    def _moved(
        self, draft: _Draft, move: Callable[[Problem, Cuts, int], Cuts | None], at: int
    ) -> list[_Draft]:
        num_gathers = len(draft.gathers)
        if at < num_gathers:
            gathers = move(self._problem, draft.gathers, at)
            return [] if gathers is None else [self._draft(gathers, draft.reductions, draft.depth)]
        reductions = move(self._problem, draft.reductions, at - num_gathers)
        return [] if reductions is None else [self._draft(draft.gathers, reductions, draft.depth)]

    def _draft(self, gathers: Cuts, reductions: Cuts, depth: int) -> _Draft:
        room = _Room(self._least_bytes, self._limits)
        reduced = self._place_reductions([self._bucket(cut) for cut in reductions], depth, room)
        gathered = self._place_gathers([self._bucket(cut) for cut in gathers], reduced, depth, room)
        buckets = _in_launch_order([*gathered, *reduced])
        total_us = clock(self._problem, buckets, self._prices).total_us
        alive = alive_bytes(self._problem, buckets)
        peak = max(alive, default=0)
        over = max(0, peak - self._limits.peak) if self._limits.peak is not None else 0
        # What is in flight may be there twice: backends copy, allocators hold it until the wait.
        flying = in_flight_bytes(self._problem, buckets)
        held = max((a + f for a, f in zip(alive, flying)), default=0)
        excess = max(0, held - self._modest) / self._modest if self._limits.peak is None else 0.0
        price_us = total_us * (1 + MEMORY_PRICE * excess) + LAUNCH_PRICE_US * len(buckets)
        return _Draft(gathers, reductions, depth, buckets, (over, price_us, peak))

    def _bucket(self, cut: Sequence[int]) -> Bucket:
        """Of ``cut``, not placed yet; small transfers share a parcel."""
        transfers = [self._problem.transfers[i] for i in cut]
        together = tuple(i for i in cut if self._small[i])
        alone = [(i,) for i in cut if not self._small[i]]
        return Bucket(
            kind=transfers[0].kind,
            parcels=(together, *alone) if together else tuple(alone),
            num_bytes=sum(transfer.num_bytes for transfer in transfers),
            group=transfers[0].group,
            world=transfers[0].world,
            launch=0,
            wait=0,
        )

    def _us(self, bucket: Bucket) -> float:
        return self._prices.collective_us(bucket.kind, bucket.num_bytes, bucket.world)

    def _place_reductions(self, buckets: list[Bucket], depth: int, room: _Room) -> list[Bucket]:
        """As early as can be; waited for when they are through, or when ``depth`` more were
        launched, if memory allows."""
        launches = [max(self._problem.transfers[i].ready for i in b.transfers) for b in buckets]
        limits = [*launches[depth:], *[self._problem.num_steps] * depth]
        placed = []
        free_us = 0.0
        for bucket, launch, limit in zip(buckets, launches, limits):
            transfers = [self._problem.transfers[i] for i in bucket.transfers]
            free_us = max(free_us, self._start_us[launch]) + self._us(bucket)
            slack_us = (MARGIN - 1) * self._us(bucket)
            through = bisect_left(self._start_us, free_us + slack_us, lo=launch)
            wish = min(through, limit, *(t.due for t in transfers))
            for transfer in transfers:
                room.take(transfer.num_bytes, transfer.ready, launch)
            wait = room.latest(bucket.num_bytes, launch, wish)
            placed.append(dataclasses.replace(bucket, launch=launch, wait=wait))
        return placed

    def _place_gathers(
        self, buckets: list[Bucket], reduced: list[Bucket], depth: int, room: _Room
    ) -> list[Bucket]:
        """Waited for at their first use; launched as late as hides them, but no more than ``depth``
        ahead, if memory allows."""
        due = [min(self._problem.transfers[i].due for i in bucket.transfers) for bucket in buckets]
        launches = self._latest_launches(buckets, due, reduced)
        ahead = [*[0] * depth, *due]
        placed = []
        for bucket, step, wish, earliest in zip(buckets, due, launches, ahead):
            for transfer in (self._problem.transfers[i] for i in bucket.transfers):
                room.take(transfer.num_bytes, step, transfer.due)
            launch = room.earliest(bucket.num_bytes, max(wish, earliest), step)
            placed.append(dataclasses.replace(bucket, launch=launch, wait=step))
        return placed

    def _latest_launches(
        self, buckets: list[Bucket], due: list[int], reduced: list[Bucket]
    ) -> list[int]:
        """From the last gather to the first: each ends when it is due, or when the next one has to
        begin, and gives way to the reductions that are launched meanwhile."""
        step_us = self._start_us
        releases = [(step_us[bucket.launch], self._us(bucket)) for bucket in reduced]
        launches = []
        next_us = math.inf
        for bucket, step in zip(reversed(buckets), reversed(due)):
            end_us = min(step_us[step], next_us)
            next_us = end_us - self._us(bucket)
            while releases and releases[-1][0] >= next_us:
                released_us, us = releases.pop()
                next_us -= us if released_us < end_us else 0.0
            slack_us = (MARGIN - 1) * self._us(bucket)
            launches.append(max(0, bisect_right(step_us, next_us - slack_us) - 1))
        return launches[::-1]


class _Room:
    """Memory left in every step, while buckets are placed one after the other.

    What no schedule can do without is taken from the start.
    """

    def __init__(self, least_bytes: Sequence[int], limits: Limits) -> None:
        self._limits = limits
        self._alive = list(least_bytes)
        self._in_flight = [0] * len(least_bytes)

    def take(self, num_bytes: int, begin: int, end: int) -> None:
        """Use memory in the steps ``[begin, end)``, whether there is room or not."""
        for step in range(begin, min(end, len(self._alive))):
            self._alive[step] += num_bytes

    def earliest(self, num_bytes: int, wish: int, due: int) -> int:
        """The first step from ``wish`` on from which there is room until ``due``; takes it."""
        begin = due
        while begin > wish and self._fits(num_bytes, begin - 1):
            begin -= 1
        self._fly(num_bytes, begin, due)
        return begin

    def latest(self, num_bytes: int, begin: int, wish: int) -> int:
        """The last step up to ``wish`` until which there is room from ``begin`` on; takes it."""
        end = begin
        while end < wish and self._fits(num_bytes, end):
            end += 1
        self._fly(num_bytes, begin, end)
        return end

    def _fly(self, num_bytes: int, begin: int, end: int) -> None:
        self.take(num_bytes, begin, end)
        for step in range(begin, end):
            self._in_flight[step] += num_bytes

    def _fits(self, num_bytes: int, step: int) -> bool:
        peak, in_flight = self._limits.peak, self._limits.in_flight
        if in_flight is not None and self._in_flight[step] + num_bytes > in_flight:
            return False
        return peak is None or self._alive[step] + num_bytes <= peak


def _in_launch_order(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(buckets, key=lambda bucket: bucket.launch))


def _score(draft: _Draft) -> tuple[int, float, int]:
    return draft.score


def _size_pairs(problem: Problem, cap: int | None) -> list[tuple[int, int]]:
    """Sizes to try, ascending: of the first bucket, and of the others."""
    if cap is not None:
        return [(0, 0), (cap, cap)]
    total = max(sum(transfer.num_bytes for transfer in problem.transfers), 1)
    sizes = [total >> shift for shift in range(12, -1, -1) if total >> shift]
    return [(0, 0), *((size >> shift, size) for size in sizes for shift in (4, 2, 0))]


def _cut(problem: Problem, order: Sequence[int], first_cap: int, cap: int) -> Cuts:
    """Cut ``order`` into buckets of neighbours of one kind and group."""
    cuts: Cuts = []
    size = 0
    for i in order:
        num_bytes = problem.transfers[i].num_bytes
        limit = first_cap if len(cuts) == 1 else cap
        if cuts and size + num_bytes <= limit and _joins(problem, cuts[-1][-1], i):
            cuts[-1].append(i)
            size += num_bytes
        else:
            cuts.append([i])
            size = num_bytes
    return cuts


def _joins(problem: Problem, one: int, other: int) -> bool:
    """Whether two transfers may share a bucket. What a reduction adds up has one dtype."""

    def key(transfer: Transfer) -> tuple[str, ...]:
        dtype = "" if transfer.kind == ALL_GATHER else transfer.dtype
        return transfer.kind, transfer.group, dtype

    return key(problem.transfers[one]) == key(problem.transfers[other])


def _merged(problem: Problem, cuts: Cuts, at: int) -> Cuts | None:
    if at + 1 >= len(cuts) or not _joins(problem, cuts[at][-1], cuts[at + 1][0]):
        return None
    return [*cuts[:at], cuts[at] + cuts[at + 1], *cuts[at + 2 :]]


def _split(problem: Problem, cuts: Cuts, at: int) -> Cuts | None:
    """Halve a bucket by bytes."""
    cut = cuts[at]
    if len(cut) == 1:
        return None
    sizes = list(accumulate(problem.transfers[i].num_bytes for i in cut))
    middle = min(max(bisect_left(sizes, sizes[-1] / 2), 1), len(cut) - 1)
    return [*cuts[:at], cut[:middle], cut[middle:], *cuts[at + 1 :]]


def _is_small(transfer: Transfer, prices: Prices) -> bool:
    latency_us = prices.collective_us(transfer.kind, 1, transfer.world)
    copy_us = prices.copy_us(transfer.num_bytes) - prices.copy_us(0)
    return copy_us <= min(PACKED_LATENCY * latency_us, PACKED_US)
