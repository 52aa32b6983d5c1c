"""What would a training step gain from changes that are not built?

    python -m benchmarks.what_if [--models 8b 70b 405b] [--tokens 8192 2048] [--out FILE]

Needs no ranks. Llama-3 on the hardware table's H100, 8 in each node, is traced and planned as by
``graphshard plan``. The schedules are then simulated with other costs:

    two levels     gradients are exchanged in bfloat16 and summed in float32 within each node; ranks
                   with the same place in their node then reduce-scatter these sums. Rank
                   ``8 * node + place`` owns its rows as today, so gradients are packed
    in order       ... with rows owned in the order of the exchange, so large gradients are not
                   packed; this needs a mesh with another order of ranks
    overlapped     ... and the shorter of the two stages takes no time
    faster copies  a ring whose gradients are cast and packed at 80 % of the memory bandwidth
    early scales   in fp8, forward begins with the scales of its weights, computed and reduced after
                   the optimizer's step
    in turns       with expert parallelism, a microbatch is computed as two halves in turns: one
                   computes while the all-to-alls of the other run

Assumed in favor of two levels: the second stage sends all buffers in one collective, and does not
wait for compute to reach the sum. In favor of turns: gradients of the halves are added by the
kernels that compute them, and the host does not wait for the numbers of tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from benchmarks import common
from benchmarks.llama import DEVICE
from benchmarks.robustness import Scenario, slowed
from benchmarks.schedules import at_world
from graphshard.cost.model import CostModel
from graphshard.forecast.cluster import Cluster, cluster
from graphshard.forecast.derive import on_mesh, trace_step
from graphshard.forecast.planned_step import PlannedStep, plan_step
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import TracedStep
from graphshard.forecast.workload import BatchShape, find_workload
from graphshard.kinds import TransferKind
from graphshard.planning.bucketing import packed_bucket
from graphshard.planning.buckets import next_in_chain
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import (
    BucketCost,
    bucket_cost,
    start_times_us,
    sweep,
    user_costs,
)

MODELS = ("8b", "70b", "405b")
EXPERTS = (  # model, number of GPUs, size of expert parallelism
    ("qwen3-30b-a3b", 32, 8),
    ("qwen3-30b-a3b", 32, 32),
    ("mixtral-8x7b", 32, 8),
)
SLOW = Scenario(2.0, 1.0, 1.0)  # links half as fast
# Time to cast and pack gradients at 80 % of the peak, over that of ``CostModel.copy_us``: 2 bytes
# are read and 4 written per element, at 2.68 instead of (counted as 4 and 4) 2.5 TB/s.
FASTER_COPY = (6 / (0.8 * 3.35)) / (8 / 2.5)

Price = Callable[[Problem, Bucket, CostModel], BucketCost]


def faster_copies(problem: Problem, bucket: Bucket, cost_model: CostModel) -> BucketCost:
    cost = bucket_cost(problem, bucket, cost_model)
    return cost._replace(copy_in_us=FASTER_COPY * cost.copy_in_us)


def two_levels(
    problem: Problem,
    bucket: Bucket,
    cost_model: CostModel,
    *,
    packs: bool = True,
    overlaps: bool = False,
) -> BucketCost:
    """Return the cost of a bucket that is reduced within nodes, then between them.

    Args:
        packs: whether all gradients are packed, or small and padded ones only.
        overlaps: whether only the longer of the two stages takes time on the lane.
    """
    in_node = cost_model.hardware.ranks_per_node
    exchange = packed_bucket(
        problem, bucket.transfers, cost_model, bucket.launch, bucket.wait, exchanges=True
    )
    if packs:
        exchange = dataclasses.replace(exchange, buffers=(exchange.transfers,))
    # Packing before the exchange, sums after it.
    copies = bucket_cost(problem, exchange, cost_model)
    sent = [[problem.transfers[i].exchanged() for i in buffer] for buffer in exchange.buffers]
    inside_us = sum(
        cost_model.exchange_us(sum(t.num_bytes for t in buffer), in_node) for buffer in sent
    )
    between_us = cost_model.collective_us(
        TransferKind.REDUCE_SCATTER,
        bucket.num_bytes / in_node,  # sums are in float32, as in a ring
        bucket.world // in_node,
        in_node,
    )
    combine = max if overlaps else float.__add__
    # The second stage needs the sums: they cannot wait for the end of the graph.
    compute_us = copies.copy_in_us + copies.copy_out_us
    return BucketCost(compute_us, combine(inside_us, between_us), 0.0)


def in_turns(problem: Problem) -> Problem:
    """Return the problem of two microbatches in turns that end at waits for user collectives."""
    waits = {user.wait for user in problem.user_collectives}
    bounds = itertools.pairwise(sorted({0, *waits, problem.num_steps}))
    order = [
        (turn, step) for start, stop in bounds for turn in (0, 1) for step in range(start, stop)
    ]
    place = {key: i for i, key in enumerate(order)}
    place |= {(turn, problem.num_steps): len(order) for turn in (0, 1)}

    def both(transfer: Transfer) -> Transfer:
        if transfer.kind.is_fetch:  # due for the first microbatch, last used by the second
            due, last = place[0, transfer.due], place[1, transfer.last]
            return dataclasses.replace(transfer, due=due, last=last)
        ready = place[1, transfer.ready - 1] + 1
        return dataclasses.replace(
            transfer, ready=ready, due=place[1, transfer.due], last=len(order) - 1
        )

    users = (
        dataclasses.replace(user, launch=place[turn, user.launch], wait=place[turn, user.wait])
        for user in problem.user_collectives
        for turn in (0, 1)
    )
    steps = [step for _, step in order]
    return dataclasses.replace(
        problem,
        steps=tuple(problem.steps[step] for step in steps),
        compute_us=tuple(problem.compute_us[step] for step in steps),
        fixed_bytes=tuple(problem.fixed_bytes[step] for step in steps),
        fixed_boundary_bytes=tuple(problem.fixed_boundary_bytes[step] for step in (*steps, -1)),
        transfers=tuple(map(both, problem.transfers)),
        user_collectives=tuple(sorted(users, key=lambda user: user.launch)),
    )


class Outcome(NamedTuple):
    """Times of a step in microseconds.

    Attributes:
        planned_us: time with links as planned for.
        slow_us: time with links half as fast.
    """

    planned_us: float
    slow_us: float


def simulated(
    problems: Sequence[Problem],
    schedules: Sequence[Sequence[Bucket]],
    cost_model: CostModel,
    outside_us: float,
    price: Price = bucket_cost,
) -> Outcome:
    """Simulate a step.

    Args:
        outside_us: time of the optimizer.
        price: function that returns the cost of a bucket of reductions.
    """
    slow = dataclasses.replace(cost_model, hardware=slowed(cost_model.hardware, SLOW))
    return Outcome(
        *(
            outside_us
            + sum(
                _graph_us(problem, buckets, model, price)
                for problem, buckets in zip(problems, schedules, strict=True)
            )
            for model in (cost_model, slow)
        )
    )


def _graph_us(
    problem: Problem, buckets: Sequence[Bucket], cost_model: CostModel, price: Price
) -> float:
    costs = [
        (price if bucket.kind == TransferKind.REDUCE_SCATTER else bucket_cost)(
            problem, bucket, cost_model
        )
        for bucket in buckets
    ]
    costs += user_costs(problem, cost_model)
    times = sweep(
        start_times_us(problem),
        launches=[bucket.launch for bucket in buckets],
        waits=[bucket.wait for bucket in buckets],
        costs=costs,
        successors=next_in_chain(buckets),
        users=problem.user_collectives,
    )
    hidden_us = (max(0.0, cost.lane_us - exposed) for cost, exposed in zip(costs, times.exposed_us))
    return times.total_us + sum(map(cost_model.slowdown_us, hidden_us))


def with_early_scales(problem: Problem) -> Problem:
    """Return ``problem`` with scales that are known when the graph starts."""
    transfers = (
        dataclasses.replace(t, ready=0) if t.kind == TransferKind.ALL_GATHER else t
        for t in problem.transfers
        if t.kind != TransferKind.ALL_REDUCE_MAX
    )
    return dataclasses.replace(problem, transfers=tuple(transfers))


# --- output --------------------------------------------------------------------------------------

REDUCTIONS: Mapping[str, Price] = {
    "two levels": two_levels,
    "in order": lambda *args: two_levels(*args, packs=False),
    "overlapped": lambda *args: two_levels(*args, packs=False, overlaps=True),
    "faster copies": faster_copies,
}


def reductions_row(step: PlannedStep, machine: Cluster) -> dict[str, str]:
    problems = [graph.problem for graph in step.graphs]
    schedules = [graph.buckets for graph in step.graphs]
    args = problems, schedules, CostModel(machine.hardware), step.time.optimizer_us
    ring = simulated(*args)
    row = _times("ring", ring)
    for name, price in REDUCTIONS.items():
        row |= _savings(name, ring, simulated(*args, price))
    return row


def scales_row(step: PlannedStep, machine: Cluster) -> dict[str, str]:
    problems = [graph.problem for graph in step.graphs]
    before, early = (
        planned(each, machine, step.time.optimizer_us)
        for each in (problems, [*map(with_early_scales, problems)])
    )
    return _times("step", before) | _savings("early scales", before, early)


def experts_row(model: str, num_gpus: int, ep: int) -> dict[str, str]:
    machine, recipe = cluster(DEVICE, num_gpus), Recipe(ep=ep, recompute=True)
    whole, half = (
        plan_step(
            trace_step(find_workload(model, BatchShape(size, 4096)), recipe, machine),
            recipe,
            machine,
        )
        for size in (2, 1)
    )
    problems = [graph.problem for graph in whole.graphs]
    optimizer_us = whole.time.optimizer_us
    before = planned(problems, machine, optimizer_us)
    without = [dataclasses.replace(problem, user_collectives=()) for problem in problems]
    alone = planned(without, machine, optimizer_us)
    turns = planned([in_turns(graph.problem) for graph in half.graphs], machine, optimizer_us)
    return (
        {"model, GPUs, ep": f"{model}, {num_gpus}, {ep}"}
        | _times("step", before)
        | _savings("no all-to-alls", before, alone)
        | _savings("in turns", before, turns)
    )


def planned(problems: Sequence[Problem], machine: Cluster, outside_us: float) -> Outcome:
    cost_model = CostModel(machine.hardware)
    schedules = [find_schedule(problem, cost_model, ScheduleLimits()) for problem in problems]
    return simulated(problems, schedules, cost_model, outside_us)


def _times(name: str, outcome: Outcome) -> dict[str, str]:
    return {
        f"{name}, ms": f"{outcome.planned_us / 1e3:.1f}",
        "slow links": f"{outcome.slow_us / 1e3:.1f}",
    }


def _savings(name: str, before: Outcome, after: Outcome) -> dict[str, str]:
    planned, slow = (f"{1 - new / old:+.1%}" for new, old in zip(after, before))
    return {name: f"{planned} / {slow}"}


def rows(
    models: Sequence[str], tokens: Sequence[int], gpus: Sequence[int], dtype: str
) -> list[dict[str, str]]:
    make_row = scales_row if dtype == "fp8" else reductions_row
    lines = []
    for model, length in itertools.product(models, tokens):
        recipe = Recipe(dtype=dtype, recompute=model != "8b")
        workload = find_workload(f"llama3-{model}", BatchShape(1, length))
        first = trace_step(workload, recipe, cluster(DEVICE, gpus[0]))
        for num_gpus in gpus:
            machine = cluster(DEVICE, num_gpus)
            traced = on_mesh(first, gpus[0], recipe.ranks(num_gpus))
            traced = traced or padded(first, gpus[0], num_gpus)
            name = {"model, tokens, GPUs": f"{model.upper()}, {length}, {num_gpus}"}
            lines.append(name | make_row(plan_step(traced, recipe, machine), machine))
            print("  ".join(lines[-1].values()), flush=True)
    return lines


def padded(traced: TracedStep, before: int, after: int) -> TracedStep:
    """Return ``traced`` with the shards and padding of ``after`` instead of ``before`` ranks."""
    graphs = (
        graph.with_problem(at_world(Plan(graph.params, graph.problem, ()), after))
        for graph in traced.graphs
    )
    held = dataclasses.replace(traced.held, trained=traced.held.trained * before / after)
    return dataclasses.replace(traced, graphs=tuple(graphs), held=held)


NOTE = """Percentages: part of the step that is saved, optimizer included, with links as planned for
/ with twice the time per byte (*slow links*). All columns have the ring's schedules. Gradients are
reduced in float32; 70B and 405B recompute each layer. 405B does not fit on 16 GPUs. The second
table is in fp8, with one scale per weight.

Two levels send as many bytes between nodes as a ring, since the sums of a node are in float32 (half
as many if there are two nodes), and half as many again within each node. With 8,192 tokens, nearly
all of it is hidden, and copies get shorter, by no more than with a faster copy kernel; in order, by
twice as much. With 2,048 tokens, links limit the step, and two levels are slower from 64 GPUs on.
They are therefore not built; nor are early scales, which save at most 0.2 %.

The third table is of 2 x 4,096 tokens on each GPU, all layers recomputed. *No all-to-alls*: those
of the experts take no time. In turns, they run while the other half of the microbatch computes,
whose kernels are less efficient than those of the whole. Over slow links, gathers and reductions
limit the step at `ep` 8, so little is saved."""


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=common.count, default=[8192, 2048])
    common.add_out(parser)
    args = parser.parse_args()
    parts = [common.heading("benchmarks.what_if", torch.device("cpu"))]
    parts.append(common.table(rows(args.models, args.tokens, (16, 64, 1024), "bf16")))
    parts.append(common.table(rows([*args.models][:2], args.tokens[:1], (8, 64), "fp8")))
    parts.append(common.table([experts_row(*row) for row in EXPERTS]))
    common.show(*parts[1:])
    common.write_report(args.out, [*parts, NOTE])


if __name__ == "__main__":
    main()
