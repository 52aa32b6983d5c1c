"""Which transfers may share a bucket: queues of them, cut into groups of neighbours. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..kinds import TransferKind
from .plan import Bucket, Problem, Transfer, replica_bucket
from .simulate import BucketCost, TransferCostModel, bucket_cost


class Candidate(NamedTuple):
    """Neighbours in a queue, ``[begin, end)``, that may share a bucket.

    Attributes:
        bucket: launched as early and waited for as late as may be.
        freed_bytes: what its end sets free: of gradients all but the shards.
        then: what averages its shards over their replicas, and what that costs.
    """

    begin: int
    end: int
    bucket: Bucket
    cost: BucketCost
    freed_bytes: int
    then: tuple[Bucket, BucketCost] | None


Cuts = Sequence[Candidate]


class Queue:
    """The transfers of one direction, from that on which the least can hide, cut into groups.

    Neighbours are those that may share a bucket, one behind the other; others may be between them.

    Args:
        order: positions in ``Problem.transfers``.
        cap: bytes of a group of more than one; None: no limit.
    """

    def __init__(
        self, problem: Problem, prices: TransferCostModel, cap: int | None, order: Sequence[int]
    ) -> None:
        self._problem, self._prices = problem, prices
        runs: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for rank, i in enumerate(order):
            runs.setdefault(_key(problem, i), []).append((rank, i))
        self._rank = [rank for run in runs.values() for rank, _ in run]
        self._order = [i for run in runs.values() for _, i in run]
        ends = accumulate(map(len, runs.values()))
        self._run_end = [end for run, end in zip(runs.values(), ends) for _ in run]
        self._bytes = [0, *accumulate(problem.transfers[i].num_bytes for i in self._order)]
        self._cap = self._bytes[-1] if cap is None else cap
        self._groups: dict[tuple[int, int], Candidate] = {}

    def cut(self, first_size: int, size: int) -> Cuts:
        """Into groups of ``size`` at most. Each run begins with one of ``first_size``, and what follows
        is at most twice as large as the one before: little compute can only hide little."""
        cuts: list[Candidate] = []
        begin = limit = 0
        while begin < len(self._order):
            leads = begin == 0 or self._run_end[begin - 1] == begin
            limit = first_size if leads else min(size, 2 * max(limit, cuts[-1].bucket.num_bytes))
            end = bisect_right(self._bytes, self._bytes[begin] + limit) - 1
            cuts.append(self.group(begin, max(begin + 1, min(end, self._run_end[begin]))))
            begin = cuts[-1].end
        return self._sorted(cuts)

    def moved(self, cuts: Cuts, at: int) -> Iterator[Cuts]:
        """With group ``at`` cut in other ways, alone and with its neighbour: merged, or with a border
        1, 2, 4, ... transfers from where they are, and with what is behind that in one or halved."""
        begin, end = cuts[at].begin, cuts[at].end
        inner = {of for step in _doubling(end - begin) for of in (begin + step, end - step)}
        spans = [(border, end) for border in sorted(inner)]
        if end < self._run_end[begin]:
            last = next(group.end for group in cuts[at:] if group.begin == end)
            outer = [end + step for step in _doubling(last - end)]
            spans += [(border, last) for border in [*sorted(inner), *outer, last]]
        for border, last in spans:
            middle = bisect_left(self._bytes, (self._bytes[border] + self._bytes[last]) / 2)
            yield from self._recut(cuts, begin, border, last, last)
            if border < middle < last:
                yield from self._recut(cuts, begin, border, middle, last)

    def _recut(self, cuts: Cuts, *borders: int) -> Iterator[Cuts]:
        spans = [(one, other) for one, other in pairwise(borders) if one < other]
        if all(self._fits(*span) for span in spans):
            others = [g for g in cuts if not borders[0] <= g.begin < borders[-1]]
            yield self._sorted([*others, *(self.group(*span) for span in spans)])

    def _sorted(self, cuts: Cuts) -> Cuts:
        return sorted(cuts, key=lambda group: self._rank[group.begin])

    def _fits(self, begin: int, end: int) -> bool:
        return end - begin <= 1 or self._bytes[end] - self._bytes[begin] <= self._cap

    def group(self, begin: int, end: int) -> Candidate:
        """Of ``[begin, end)``; made once."""
        if (begin, end) not in self._groups:
            self._groups[begin, end] = self._grouped(begin, end)
        return self._groups[begin, end]

    def _grouped(self, begin: int, end: int) -> Candidate:
        cut = sorted(self._order[begin:end])
        transfers = [self._problem.transfers[i] for i in cut]
        is_small = [_is_small(transfer, self._prices) for transfer in transfers]
        # What is cast to fp8 is packed by the kernel that casts it, so it has a parcel of its own.
        small: dict[bool, list[int]] = {}
        for i, transfer, of in zip(cut, transfers, is_small):
            if of:
                small.setdefault("float8" in transfer.dtype, []).append(i)
        alone = [(i,) for i, of in zip(cut, is_small) if not of]
        bucket = Bucket(
            kind=transfers[0].kind,
            buffers=(*map(tuple, small.values()), *alone),
            num_bytes=self._bytes[end] - self._bytes[begin],
            group=transfers[0].group,
            world=transfers[0].world,
            launch=max(transfer.ready for transfer in transfers),
            wait=min(transfer.due for transfer in transfers),
            stride=transfers[0].stride,
        )
        cost = bucket_cost(self._problem, bucket, self._prices)
        then = replica_bucket(bucket, self._problem.transfers)
        averages = (then, bucket_cost(self._problem, then, self._prices)) if then else None
        return Candidate(begin, end, bucket, cost, sum(map(freed_bytes, transfers)), averages)


def _doubling(stop: int) -> list[int]:
    """1, 2, 4, ... below ``stop``."""
    return [1 << k for k in range((stop - 1).bit_length())]


def freed_bytes(transfer: Transfer) -> int:
    """What is alive before the wait for a reduction, or during a gather, and not otherwise."""
    if transfer.kind == TransferKind.ALL_GATHER:
        return transfer.num_bytes + transfer.host * transfer.shard_bytes
    return transfer.num_bytes - (not transfer.host) * transfer.shard_bytes


def _key(problem: Problem, i: int) -> tuple[str, ...]:
    """What transfers have in common that may share a bucket. What a reduction adds up has one dtype,
    and what the graph itself uses does not wait for others."""
    transfer = problem.transfers[i]
    if transfer.kind == TransferKind.ALL_GATHER:
        return transfer.kind, transfer.group, str(transfer.host)
    if transfer.due < problem.num_steps:
        return (f"{i}",)
    return transfer.kind, transfer.group, transfer.replicas, transfer.dtype, str(transfer.host)


def _is_small(transfer: Transfer, prices: TransferCostModel) -> bool:
    """A tensor is copied into a shared buffer if that takes less than a buffer of its own costs. What
    is cast is copied anyway, and reduced shards are slices of a buffer."""
    if transfer.casts and transfer.kind != TransferKind.ALL_GATHER:
        return True
    copy_us = prices.copy_us(transfer.num_bytes) - prices.copy_us(0)
    return copy_us <= prices.buffer_us(transfer.world, transfer.stride)
