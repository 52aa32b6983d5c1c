"""How well are Llama-3's training graphs scheduled on simulated H100 clusters?

    python -m benchmarks.schedules [--models 8B 70B 405B] [--gpus 8 64 256 1024] [--out FILE]

Needs no ranks and no data, only fake tensors and a fake process group. A model is traced once, by
Dynamo and AOTAutograd with graphshard's own passes. Its forward and backward graphs, each a
``Problem``, are scheduled for every number of GPUs by

    graphshard           the planner
    FSDP2's rule         a bucket per block and one for the rest, copied in and out. A gather is
                         launched when the one before it has arrived. A reduction is launched when
                         its block's gradients are ready, and waited for when the next is launched
    ... no copies        the same buckets, sent as coalesced collectives
    ... root kept        like FSDP2, also keeps the rest unsharded from forward to backward
    unscheduled          FSDP2's buckets, launched where they are needed and waited for at once

All schedules are simulated by ``graphshard.planning.simulate``, on the hardware table's H100 with
400 Gb/s per GPU.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks import common
from benchmarks.llama import DEVICE, LLAMA3, TOKENS, trace
from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.buckets import bucket_of, in_launch_order
from graphshard.planning.live_bytes import fixed_by_point, smallest_peak, with_fixed_bytes
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import (
    COMMUNICATION,
    TransferCostModel,
    simulate,
    start_times_us,
)

COST_MODEL = CostModel(HARDWARE[DEVICE])
Rule = Callable[[Plan, Problem], Sequence[Bucket]]


def at_world(plan: Plan, world: int) -> Problem:
    """Return the problem of ``plan`` with the shards and the padding of ``world`` ranks.

    Full parameters that are freed before their last step ends keep the traced padding.
    """
    before = plan.problem
    transfers = tuple(_resized(plan, transfer, world) for transfer in before.transfers)
    # Shards are inputs: they are alive throughout.
    grown = sum(
        new.num_bytes // new.world - old.num_bytes // old.world
        for new, old in zip(transfers, before.transfers)
        if new.kind == TransferKind.ALL_GATHER
    )
    return _with_more_bytes(dataclasses.replace(before, transfers=transfers), grown)


def _with_more_bytes(problem: Problem, num_bytes: int) -> Problem:
    other = [alive + num_bytes for alive in fixed_by_point(problem)]
    return with_fixed_bytes(problem, other)


def _resized(plan: Plan, transfer: Transfer, world: int) -> Transfer:
    param = plan.params[transfer.param]
    assert param.padded_rows is not None
    row_bytes = transfer.num_bytes // (param.padded_rows * transfer.world)
    rows = math.ceil(param.shape[0] / world)
    shard_bytes = transfer.shard_bytes // param.padded_rows * rows
    num_bytes = rows * world * row_bytes
    was_padded, is_padded = (
        bool(transfer.grad_bytes) and sent_rows != param.shape[0]
        for sent_rows in (param.padded_rows * transfer.world, rows * world)
    )
    return dataclasses.replace(
        transfer,
        num_bytes=num_bytes,
        shard_bytes=shard_bytes,
        world=world,
        copied_in=is_padded or (transfer.copied_in and not was_padded),
    )


# --- rules ---------------------------------------------------------------------------------------

Positions = list[int]
"""Positions in ``Problem.transfers`` of the transfers in a bucket."""


class Blocks(NamedTuple):
    gathers: list[Positions]
    reductions: list[Positions]


def by_block(plan: Plan, problem: Problem) -> Blocks:
    """Return the transfers of each block, and of the rest of the model, in launch order."""
    gathers: dict[str, list[int]] = {}
    reductions: dict[str, list[int]] = {}
    for i, transfer in enumerate(problem.transfers):
        parts = plan.params[transfer.param].fqn.split(".")
        unit = parts[1] if parts[0] == "blocks" else "root"
        (gathers if transfer.kind == TransferKind.ALL_GATHER else reductions).setdefault(
            unit, []
        ).append(i)
    return Blocks(
        gathers=sorted(gathers.values(), key=lambda positions: _due(problem, positions)),
        reductions=sorted(reductions.values(), key=lambda positions: _ready(problem, positions)),
    )


def _due(problem: Problem, positions: Sequence[int]) -> int:
    return min(problem.transfers[i].due for i in positions)


def _ready(problem: Problem, positions: Sequence[int]) -> int:
    return max(problem.transfers[i].ready for i in positions)


def _bucket(problem: Problem, positions: Sequence[int], launch: int, wait: int) -> Bucket:
    return bucket_of(problem, (tuple(positions),), launch=launch, wait=wait)


def fsdp2_rule(plan: Plan, problem: Problem) -> Sequence[Bucket]:
    """Schedule as eager FSDP2 does by default (``_fsdp_param_group.py``)."""
    blocks = by_block(plan, problem)
    due = [_due(problem, positions) for positions in blocks.gathers]
    ready = [_ready(problem, positions) for positions in blocks.reductions]
    launches = [0, *due[:-1]]
    waits = [*ready[1:], problem.num_steps]
    buckets = [_bucket(problem, *row) for row in zip(blocks.gathers, launches, due)]
    buckets += [_bucket(problem, *row) for row in zip(blocks.reductions, ready, waits)]
    return in_launch_order(buckets)


def uncopied(plan: Plan, problem: Problem) -> list[Bucket]:
    buckets = fsdp2_rule(plan, problem)
    return [dataclasses.replace(b, buffers=tuple((i,) for i in b.transfers)) for b in buckets]


def unscheduled(plan: Plan, problem: Problem) -> Sequence[Bucket]:
    blocks = by_block(plan, problem)
    placed = [(positions, _due(problem, positions)) for positions in blocks.gathers]
    placed += [(positions, _ready(problem, positions)) for positions in blocks.reductions]
    buckets = [_bucket(problem, positions, step, step) for positions, step in placed]
    return in_launch_order(buckets)


def root_kept(plan: Plan, problem: Problem) -> Problem:
    if plan.graph != GraphKind.BACKWARD:
        return problem
    is_root = [not plan.params[t.param].fqn.startswith("blocks.") for t in problem.transfers]
    kept = [
        t
        for t, root in zip(problem.transfers, is_root)
        if not root or t.kind != TransferKind.ALL_GATHER
    ]
    num_bytes = sum(t.num_bytes for t in problem.transfers) - sum(t.num_bytes for t in kept)
    return _with_more_bytes(dataclasses.replace(problem, transfers=tuple(kept)), num_bytes)


# --- judging -------------------------------------------------------------------------------------


def lower_bound_us(problem: Problem, cost_model: TransferCostModel) -> float:
    """Return a lower bound on the time of any schedule of ``problem``.

    The bound is the larger of two. The communication lane sends all bytes, in one collective per
    kind. The compute lane runs all steps: a step runs after all parameters due by then are
    gathered, and after it, all gradients that become ready later must still be reduced.
    """
    start_us = start_times_us(problem)
    gathers = [t for t in problem.transfers if t.kind == TransferKind.ALL_GATHER]
    reductions = [t for t in problem.transfers if t.kind != TransferKind.ALL_GATHER]
    first_us = last_us = 0.0
    for step in {t.due for t in gathers}:
        early = [t for t in gathers if t.due <= step]
        first_us = max(first_us, _at_once_us(early, cost_model) - start_us[step])
    for step in {t.ready for t in reductions}:
        late = [t for t in reductions if t.ready >= step]
        last_us = max(last_us, _at_once_us(late, cost_model) - (start_us[-1] - start_us[step]))
    return max(_at_once_us(problem.transfers, cost_model), first_us + start_us[-1] + last_us)


def _at_once_us(transfers: Sequence[Transfer], cost_model: TransferCostModel) -> float:
    by_kind: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        by_kind.setdefault(transfer.kind, []).append(transfer)
    return sum(
        cost_model.collective_us(kind, sum(t.num_bytes for t in same_kind), same_kind[0].world)
        for kind, same_kind in by_kind.items()
    )


@dataclass(frozen=True)
class Outcome:
    """The prediction for one step (forward and backward).

    Attributes:
        step_us: time of the step, without the optimizer.
        bound_us: sum of the lower bounds of both graphs.
        exposed_us: time that compute waits for communication.
        communication_us: time that the communication lane is busy.
        peak_bytes: larger peak of the two graphs, with all sharded parameters and gradients.
        num_collectives: number of collectives in both graphs.
        planning_s: seconds that scheduling took.
    """

    step_us: float
    bound_us: float
    exposed_us: float
    communication_us: float
    peak_bytes: int
    num_collectives: int
    planning_s: float


def judge(
    plans: Sequence[Plan], problems: Sequence[Problem], rule: Rule, cost_model: TransferCostModel
) -> Outcome:
    """Predict a step of these problems, one for each plan, scheduled by ``rule``."""
    begin = time.perf_counter()
    schedules = [rule(plan, problem) for plan, problem in zip(plans, problems)]
    planning_s = time.perf_counter() - begin
    timelines = [
        simulate(problem, buckets, cost_model) for problem, buckets in zip(problems, schedules)
    ]
    return Outcome(
        step_us=sum(timeline.total_us for timeline in timelines),
        bound_us=sum(lower_bound_us(problem, cost_model) for problem in problems),
        exposed_us=sum(sum(timeline.exposed_us) for timeline in timelines),
        communication_us=sum(timeline.busy_us(COMMUNICATION) for timeline in timelines),
        peak_bytes=max(timeline.peak_bytes for timeline in timelines),
        num_collectives=sum(map(len, schedules)),
        planning_s=planning_s,
    )


# --- output --------------------------------------------------------------------------------------

OURS, RULE, NONE = "graphshard", "FSDP2's rule", "unscheduled"
UNCOPIED, KEPT = f"{RULE}, no copies", f"{RULE}, no copies, root kept"


def judged(plans: Sequence[Plan], gpus: int) -> dict[str, Outcome]:
    problems = [at_world(plan, gpus) for plan in plans]
    kept = [root_kept(plan, problem) for plan, problem in zip(plans, problems)]
    return {
        OURS: judge(plans, problems, _planned(ScheduleLimits()), COST_MODEL),
        RULE: judge(plans, problems, fsdp2_rule, COST_MODEL),
        UNCOPIED: judge(plans, problems, uncopied, COST_MODEL),
        KEPT: judge(plans, kept, uncopied, COST_MODEL),
        NONE: judge(plans, problems, unscheduled, COST_MODEL),
    }


def budgeted(plans: Sequence[Plan], gpus: int) -> dict[str, Outcome]:
    """Return graphshard's predictions with two budgets: FSDP2's peak, and the smallest feasible.

    FSDP2's peak is raised to the smallest feasible budget if necessary.
    """
    problems = [at_world(plan, gpus) for plan in plans]
    least = max(map(smallest_peak, problems))
    theirs = judge(plans, problems, fsdp2_rule, COST_MODEL).peak_bytes
    return {
        f"{OURS}, budget {budget / 2**30:.2f} GiB": judge(
            plans, problems, _planned(ScheduleLimits(peak=budget)), COST_MODEL
        )
        for budget in (max(least, theirs), least)
    }


def _planned(limits: ScheduleLimits) -> Rule:
    return lambda _, problem: find_schedule(problem, COST_MODEL, limits)


def _row(name: str, compute_us: float, outcome: Outcome) -> dict[str, str]:
    copies_us = outcome.step_us - outcome.exposed_us - compute_us
    return {
        "model, GPUs, schedule": name,
        "step ms": f"{outcome.step_us / 1e3:.1f}",
        "over bound": f"{outcome.step_us / outcome.bound_us - 1:+.1%}",
        "exposed ms": f"{outcome.exposed_us / 1e3:.1f}",
        "least exposed": f"{max(0.0, outcome.bound_us - compute_us) / 1e3:.1f}",
        "copies ms": f"{copies_us / 1e3:.1f}",
        "wire ms": f"{outcome.communication_us / 1e3:.0f}",
        "peak GiB": f"{outcome.peak_bytes / 2**30:.1f}",
        "collectives": f"{outcome.num_collectives}",
        "planning s": f"{outcome.planning_s:.1f}",
    }


NOTE = f"""Forward and backward of one step, without the optimizer, {TOKENS} tokens in bfloat16 on
each GPU; backward recomputes each block from its input (except in 8B). *Over bound*: relative to
the larger of two times: compute, with the communication before and after it that cannot be hidden
in either graph; and communication, in one collective per kind. *Least exposed*: the part of the
bound that is not compute; copies can hide some of it. *Copies*: copying into and out of packed
buffers, and host time for the other tensors of a coalesced collective. *Peak*: sharded and gathered
parameters, gradients and activations, without optimizer state. Budgets: FSDP2's peak, and the
smallest possible. *Inductor's overlap scheduler* is missing: even if the time of every node is
given, it needs Triton to query a GPU's memory bandwidth."""


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=LLAMA3, default=list(LLAMA3))
    parser.add_argument("--gpus", nargs="+", type=common.count, default=[8, 64, 256, 1024])
    common.add_out(parser)
    args = parser.parse_args()
    parts = [common.heading("benchmarks.schedules", torch.device("cpu"))]
    for name in args.models:
        plans = trace(LLAMA3[name])
        compute_us = sum(sum(plan.problem.compute_us) for plan in plans)
        lines = []
        for gpus in args.gpus:
            outcomes = judged(plans, gpus)
            if gpus == args.gpus[-1]:
                outcomes |= budgeted(plans, gpus)
            lines += [
                _row(f"{name}, {gpus}, {rule}", compute_us, outcome)
                for rule, outcome in outcomes.items()
            ]
        parts.append(common.table(lines))
        common.show(parts[-1])
    common.write_report(args.out, [*parts, NOTE])


if __name__ == "__main__":
    main()
