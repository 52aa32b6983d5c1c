"""How well are Llama-3's training graphs scheduled on GPUs that nobody here has?

    python -m benchmarks.schedules [--models 8B 70B 405B] [--gpus 8 64 256 1024] [--out FILE]

No ranks and no data: fake tensors and a fake process group. A model is traced once, by Dynamo and
AOTAutograd with graphshard's own passes. Its forward and backward graph, each a ``Problem``, are
scheduled for every number of GPUs by

    graphshard           the planner
    FSDP2's rule         a bucket for each block and one for the rest, copied in and out; a gather is
                         launched when the one before it is there, a reduction when its block's
                         gradients are, and is waited for when the next one is launched
    ... no copies        the same buckets as coalesced groups of tensors
    ... root kept        as FSDP2 does it: the rest is not gathered again in backward
    unscheduled          FSDP2's buckets, launched when they are needed and waited for at once

and all are judged by ``graphshard.planning.simulate``, on the table's H100 with 400 Gb/s for each GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from benchmarks.common import count, heading, show, table
from benchmarks.llama import DEVICE, LLAMA3, TOKENS, trace
from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.live_bytes import smallest_peak
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import COMMUNICATION, TransferCostModel, simulate

COSTS = CostModel(HARDWARE[DEVICE])
Rule = Callable[[Plan, Problem], Sequence[Bucket]]


def at_world(plan: Plan, world: int) -> Problem:
    """The problem of ``plan`` if there were ``world`` ranks: other shards, other padding."""
    before = plan.problem
    transfers = tuple(_resized(plan, transfer, world) for transfer in before.transfers)
    # The shards are inputs, which are alive all the time.
    grown = sum(
        new.num_bytes // new.world - old.num_bytes // old.world
        for new, old in zip(transfers, before.transfers)
        if new.kind == TransferKind.ALL_GATHER
    )
    other = tuple(num_bytes + grown for num_bytes in before.other_bytes)
    return dataclasses.replace(before, transfers=transfers, other_bytes=other)


def _resized(plan: Plan, transfer: Transfer, world: int) -> Transfer:
    param = plan.params[transfer.param]
    assert param.padded_rows is not None
    row_bytes = transfer.num_bytes // (param.padded_rows * transfer.world)
    rows = math.ceil(param.shape[0] / world)
    shard_bytes = transfer.shard_bytes // param.padded_rows * rows
    sizes = {"num_bytes": rows * world * row_bytes, "shard_bytes": shard_bytes}
    return dataclasses.replace(transfer, **sizes, world=world)


# --- rules ---------------------------------------------------------------------------------------

Cut = list[list[int]]
"""Positions in ``Problem.transfers`` by bucket, in the order in which they are launched."""


def by_block(plan: Plan, problem: Problem) -> tuple[Cut, Cut]:
    """Gathers and reductions, a bucket for each of ``blocks`` and one for all other parameters."""
    gathers: dict[str, list[int]] = {}
    reductions: dict[str, list[int]] = {}
    for i, transfer in enumerate(problem.transfers):
        parts = plan.params[transfer.param].fqn.split(".")
        unit = parts[1] if parts[0] == "blocks" else "root"
        (gathers if transfer.kind == TransferKind.ALL_GATHER else reductions).setdefault(
            unit, []
        ).append(i)
    return (
        sorted(gathers.values(), key=lambda cut: _due(problem, cut)),
        sorted(reductions.values(), key=lambda cut: _ready(problem, cut)),
    )


def _due(problem: Problem, cut: Sequence[int]) -> int:
    return min(problem.transfers[i].due for i in cut)


def _ready(problem: Problem, cut: Sequence[int]) -> int:
    return max(problem.transfers[i].ready for i in cut)


def _bucket(problem: Problem, cut: Sequence[int], launch: int, wait: int) -> Bucket:
    transfers = [problem.transfers[i] for i in cut]
    num_bytes = sum(transfer.num_bytes for transfer in transfers)
    one = transfers[0]
    return Bucket(one.kind, (tuple(cut),), num_bytes, one.group, one.world, launch, wait)


def fsdp2_rule(plan: Plan, problem: Problem) -> list[Bucket]:
    """What eager FSDP2 does by default, in its ``_fsdp_param_group.py``."""
    gathers, reductions = by_block(plan, problem)
    due = [_due(problem, cut) for cut in gathers]
    ready = [_ready(problem, cut) for cut in reductions]
    launches = [0, *due[:-1]]
    waits = [*ready[1:], problem.num_steps]
    buckets = [_bucket(problem, *of) for of in zip(gathers, launches, due)]
    buckets += [_bucket(problem, *of) for of in zip(reductions, ready, waits)]
    return sorted(buckets, key=lambda bucket: bucket.launch)


def uncopied(plan: Plan, problem: Problem) -> list[Bucket]:
    """``fsdp2_rule``, with each bucket as a coalesced group: what the rule itself is worth."""
    buckets = fsdp2_rule(plan, problem)
    return [dataclasses.replace(b, buffers=tuple((i,) for i in b.transfers)) for b in buckets]


def unscheduled(plan: Plan, problem: Problem) -> list[Bucket]:
    gathers, reductions = by_block(plan, problem)
    placed = [(cut, _due(problem, cut)) for cut in gathers]
    placed += [(cut, _ready(problem, cut)) for cut in reductions]
    buckets = [_bucket(problem, cut, step, step) for cut, step in placed]
    return sorted(buckets, key=lambda bucket: bucket.launch)


def root_kept(plan: Plan, problem: Problem) -> Problem:
    """Without the gathers in backward of what is in no block: it is there since forward."""
    if plan.graph != GraphKind.BACKWARD:
        return problem
    is_root = [not plan.params[t.param].fqn.startswith("blocks.") for t in problem.transfers]
    kept = [
        t
        for t, root in zip(problem.transfers, is_root)
        if not root or t.kind != TransferKind.ALL_GATHER
    ]
    num_bytes = sum(t.num_bytes for t in problem.transfers) - sum(t.num_bytes for t in kept)
    other = tuple(alive + num_bytes for alive in problem.other_bytes)
    return dataclasses.replace(problem, transfers=tuple(kept), other_bytes=other)


# --- judging -------------------------------------------------------------------------------------


def lower_bound_us(problem: Problem, prices: TransferCostModel) -> float:
    """What no schedule of ``problem`` is faster than.

    The communication lane is busy for all bytes of a kind in one collective. The compute lane runs
    all steps; none of them before all that is due by then was gathered; and when the lane is done
    with what was before, all that was ready since has to be reduced.
    """
    start_us = [0.0, *accumulate(problem.compute_us)]
    gathers = [t for t in problem.transfers if t.kind == TransferKind.ALL_GATHER]
    reductions = [t for t in problem.transfers if t.kind != TransferKind.ALL_GATHER]
    first_us = last_us = 0.0
    for step in {t.due for t in gathers}:
        early = [t for t in gathers if t.due <= step]
        first_us = max(first_us, _at_once_us(early, prices) - start_us[step])
    for step in {t.ready for t in reductions}:
        late = [t for t in reductions if t.ready >= step]
        last_us = max(last_us, _at_once_us(late, prices) - (start_us[-1] - start_us[step]))
    return max(_at_once_us(problem.transfers, prices), first_us + start_us[-1] + last_us)


def _at_once_us(transfers: Sequence[Transfer], prices: TransferCostModel) -> float:
    """One collective for each kind."""
    by_kind: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        by_kind.setdefault(transfer.kind, []).append(transfer)
    return sum(
        prices.collective_us(kind, sum(t.num_bytes for t in of), of[0].world)
        for kind, of in by_kind.items()
    )


@dataclass(frozen=True)
class Outcome:
    """What is predicted of one step, forward and backward.

    Attributes:
        step_us: without the optimizer; ``bound_us``: the sum of both graphs' lower bounds.
        exposed_us: how long compute stands still for communication.
        wire_us: how long communication takes.
        peak_bytes: the larger of both graphs', all sharded parameters and gradients among them.
        num_collectives: of both graphs.
        planning_s: how long it took to decide.
    """

    step_us: float
    bound_us: float
    exposed_us: float
    lane_us: float
    peak_bytes: int
    num_collectives: int
    planning_s: float


def judge(
    plans: Sequence[Plan], problems: Sequence[Problem], rule: Rule, prices: TransferCostModel
) -> Outcome:
    """``rule``'s schedules of ``problems``, which are those of ``plans``."""
    begin = time.perf_counter()
    schedules = [rule(*of) for of in zip(plans, problems)]
    planning_s = time.perf_counter() - begin
    lines = [simulate(problem, of, prices) for problem, of in zip(problems, schedules)]
    return Outcome(
        step_us=sum(line.total_us for line in lines),
        bound_us=sum(lower_bound_us(problem, prices) for problem in problems),
        exposed_us=sum(sum(line.exposed_us) for line in lines),
        lane_us=sum(line.busy_us(COMMUNICATION) for line in lines),
        peak_bytes=max(line.peak_bytes for line in lines),
        num_collectives=sum(map(len, schedules)),
        planning_s=planning_s,
    )


# --- what is printed -----------------------------------------------------------------------------

OURS, RULE, NONE = "graphshard", "FSDP2's rule", "unscheduled"
UNCOPIED, KEPT = f"{RULE}, no copies", f"{RULE}, no copies, root kept"
HEADERS = (
    "model, GPUs, schedule",
    "step ms",
    "over bound",
    "exposed ms",
    "least exposed",
    "copies ms",
    "wire ms",
    "peak GiB",
    "collectives",
    "planning s",
)


def judged(plans: Sequence[Plan], gpus: int) -> dict[str, Outcome]:
    """By schedule."""
    problems = [at_world(plan, gpus) for plan in plans]
    kept = [root_kept(plan, problem) for plan, problem in zip(plans, problems)]
    return {
        OURS: judge(plans, problems, _planned(ScheduleLimits()), COSTS),
        RULE: judge(plans, problems, fsdp2_rule, COSTS),
        UNCOPIED: judge(plans, problems, uncopied, COSTS),
        KEPT: judge(plans, kept, uncopied, COSTS),
        NONE: judge(plans, problems, unscheduled, COSTS),
    }


def budgeted(plans: Sequence[Plan], gpus: int) -> dict[str, Outcome]:
    """Ours with no more memory than FSDP2's rule takes, and with the least that there can be."""
    problems = [at_world(plan, gpus) for plan in plans]
    least = max(map(smallest_peak, problems))
    theirs = judge(plans, problems, fsdp2_rule, COSTS).peak_bytes
    return {
        f"{OURS}, budget {budget / 2**30:.2f} GiB": judge(
            plans, problems, _planned(ScheduleLimits(peak=budget)), COSTS
        )
        for budget in (max(least, theirs), least)
    }


def _planned(limits: ScheduleLimits) -> Rule:
    return lambda _, problem: find_schedule(problem, COSTS, limits)


def _row(name: str, compute_us: float, it: Outcome) -> list[str]:
    copies_us = it.step_us - it.exposed_us - compute_us
    return [
        name,
        f"{it.step_us / 1e3:.1f}",
        f"{it.step_us / it.bound_us - 1:+.1%}",
        f"{it.exposed_us / 1e3:.1f}",
        f"{max(0.0, it.bound_us - compute_us) / 1e3:.1f}",
        f"{copies_us / 1e3:.1f}",
        f"{it.wire_us / 1e3:.0f}",
        f"{it.peak_bytes / 2**30:.1f}",
        f"{it.num_collectives}",
        f"{it.planning_s:.1f}",
    ]


def traced(name: str, folder: Path | None) -> list[Plan]:
    """The plans of ``trace``; kept in ``folder``, if there is one, and read from it if there."""
    paths = (
        [folder / f"{name}-{kind}.json" for kind in (GraphKind.FORWARD, GraphKind.BACKWARD)]
        if folder
        else []
    )
    if paths and all(path.exists() for path in paths):
        return [Plan.from_json(path.read_text()) for path in paths]
    plans = trace(LLAMA3[name])
    for path, plan in zip(paths, plans):
        path.write_text(plan.to_json())
    return plans


NOTE = f"""Forward and backward of one step, without the optimizer, {TOKENS} tokens in bfloat16 on each
GPU; all of a block but its input is recomputed in backward (not in 8B). *Over bound*: over the larger
of compute, with what nothing hides of what is needed first and of what is ready last in both graphs,
and of communication in one collective of a kind. *Least exposed*: the part of the bound that is not
compute; copies can hide some of it. *Copies*: packing buckets and unpacking them, and what further
tensors of a coalesced collective cost the host. *Peak*: sharded parameters, gathered ones, gradients
and activations, without the optimizer's state. Budgets: FSDP2's peak, and the least that there can be.
*Inductor's overlap scheduler* is missing: even where every node's time is given to it, it asks triton
for the memory bandwidth of a GPU."""


def main() -> None:
    args = _arguments()
    parts = [heading("benchmarks.schedules", torch.device("cpu"))]
    for name in args.models:
        plans = traced(name, args.problems)
        compute_us = sum(sum(plan.problem.compute_us) for plan in plans)
        lines = []
        for gpus in args.gpus:
            found = judged(plans, gpus)
            if gpus == args.gpus[-1]:
                found |= budgeted(plans, gpus)
            lines += [_row(f"{name}, {gpus}, {rule}", compute_us, it) for rule, it in found.items()]
        parts.append(table(HEADERS, lines))
        show(parts[-1])
    parts.append(NOTE)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n\n".join(parts) + "\n")


def _arguments() -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    options.add_argument("--models", nargs="+", choices=LLAMA3, default=list(LLAMA3))
    options.add_argument("--gpus", nargs="+", type=count, default=[8, 64, 256, 1024])
    options.add_argument("--problems", type=Path, help="a folder to keep traced graphs in")
    options.add_argument("--out", type=Path, help="a Markdown file to write")
    return options.parse_args()


if __name__ == "__main__":
    main()
