"""Split queues of transfers into candidate buckets of neighboring transfers.

Gradients that are reduced in a wider dtype than their own go through a ring in the wider dtype, or
are exchanged in their own:

    ring       cast and pack all gradients   reduce-scatter in the wider dtype
    exchange   pack small gradients          all-to-all in the narrow dtype    sum this rank's rows

Within a node an exchange sends fewer bytes at the same rate: half, if bfloat16 gradients are summed
in float32. Between nodes, each rank sends through its own network card, whereas a ring uses all
cards of a node.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..kinds import TransferKind
from .buckets import bucket_of, may_exchange, replica_bucket
from .live_bytes import Footprint, footprint
from .memory_budget import Reduce
from .plan import Bucket, Problem, Transfer
from .simulate import BucketCost, TransferCostModel, bucket_cost

# An exchange must win even if its all-to-all takes this many times as long as predicted. Judgement
# call: the rates of rings have been measured more often, and the latency of a small all-to-all is
# assumed.
EXCHANGE_MARGIN = 1.25


class CostedBucket(NamedTuple):
    """A bucket with its predicted times and memory."""

    bucket: Bucket
    cost: BucketCost
    footprint: Footprint


class CandidateBucket(NamedTuple):
    """A possible bucket: the transfers of a queue at positions ``[begin, end)``.

    Attributes:
        bucket: collective, launched as early as its transfers and the queue's ``yields`` allow, and
            waited for as late as its transfers allow.
        replica_average: all-reduce of its shards over replicas, or None.
        continues: for a reduction, whether an all-reduce over replicas or a copy to the host
            follows the wait; not used for gathers.
    """

    begin: int
    end: int
    bucket: Bucket
    cost: BucketCost
    footprint: Footprint
    replica_average: CostedBucket | None
    continues: bool


Split = Sequence[CandidateBucket]  # a partition of a queue, in queue order


class Queue:
    """All gathers or all reductions of a problem, hardest to hide first.

    Only transfers with the same ``sharing_key`` may share a bucket. The queue is therefore
    regrouped into one run per key, and a bucket takes neighbors of one run, even if they are not
    neighbors in ``order``. A position is an index into the concatenated runs.

    Args:
        cap: maximum bytes of a candidate with more than one transfer, or None for no limit.
        order: indices into ``Problem.transfers``, hardest to hide first.
        yields: whether a bucket gives way to user collectives: if it could be launched right before
            one, it is launched one step later, unless it must be waited for at that step. For a
            reduction, this can take more memory.
    """

    def __init__(
        self,
        problem: Problem,
        cost_model: TransferCostModel,
        cap: int | None,
        order: Sequence[int],
        *,
        yields: bool = True,
        reduce: Reduce = "ring",
    ) -> None:
        self._problem, self._cost_model, self._yields = problem, cost_model, yields
        self._reduce: Reduce = reduce
        runs: dict[tuple[str, ...], list[int]] = {}
        for rank, i in enumerate(order):
            runs.setdefault(sharing_key(problem, i, reduce), []).append(rank)
        # Index in ``order``, by position.
        self._rank = [rank for run in runs.values() for rank in run]
        self._order = [order[rank] for rank in self._rank]
        run_ends = accumulate(map(len, runs.values()))
        self._run_end = [end for run, end in zip(runs.values(), run_ends) for _ in run]
        sizes = (problem.transfers[i].num_bytes for i in self._order)
        self._bytes_before = [0, *accumulate(sizes)]
        self._cap = self._bytes_before[-1] if cap is None else cap
        self._candidates: dict[tuple[int, int], CandidateBucket] = {}

    def split(self, size: int) -> Split:
        """Split the queue into candidates of at most ``size`` bytes; larger transfers go alone."""
        split: list[CandidateBucket] = []
        begin = 0
        while begin < len(self._order):
            end = bisect_right(self._bytes_before, self._bytes_before[begin] + size) - 1
            end = max(begin + 1, min(end, self._run_end[begin]))
            split.append(self.candidate(begin, self._last_end_in_time(begin, end)))
            begin = split[-1].end
        return self._in_queue_order(split)

    def variants(self, split: Split, index: int) -> Iterator[Split]:
        """Yield variants of ``split`` that re-split the candidate at ``index``.

        The candidate is re-split alone, or with the next one of its run: the two are merged, or the
        boundary between them moves. The part after the new boundary stays whole or is halved.
        """
        begin, end = split[index].begin, split[index].end
        steps = _powers_of_two(end - begin)  # distances from old boundaries: O(log n) variants
        inner = {boundary for step in steps for boundary in (begin + step, end - step)}
        recuts = [(boundary, end) for boundary in sorted(inner)]
        if end < self._run_end[begin]:
            # In ``split``, candidates of other runs may lie between the two.
            last = next(neighbor.end for neighbor in split[index:] if neighbor.begin == end)
            outer = [end + step for step in _powers_of_two(last - end)]
            recuts += [(boundary, last) for boundary in [*sorted(inner), *outer, last]]
        for boundary, last in recuts:
            half_bytes = (self._bytes_before[boundary] + self._bytes_before[last]) / 2
            middle = bisect_left(self._bytes_before, half_bytes)
            yield from self._with_boundaries(split, begin, boundary, last, last)
            if boundary < middle < last:
                yield from self._with_boundaries(split, begin, boundary, middle, last)

    def _with_boundaries(self, split: Split, *boundaries: int) -> Iterator[Split]:
        ranges = [(begin, end) for begin, end in pairwise(boundaries) if begin < end]
        if all(self._fits(begin, end) for begin, end in ranges):
            kept = [c for c in split if not boundaries[0] <= c.begin < boundaries[-1]]
            yield self._in_queue_order([*kept, *(self.candidate(*range_) for range_ in ranges)])

    def _in_queue_order(self, split: Split) -> Split:
        return sorted(split, key=lambda candidate: self._rank[candidate.begin])

    def _fits(self, begin: int, end: int) -> bool:
        num_bytes = self._bytes_before[end] - self._bytes_before[begin]
        return end - begin <= 1 or (num_bytes <= self._cap and self._is_in_time(begin, end))

    def _is_in_time(self, begin: int, end: int) -> bool:
        """Return whether all transfers are ready by the time the first one is due."""
        # An fp8 gather is ready once its scales are, and a graph may compute some scales late.
        bucket = self.candidate(begin, end).bucket
        return bucket.launch <= bucket.wait

    def _last_end_in_time(self, begin: int, end: int) -> int:
        """Return the largest end, at most ``end``, whose candidate from ``begin`` is in time."""
        if self._is_in_time(begin, end):
            return end
        late = bisect_left(
            range(begin + 1, end), True, key=lambda e: not self._is_in_time(begin, e)
        )
        return begin + late

    def candidate(self, begin: int, end: int) -> CandidateBucket:
        if (begin, end) not in self._candidates:
            self._candidates[begin, end] = self._make_candidate(begin, end)
        return self._candidates[begin, end]

    def _make_candidate(self, begin: int, end: int) -> CandidateBucket:
        members = sorted(self._order[begin:end])
        transfers = [self._problem.transfers[i] for i in members]
        launch = max(transfer.ready for transfer in transfers)
        wait = min(transfer.due for transfer in transfers)
        if self._yields and launch < wait:
            launch = self._problem.after_user_launch(launch)
        bucket = self._bucket(members, launch, wait)
        average = replica_bucket(bucket, self._problem.transfers)
        return CandidateBucket(
            begin,
            end,
            *self._costed(bucket),
            None if average is None else self._costed(average),
            average is not None or transfers[0].host,
        )

    def _costed(self, bucket: Bucket) -> CostedBucket:
        cost = bucket_cost(self._problem, bucket, self._cost_model)
        return CostedBucket(bucket, cost, footprint(self._problem, bucket))

    def _bucket(self, members: Sequence[int], launch: int, wait: int) -> Bucket:
        args = self._problem, members, self._cost_model, launch, wait
        may_choose = self._reduce != "ring" and may_exchange(self._problem, members)
        if may_choose and self._reduce == "auto":
            choice = compare_reductions(*args)
            return choice.ring if choice.why_ring else choice.exchange
        return packed_bucket(*args, exchanges=may_choose)


class ReductionChoice(NamedTuple):
    """A ring and an exchange of the same gradients, their costs, and the choice between them."""

    ring: Bucket
    exchange: Bucket
    ring_cost: BucketCost
    exchange_cost: BucketCost
    why_ring: str  # reason not to exchange, or ""


def compare_reductions(
    problem: Problem,
    members: Sequence[int],
    cost_model: TransferCostModel,
    launch: int,
    wait: int,
) -> ReductionChoice:
    """Compare a ring with an exchange of the same gradients, for which ``may_exchange`` is true.

    The exchange is chosen if, at ``EXCHANGE_MARGIN`` times its predicted duration, it takes less
    time on the link and no more compute time, including the slowdown by the collective. It then
    wins whether or not compute hides it, even if all links are slower than predicted.
    """
    ring, exchange = (
        packed_bucket(problem, members, cost_model, launch, wait, exchanges=exchanges)
        for exchanges in (False, True)
    )
    costs = bucket_cost(problem, ring, cost_model), bucket_cost(problem, exchange, cost_model)
    return ReductionChoice(ring, exchange, *costs, _why_ring(*costs, cost_model))


def _why_ring(ring: BucketCost, exchange: BucketCost, cost_model: TransferCostModel) -> str:
    lane_us = EXCHANGE_MARGIN * exchange.lane_us
    if lane_us >= ring.lane_us:
        return "not clearly faster on the link"
    ring_us, exchange_us = (
        cost.copy_in_us + cost.copy_out_us + cost_model.slowdown_us(us)
        for cost, us in ((ring, ring.lane_us), (exchange, lane_us))
    )
    return "takes more compute" if exchange_us > ring_us else ""


def packed_bucket(
    problem: Problem,
    members: Sequence[int],
    cost_model: TransferCostModel,
    launch: int,
    wait: int,
    *,
    exchanges: bool = False,
) -> Bucket:
    """Return a bucket of ``members``, in which small transfers share buffers."""
    sent = {
        i: problem.transfers[i].exchanged() if exchanges else problem.transfers[i] for i in members
    }
    float8: list[int] = []
    others: list[int] = []
    alone: list[tuple[int, ...]] = []
    for i, transfer in sent.items():
        if not _is_small(transfer, cost_model):
            alone.append((i,))
        else:
            # fp8 has a separate shared buffer, because the kernel that casts to fp8 also packs.
            (float8 if "float8" in transfer.dtype else others).append(i)
    packed = _packed({i: sent[i] for i in others}, cost_model)
    buffers = (*filter(None, (tuple(float8), *packed)), *alone)
    return bucket_of(problem, buffers, launch=launch, wait=wait, exchanges=exchanges)


def _packed(sent: Mapping[int, Transfer], cost_model: TransferCostModel) -> list[tuple[int, ...]]:
    """Group transfers into one shared buffer, or two if packing mixed dtypes would cost more."""
    # One kernel packs gradients for all ranks if their dtypes are equal (``chunk_cat_`` in
    # ``graphshard._torch.tensors``); otherwise packing takes one kernel per gradient.
    cast = tuple(i for i, t in sent.items() if t.casts)
    uncast = tuple(i for i, t in sent.items() if not t.casts)
    first = next(iter(sent.values()), None)
    if first and first.kind == TransferKind.REDUCE_SCATTER and cast and uncast:
        launches_us = cost_model.copy_us(0) * len(sent)
        if launches_us > cost_model.buffer_us(first.world, first.stride):
            return [cast, uncast]
    return [tuple(sent)]


def gathers_by_due(problem: Problem) -> list[int]:
    """Return the positions of all gathers, in the order in which they are due."""
    transfers = problem.transfers
    gathers = [i for i, t in enumerate(transfers) if t.kind == TransferKind.ALL_GATHER]
    return sorted(gathers, key=lambda i: transfers[i].due)


def _powers_of_two(stop: int) -> list[int]:
    return [1 << k for k in range((stop - 1).bit_length())]


def sharing_key(problem: Problem, i: int, reduce: Reduce) -> tuple[str, ...]:
    """Return a key that is equal for transfers that may share a bucket."""
    transfer = problem.transfers[i]
    if not transfer.kind.is_reduction:
        return transfer.kind, transfer.group, str(transfer.host)
    if transfer.due < problem.num_steps:  # used in the graph: must not wait for other transfers
        return (f"{i}",)
    # All transfers of a reduction, or of an exchange, have the same dtype.
    exchange_dtype = "" if reduce == "ring" else transfer.exchange_dtype
    dtypes = transfer.dtype, transfer.summed_in, exchange_dtype
    return transfer.kind, transfer.group, transfer.replicas, *dtypes, str(transfer.host)


def _is_small(transfer: Transfer, cost_model: TransferCostModel) -> bool:
    """Return whether copying a tensor into a shared buffer costs less than a separate buffer."""
    # A gradient that is cast is copied anyway, and its shard is a slice of the buffer.
    if transfer.casts and transfer.kind.is_reduction:
        return True
    copy_us = cost_model.copy_us(transfer.num_bytes) - cost_model.copy_us(0)
    return copy_us <= cost_model.buffer_us(transfer.world, transfer.stride)
