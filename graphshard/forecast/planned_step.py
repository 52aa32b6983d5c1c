"""Plan a training step for a machine, and predict its time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cost.hardware import Hardware
from ..cost.model import CostModel
from ..kinds import GraphKind, TransferKind
from ..planning.keep_unsharded import choose_kept
from ..planning.memory_budget import ScheduleLimits
from ..planning.offload import add_host_copies
from ..planning.plan import Plan
from ..planning.search import find_schedule
from ..show.dump import Dump
from .cluster import Cluster
from .interval import STEP_TIME, ErrorInterval
from .keep import kept_from_forward
from .peak import MemoryForecast, PlannedGraph, outside_of_graphs, peak_of_step
from .recipe import OPTIMIZERS, Recipe
from .trace import BASELINE, HeldMemory, StepGraph, TracedStep

ADDING = 3
"""Reads and writes per element to add one gradient to another on the host."""


@dataclass(frozen=True)
class TimeForecast:
    """Predicted time of a training step, in microseconds.

    Times cover all microbatches of the step.

    Attributes:
        compute_us: time in which a GPU computes or copies.
        exposed_us: time in which compute waits for communication.
        lost_us: time by which hidden communication slows down compute.
        optimizer_us: time of the optimizer. With ``offload`` the host runs it, and also adds up the
            gradients of microbatches.
        errors: ratios of measured step times to ``modelled_us``, from past measurements.
    """

    compute_us: float
    exposed_us: float
    lost_us: float
    optimizer_us: float
    errors: ErrorInterval

    @property
    def modelled_us(self) -> float:
        """Sum of the parts."""
        return self.compute_us + self.exposed_us + self.lost_us + self.optimizer_us

    @property
    def step_us(self) -> float:
        """Expected time: the modelled time multiplied by the median error."""
        return self.errors.likely * self.modelled_us

    @property
    def unmodelled_us(self) -> float:
        """Difference between ``step_us`` and ``modelled_us``."""
        return self.step_us - self.modelled_us

    @property
    def low_us(self) -> float:
        """Lower end of the interval in which a measured step is expected."""
        return self.errors.low * self.modelled_us

    @property
    def high_us(self) -> float:
        """Upper end of the interval in which a measured step is expected."""
        return self.errors.high * self.modelled_us


@dataclass(frozen=True)
class PlannedStep:
    """A training step, planned for one machine.

    Attributes:
        dumps: plan of each graph, with the machine and the limits that it was made for.
        graphs: problem and buckets of each graph, with the bytes of its shards.
    """

    dumps: tuple[Dump, ...]
    graphs: tuple[PlannedGraph, ...]
    time: TimeForecast
    memory: MemoryForecast


def plan_step(
    traced: TracedStep,
    recipe: Recipe,
    cluster: Cluster,
    *,
    prices: str = BASELINE,
    keep_all: bool = False,
    refine: bool = True,
) -> PlannedStep:
    """Plan the graphs of a step, and predict its time and memory.

    Args:
        prices: key of ``StepGraph.compute_us``: the machine whose compute times to use. The
            rates of links come from ``cluster``.
        keep_all: keep every gathered parameter unsharded for backward, as ZeRO-2 does.
        refine: see ``planning.search.find_schedule``.

    Raises:
        BackendError: no schedule stays within the budget.
        ValueError: parameters and optimizer state alone exceed the budget.
    """
    held, hardware = traced.held, cluster.hardware
    outside = outside_of_graphs(held, recipe, cluster.memory_bytes)
    cost_model = CostModel(hardware)
    graphs = [_priced(graph, prices) for graph in traced.graphs]
    limits = _limits(graphs, recipe, outside)
    graphs = _with_kept(graphs, cost_model, limits.peak, keep_all)
    dumps = []
    for graph in graphs:
        collectives = find_schedule(graph.problem, cost_model, limits, refine=refine)
        buckets = add_host_copies(graph.problem, collectives, cost_model, limits)
        dumps.append(Dump(Plan(graph.params, graph.problem, buckets), hardware, limits))
    planned = [
        PlannedGraph(dump.plan.problem, dump.plan.buckets, graph.input_bytes)
        for dump, graph in zip(dumps, graphs)
    ]
    memory = peak_of_step(
        planned, outside, accumulate=recipe.accumulate, device_type=hardware.device_type
    )
    return PlannedStep(tuple(dumps), tuple(planned), _time(dumps, recipe, held, hardware), memory)


def _priced(graph: StepGraph, prices: str) -> StepGraph:
    problem = dataclasses.replace(graph.problem, compute_us=graph.compute_us[prices])
    return dataclasses.replace(graph, problem=problem)


def _limits(graphs: Sequence[StepGraph], recipe: Recipe, outside: MemoryForecast) -> ScheduleLimits:
    """Return the limits of every graph: the budget, less what the rank holds outside of graphs.

    Raises:
        ValueError: parameters and optimizer state alone exceed the budget.
    """
    if recipe.budget_gb is None:
        return ScheduleLimits()
    # A graph counts the shards that it takes, so these are not outside of it.
    inside = min((graph.input_bytes for graph in graphs), default=0)
    held = outside.allocated - (outside.gradients if recipe.accumulate == 1 else 0)
    peak = int(recipe.budget_gb * 1e9) - held + inside
    if peak <= 0:
        raise ValueError(
            f"budget_gb={recipe.budget_gb:g}: parameters and optimizer alone need "
            f"{held / 1e9:.1f} GB on each GPU; give more, or take more GPUs"
        )
    return ScheduleLimits(peak=peak)


def _with_kept(
    graphs: Sequence[StepGraph],
    cost_model: CostModel,
    budget: int | None,
    keep_all: bool,
) -> list[StepGraph]:
    """Keep parameters unsharded for backward, as the partitioner's pass does in training."""
    kept = list(graphs)
    for i, (forward, backward) in enumerate(pairwise(graphs)):
        if (forward.kind, backward.kind) == (GraphKind.FORWARD, GraphKind.BACKWARD):
            pair = _pair_with_kept(forward, backward, cost_model, budget, keep_all)
            kept[i : i + 2] = pair
    return kept


def _pair_with_kept(
    forward: StepGraph,
    backward: StepGraph,
    cost_model: CostModel,
    budget: int | None,
    keep_all: bool,
) -> list[StepGraph]:
    first = {
        forward.params[t.param].fqn: t
        for t in forward.problem.transfers
        if t.kind == TransferKind.ALL_GATHER and t.param is not None
    }
    gathered = {
        i: first[backward.params[t.param].fqn]
        for i, t in enumerate(backward.problem.transfers)
        if t.kind == TransferKind.ALL_GATHER
        and t.param is not None
        and backward.params[t.param].fqn in first
    }
    problems = forward.problem, backward.problem
    chosen = list(gathered) if keep_all else choose_kept(*problems, gathered, cost_model, budget)
    kept = kept_from_forward(*problems, {i: gathered[i] for i in chosen})
    pair = zip((forward, backward), kept)
    return [dataclasses.replace(graph, problem=problem) for graph, problem in pair]


def _time(
    dumps: Sequence[Dump], recipe: Recipe, held: HeldMemory, hardware: Hardware
) -> TimeForecast:
    totals = [dump.totals for dump in dumps]
    exposed_us = sum(t.total_us - t.compute_us for t in totals)
    return TimeForecast(
        compute_us=recipe.accumulate * sum(t.compute_us for t in totals),
        exposed_us=recipe.accumulate * exposed_us,
        lost_us=recipe.accumulate * sum(t.lost_us for t in totals),
        optimizer_us=_optimizer_us(recipe, held, hardware),
        errors=STEP_TIME[hardware.source],
    )


def _optimizer_us(recipe: Recipe, held: HeldMemory, hardware: Hardware) -> float:
    """Return the time of the optimizer, which is bound by memory bandwidth."""
    passes = OPTIMIZERS[recipe.optimizer].passes
    if not recipe.offload:
        return hardware.memory.us(passes * held.trained) + hardware.launch_us
    passes += ADDING * (recipe.accumulate - 1)
    return hardware.host_memory.us(passes * held.trained)
