"""Optimal schedules of small problems, by mixed-integer programs solved with HiGHS.

Each way to split the queues into buckets has its own program. It chooses the step before which each
bucket is launched, and the order of buckets. Times are longest paths, as in ``clock``:

    launched[b, s]  b is launched before step s: exactly one s, from b's earliest launch to its wait
    order[a, b]     a comes before b: it is launched no later, and sent first
    copied[b]       end of b's copy-in: after the step before s, and after a's copy-in
    sent[b]         end of b's collective: after its copy-in, and after a's collective
    front[s]        end of the copy-ins of all buckets that are launched before step s
    start[s]        start of step s: after front[s], and after the buckets that it waits for

Waits are as late as possible, which is never slower since memory is unlimited here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from graphshard.kinds import TransferKind
from graphshard.planning.bucketing import Queue, Split
from graphshard.planning.plan import Bucket, Problem
from graphshard.planning.simulate import BucketCost, TransferCostModel, bucket_cost, clock

Terms = dict[int, float]
"""Coefficients of a row, by variable."""


def price_us(problem: Problem, buckets: tuple[Bucket, ...], cost_model: TransferCostModel) -> float:
    """Return the planner's objective without memory: total time plus lost compute."""
    costs = [bucket_cost(problem, bucket, cost_model) for bucket in buckets]
    slowdown_us = sum(cost_model.slowdown_us(cost.lane_us) for cost in costs)
    return clock(problem, buckets, cost_model).total_us + slowdown_us


def best(problem: Problem, cost_model: TransferCostModel) -> tuple[tuple[Bucket, ...], float]:
    best_buckets: tuple[Bucket, ...] = ()
    least_us = math.inf
    for split in _all_splits(problem, cost_model):
        lane_us = sum(candidate.cost.lane_us for candidate in split)
        fixed_us = sum(cost_model.slowdown_us(candidate.cost.lane_us) for candidate in split)
        if fixed_us + max(lane_us, sum(problem.compute_us)) < least_us:
            buckets, total_us = _Program(problem, split).solved()
            if fixed_us + total_us < least_us:
                best_buckets, least_us = buckets, fixed_us + total_us
    return best_buckets, least_us


def _all_splits(problem: Problem, cost_model: TransferCostModel) -> Iterator[Split]:
    """Yield each split of the gathers (sorted by ``due``) with each of the reductions (``ready``).

    Splits with a bucket that is ready only after it is due are omitted.
    """
    positions = range(len(problem.transfers))
    gathers = [i for i in positions if problem.transfers[i].kind == TransferKind.ALL_GATHER]
    reductions = [i for i in positions if problem.transfers[i].kind != TransferKind.ALL_GATHER]
    gathers.sort(key=lambda i: problem.transfers[i].due)
    reductions.sort(key=lambda i: problem.transfers[i].ready)
    choices = [
        [
            [
                Queue(problem, cost_model, None, order).candidate(*span)
                for span in itertools.pairwise(boundaries)
            ]
            for boundaries in _all_boundaries(len(order))
        ]
        for order in (gathers, reductions)
    ]
    for one, other in itertools.product(*choices):
        if all(c.bucket.launch <= c.bucket.wait for c in (*one, *other)):
            yield [*one, *other]


def _all_boundaries(num: int) -> Iterator[list[int]]:
    """Yield every partition of a sequence of `num` items, as the starts of parts and the end."""
    for inner in itertools.product([False, True], repeat=max(0, num - 1)):
        boundaries = [i for i, is_boundary in enumerate(inner, 1) if is_boundary]
        yield [0, *boundaries, *([num] if num else [])]


class _Program:
    """The program of one split; each row states a lower bound of a sum of terms."""

    def __init__(self, problem: Problem, split: Split) -> None:
        self._problem = problem
        self._buckets = [candidate.bucket for candidate in split]
        self._costs = [candidate.cost for candidate in split]
        self._upper: list[float] = []
        self._rows: list[tuple[Terms, float]] = []
        # Longer than any schedule; the solver gets times as fractions of it.
        self._ever_us = sum(problem.compute_us) + sum(sum(cost[:3]) for cost in self._costs) + 1.0
        num, steps = range(len(split)), range(problem.num_steps + 1)
        self._launched = {
            (b, s): self._variable(1.0)
            for b, bucket in enumerate(self._buckets)
            for s in range(bucket.launch, bucket.wait + 1)
        }
        self._order = {(a, b): self._variable(1.0) for a in num for b in num if a != b}
        self._num_binary = len(self._upper)
        self._copied, self._sent, self._front, self._start = (
            [self._variable(1.0) for _ in indices] for indices in (num, num, steps, steps)
        )
        self._total = self._variable(1.0)
        self._constrain()

    def _variable(self, upper: float) -> int:
        self._upper.append(upper)
        return len(self._upper) - 1

    def _require_after(
        self, late: int, early: int | None, us: float, condition: int | None = None
    ) -> None:
        """Require ``late`` to be at least ``us`` after ``early`` if ``condition`` is 1.

        Args:
            early: variable; None: the start of the schedule.
            condition: binary variable; None: always required.
        """
        terms = {late: 1.0}
        if early is not None:
            terms[early] = -1.0
        if condition is not None:
            terms[condition] = -1.0
        self._rows.append((terms, us / self._ever_us - (condition is not None)))

    def _constrain(self) -> None:
        for b, cost in enumerate(self._costs):
            self._one_of([x for (bucket, _), x in self._launched.items() if bucket == b])
            self._require_after(self._sent[b], self._copied[b], cost.lane_us)
            self._require_after(self._total, self._sent[b], 0.0)
        for a, b in self._order:
            self._ordered(a, b, self._costs[b])
        for three in itertools.permutations(range(len(self._costs)), 3):
            pairs = [*itertools.pairwise(three), (three[2], three[0])]
            self._rows.append(({self._order[pair]: -1.0 for pair in pairs}, -2.0))
        for step in range(self._problem.num_steps + 1):
            self._step(step)
        self._require_after(self._total, self._start[-1], 0.0)

    def _ordered(self, a: int, b: int, cost: BucketCost) -> None:
        condition = self._order[a, b]
        if a < b:
            self._one_of([condition, self._order[b, a]])
        self._require_after(self._copied[b], self._copied[a], cost.copy_in_us, condition)
        self._require_after(self._sent[b], self._sent[a], cost.lane_us, condition)
        steps = self._problem.num_steps
        late = {x: float(s) for (bucket, s), x in self._launched.items() if bucket == b}
        late |= {x: -float(s) for (bucket, s), x in self._launched.items() if bucket == a}
        self._rows.append((late | {condition: -float(steps)}, -float(steps)))

    def _step(self, step: int) -> None:
        before = self._start[step - 1] if step else None
        us = self._problem.compute_us[step - 1] if step else 0.0
        self._require_after(self._front[step], before, us)
        for b in (b for b, s in self._launched if s == step):
            condition = self._launched[b, step]
            self._require_after(self._copied[b], before, us + self._costs[b].copy_in_us, condition)
            self._require_after(self._front[step], self._copied[b], 0.0, condition)
        waited = [b for b, bucket in enumerate(self._buckets) if bucket.wait == step]
        out_us = {b: self._costs[b].copy_out_us for b in waited}
        self._require_after(self._start[step], self._front[step], sum(out_us.values()))
        for b in waited:
            # Buckets are copied out in launch order: after this one, the later ones remain.
            others = {self._order[b, a]: -out_us[a] / self._ever_us for a in waited if a != b}
            terms = {self._start[step]: 1.0, self._sent[b]: -1.0}
            self._rows.append((terms | others, out_us[b] / self._ever_us))

    def _one_of(self, binaries: list[int]) -> None:
        self._rows.append((dict.fromkeys(binaries, 1.0), 1.0))
        self._rows.append((dict.fromkeys(binaries, -1.0), -1.0))

    def solved(self) -> tuple[tuple[Bucket, ...], float]:
        matrix = np.zeros((len(self._rows), len(self._upper)))
        for row, (terms, _) in zip(matrix, self._rows):
            row[list(terms)] = list(terms.values())
        least = [number for _, number in self._rows]
        aim, integral = np.zeros((2, len(self._upper)))
        aim[self._total], integral[: self._num_binary] = 1.0, 1
        answer = _solved(aim, integral, self._upper, matrix, np.array(least))
        placed = []
        for b, bucket in enumerate(self._buckets):
            (launch,) = (
                step
                for (other, step), x in self._launched.items()
                if other == b and answer.x[x] > 0.5
            )
            rank = sum(answer.x[x] for (_, other), x in self._order.items() if other == b)
            placed.append((launch, round(rank), dataclasses.replace(bucket, launch=launch)))
        placed.sort(key=lambda entry: entry[:2])
        return tuple(bucket for *_, bucket in placed), float(answer.x[self._total]) * self._ever_us


def _solved(aim: Any, integral: Any, upper: Any, matrix: Any, least: Any) -> OptimizeResult:
    """Solve the program, with rescaled rows if necessary.

    HiGHS sometimes rejects its own solution for an error as large as its tolerance. With rescaled
    rows, it finds a different solution.
    """
    for scale in (1.0, 10.0, 100.0, 1000.0):
        rows = LinearConstraint(scale * matrix, scale * least, np.inf)
        answer = milp(aim, integrality=integral, bounds=Bounds(0, upper), constraints=rows)
        if answer.success:
            return answer
    raise AssertionError(answer.message)
