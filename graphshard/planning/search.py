"""Find the schedule of a graph: which transfers share a bucket, and when each bucket is sent.

Two splits (which gathers share a bucket, which reductions do) and a limit on bytes in flight
determine a schedule (``placement``). Coordinate descent over three sizes finds the first splits; a
local search then re-splits neighboring buckets while that helps, starting with the transfers that
cannot be hidden: the first gathers and the last reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from ..errors import BackendError
from .bucketing import Queue, gathers_by_due, sharing_key
from .buckets import in_launch_order, replica_bucket, shortest_lived
from .live_bytes import smallest_peak
from .memory_budget import ScheduleLimits
from .placement import BucketSizes, CandidateSchedule, Placer, Splits
from .plan import Bucket, Problem, Transfer
from .simulate import TransferCostModel

# Number of sizes on the scale: all bytes, repeatedly halved, and 0 (one transfer per bucket). The
# smallest nonzero size is 1/4096 of all bytes, less than a matrix of a dense model. Smaller
# sizes would have the same effect as 0; fewer sizes would leave out buckets of a few matrices.
NUM_SIZES = 14
# Maximum size of a bucket without a budget, in modest buckets (see ``_modest_bytes``). Measured
# with ``benchmarks/robustness.py``: at 2, if links are slower than planned, a model of four layers
# takes up to 11 % longer than with FSDP2's rule; with more, buffers take more memory.
CAP_BUCKETS = 3
# Budget of the local search: number of candidate schedules times number of transfers. Measured in
# all scenarios of ``benchmarks/robustness.py`` for Llama-3 8B and 70B: a ten times larger budget
# gains less than 0.3 %; without local search, schedules are up to 2.6 % slower.
LOCAL_SEARCH_BUDGET = 300_000
# Fractions of the modest buckets' memory that ``save_memory`` tries to give to late waits; the
# search lets waits use all of it.
WAIT_ROOMS = (0.0, 0.25, 0.5, 0.75)
# Maximum fraction by which earlier waits, which free memory, may raise ``Score.price_us``.
MAX_LOSS = 0.0005

_by_score = attrgetter("score")


class BudgetError(BackendError):
    """Raised when no schedule fits ``ScheduleLimits.peak``."""

    def __init__(self, graph: str, budget: int, needed: int) -> None:
        super().__init__(
            f"memory_budget_gb={budget / 1e9:g} (in a forecast, the part of budget_gb left for "
            f"graphs): the {graph} graph needs {needed / 1e9:.3f} GB even if each parameter is "
            "gathered alone at its first use. Raise the budget by the difference, use a smaller "
            "batch, or recompute more (schedule.activation_memory_budget; in a forecast, recompute)"
        )
        self.needed = needed  # smallest peak of any schedule, in bytes


def find_schedule(
    problem: Problem, cost_model: TransferCostModel, limits: ScheduleLimits, *, refine: bool = True
) -> tuple[Bucket, ...]:
    """Search for a schedule within ``limits``; return its buckets in launch order.

    Args:
        problem: problem without host copies; ``offload.add_host_copies`` adds their buckets.
        refine: whether to run the local search; without it, the search takes about a tenth of the
            time.

    Raises:
        BudgetError: no schedule fits ``limits.peak``.
    """
    if limits.peak is not None:
        needed = smallest_peak(problem, exchanges=limits.reduce == "exchange")
        if limits.peak < needed:
            raise BudgetError(problem.graph, limits.peak, needed)
    search = _Search(problem, cost_model, limits)
    schedule = search.descend()
    if refine:
        schedule = search.refine(schedule)
    if limits.peak is None:  # with a limit, waits do not depend on ``WAIT_ROOMS``
        schedule = search.save_memory(schedule)
    return schedule.buckets()


class _Search:
    def __init__(
        self, problem: Problem, cost_model: TransferCostModel, limits: ScheduleLimits
    ) -> None:
        self._transfers = problem.transfers
        modest = int(_modest_bytes(problem, cost_model))
        self._cap = limits.cap
        if limits.cap is None and limits.peak is None:
            self._cap = CAP_BUCKETS * modest
        self._gathers = Queue(problem, cost_model, self._cap, gathers_by_due(problem))
        last_first = _reductions_by_ready(problem)[::-1]
        self._reductions = Queue(
            problem,
            cost_model,
            self._cap,
            last_first,
            yields=limits.peak is None,
            reduce=limits.reduce,
        )
        self._placer = Placer(problem, cost_model, limits, modest)

    def descend(self) -> CandidateSchedule:
        scale = self._scale()
        # Size 0 is among the sizes: one transfer per bucket, one bucket at a time, which needs the
        # least memory. A feasible budget is therefore always met.
        best = min((self._place(BucketSizes(size, size, size)) for size in scale), key=_by_score)
        improves = True
        while improves:
            improves = False
            # About 42 candidates per round. Separate sizes for the first gather and the last
            # reduction gained nothing after the local search.
            for field in BucketSizes._fields:
                sizes = [best.sizes._replace(**{field: size}) for size in scale]
                schedule = min(map(self._place, sizes), key=_by_score)
                if schedule.score < best.score:
                    best, improves = schedule, True
        return best

    def _scale(self) -> list[int]:
        total = sum(t.num_bytes for t in self._transfers)
        sizes = [0, *(total >> shift for shift in reversed(range(NUM_SIZES - 1)))]
        if self._cap is None:
            return sizes
        return [*(size for size in sizes if size < self._cap), self._cap]

    def _place(self, sizes: BucketSizes) -> CandidateSchedule:
        splits = Splits(self._gathers.split(sizes.gather), self._reductions.split(sizes.reduction))
        return self._placer.place(splits, sizes)

    def refine(self, best: CandidateSchedule) -> CandidateSchedule:
        # Maximum number of candidate schedules; with n transfers, each bucket adds O(log n).
        tries = LOCAL_SEARCH_BUDGET // max(1, len(self._transfers))
        index = 0
        while tries > 0 and index < max(map(len, best.splits)):
            # Re-split the candidates at ``index`` of both queues until no variant is better.
            before = best
            for splits in list(self._variants(best.splits, index)):
                schedule = self._placer.place(splits, best.sizes)
                best = min(best, schedule, key=_by_score)
                tries -= 1
            index += best is before
        return best

    def save_memory(self, best: CandidateSchedule) -> CandidateSchedule:
        """Return ``best`` with earlier waits for reductions, if that lowers the peak.

        Earlier waits may raise ``Score.price_us`` by at most the fraction ``MAX_LOSS``.
        """
        for room in WAIT_ROOMS:
            schedule = self._placer.place(best.splits, best.sizes, room)
            if schedule.score.price_us <= (1 + MAX_LOSS) * best.score.price_us:
                return min(best, schedule, key=lambda each: each.score.peak_bytes)
        return best

    def _variants(self, splits: Splits, index: int) -> Iterator[Splits]:
        if index < len(splits.gathers):
            for split in self._gathers.variants(splits.gathers, index):
                yield splits._replace(gathers=split)
        if index < len(splits.reductions):
            for split in self._reductions.variants(splits.reductions, index):
                yield splits._replace(reductions=split)


def _reductions_by_ready(problem: Problem) -> list[int]:
    transfers = problem.transfers
    reductions = [i for i, t in enumerate(transfers) if t.kind.is_reduction]
    return sorted(reductions, key=lambda i: transfers[i].ready)


def _modest_bytes(problem: Problem, cost_model: TransferCostModel) -> float:
    """Return the bucket size beyond which larger buckets save little time."""
    # At this size, the fixed cost of a bucket (latency, and what compute loses to any collective)
    # is half of its time: merging two such buckets saves a quarter of their time.
    if not problem.transfers:
        return 0
    total = sum(t.num_bytes for t in problem.transfers)
    largest = max(problem.transfers, key=lambda t: t.num_bytes)
    latency_us, all_us = (
        cost_model.collective_us(largest.kind, num_bytes, largest.world, largest.stride)
        for num_bytes in (1, total)
    )
    share = (latency_us + cost_model.slowdown_us(0.0)) / max(all_us - latency_us, 1e-9)
    # Never less than the largest transfer, whose rate is used for all.
    return max(largest.num_bytes, min(1.0, share) * total)


# Largest transfer that shares a bucket without overlap, and largest shared bucket. By the cost
# model, 1 MiB on the wire takes about as long as the fixed cost of a collective: 5 us compared with
# 11 us on 8 H100 with NVLink, 36 us compared with 103 us on 64 over a network.
SMALL_BYTES, SMALL_CAP_BYTES = 1 << 20, 4 << 20


def schedule_without_overlap(problem: Problem, *, exchanges: bool = False) -> tuple[Bucket, ...]:
    """Return buckets that are waited for at their launch; small transfers share buckets.

    Args:
        exchanges: whether gradients with an ``exchange_dtype`` are exchanged.
    """
    # The result depends only on the transfers, not on predicted times.
    members: list[list[int]] = []
    filling: dict[tuple[str, ...], list[int]] = {}  # bucket being filled, by key and dtype
    for i, transfer in enumerate(problem.transfers):
        if transfer.num_bytes > SMALL_BYTES:
            members.append([i])
            continue
        key = *sharing_key(problem, i, "exchange" if exchanges else "ring"), transfer.dtype
        bucket = filling.get(key)
        if bucket and _fits([*(problem.transfers[j] for j in bucket), transfer]):
            bucket.append(i)
        else:
            filling[key] = [i]
            members.append(filling[key])
    buckets = [shortest_lived(problem, bucket, exchanges=exchanges) for bucket in members]
    averages = [replica_bucket(bucket, problem.transfers) for bucket in buckets]
    return in_launch_order([*buckets, *filter(None, averages)])


def _fits(transfers: Sequence[Transfer]) -> bool:
    in_time = max(t.ready for t in transfers) <= min(t.due for t in transfers)
    return in_time and sum(t.num_bytes for t in transfers) <= SMALL_CAP_BYTES
