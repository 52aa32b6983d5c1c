"""Plan a training step for a machine, predict its time and memory, and find helpful changes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..cost.model import CostModel
from ..kinds import GraphKind, TransferKind
from ..planning.keep_unsharded import choose_kept
from ..planning.live_bytes import (
    Span,
    fixed_by_point,
    launches,
    num_points,
    running,
    sum_spans,
    with_fixed_bytes,
)
from ..planning.memory_budget import ScheduleLimits
from ..planning.offload import add_host_copies
from ..planning.plan import Plan, Problem, Transfer
from ..planning.search import find_schedule
from ..show.dump import Dump
from .cluster import Cluster
from .estimate import (
    MemoryForecast,
    PlannedGraph,
    TimeForecast,
    outside_of_graphs,
    peak_of_step,
    time_of_step,
)
from .recipe import Recipe
from .trace import (
    BASELINE,
    FASTER_COMPUTE,
    FASTER_MEMORY,
    NO_LAUNCHES,
    StepGraph,
    TracedStep,
    faster_machines,
    scaled,
)


@dataclass(frozen=True)
class PlannedStep:
    """A training step, planned for one machine."""

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
        prices: machine whose compute times to use, as a key of ``StepGraph.compute_us``. All other
            rates are those of ``cluster``.
        keep_all: whether to keep all gathered parameters unsharded for backward, as ZeRO-2 does.
        refine: see ``planning.search.find_schedule``.

    Raises:
        BackendError: no schedule stays within the budget.
        ValueError: memory outside of the graphs, such as optimizer state, exceeds the budget.
    """
    held, hardware = traced.held, cluster.hardware
    keep_all = keep_all or recipe.kind == "zero2"
    outside = outside_of_graphs(held, recipe, cluster.memory_bytes)
    cost_model = CostModel(hardware)
    graphs = [
        dataclasses.replace(
            graph,
            problem=dataclasses.replace(graph.problem, compute_us=graph.compute_us[prices]),
        )
        for graph in traced.graphs
    ]
    limits = _limits(graphs, recipe, outside)
    before_keeping = [fixed_by_point(graph.problem) for graph in graphs]
    # The partitioner pass that runs in real training also decides with ``choose_kept``.
    for i, (forward, backward) in enumerate(pairwise(tuple(graphs))):
        if (forward.kind, backward.kind) == (GraphKind.FORWARD, GraphKind.BACKWARD):
            before_keeping[i : i + 2] = _without_secondary_shards(forward, backward)
            pair = _keep_for_backward(forward, backward, cost_model, limits, keep_all)
            graphs[i : i + 2] = pair
    dumps, planned = [], []
    for graph, fixed in zip(graphs, before_keeping):
        collectives = find_schedule(graph.problem, cost_model, limits, refine=refine)
        buckets = add_host_copies(graph.problem, collectives, cost_model, limits)
        dumps.append(Dump(Plan(graph.params, graph.problem, buckets), hardware, limits))
        kept = tuple(map(operator.sub, fixed_by_point(graph.problem), fixed))
        planned.append(PlannedGraph(graph.problem, buckets, graph.input_bytes, kept))
    memory = peak_of_step(
        planned, outside, accumulate=recipe.accumulate, device_type=hardware.device_type
    )
    time = time_of_step(dumps, recipe, held, hardware)
    return PlannedStep(tuple(dumps), tuple(planned), time, memory)


def _limits(graphs: Sequence[StepGraph], recipe: Recipe, outside: MemoryForecast) -> ScheduleLimits:
    """Return the limits of all graphs: the budget, if any, minus memory held outside of them."""
    if recipe.budget_gb is None:
        return ScheduleLimits(reduce=recipe.reduce)
    # A graph's peak already includes its input shards.
    inside = min((graph.input_bytes for graph in graphs), default=0)
    held = outside.allocated - (outside.gradients if recipe.accumulate == 1 else 0)
    peak = int(recipe.budget_gb * 1e9) - held + inside
    if peak <= 0:
        raise ValueError(
            f"budget_gb={recipe.budget_gb:g}: parameters, optimizer state and other memory outside "
            f"of the graphs need {held / 1e9:.1f} GB on each GPU; raise the budget or use more GPUs"
        )
    return ScheduleLimits(peak=peak, reduce=recipe.reduce)


# --- parameters kept unsharded -------------------------------------------------------------------


def _keep_for_backward(
    forward: StepGraph,
    backward: StepGraph,
    cost_model: CostModel,
    limits: ScheduleLimits,
    keep_all: bool,
) -> list[StepGraph]:
    problems = forward.problem, backward.problem
    gathered = {
        i: t
        for i, t in _regathered(forward, backward).items()
        if not _is_secondary(backward.problem.transfers[i], t)
    }
    kept = list(gathered) if keep_all else choose_kept(*problems, gathered, cost_model, limits)
    pair = zip((forward, backward), keep_unsharded(*problems, {i: gathered[i] for i in kept}))
    return [dataclasses.replace(graph, problem=problem) for graph, problem in pair]


def _regathered(forward: StepGraph, backward: StepGraph) -> dict[int, Transfer]:
    """Map positions of gathers in ``backward.transfers`` to the same parameters' in forward."""
    gathers = {
        forward.params[t.param].fqn: t
        for t in forward.problem.transfers
        if t.kind == TransferKind.ALL_GATHER and t.param is not None
    }
    return {
        i: gathers[fqn]
        for i, t in enumerate(backward.problem.transfers)
        if t.kind == TransferKind.ALL_GATHER
        and t.param is not None
        and (fqn := backward.params[t.param].fqn) in gathers
    }


def _is_secondary(in_backward: Transfer, in_forward: Transfer) -> bool:
    return in_backward.group != in_forward.group  # hpZ: backward gathers secondary shards


def _without_secondary_shards(forward: StepGraph, backward: StepGraph) -> list[list[int]]:
    """Return the schedule-independent bytes of both graphs without secondary shards, by point."""
    after, until = list[Span](), list[Span]()
    for i, gather in _regathered(forward, backward).items():
        again = backward.problem.transfers[i]
        if _is_secondary(again, gather):
            # Made when forward first uses the full parameter, freed when backward does. Steps in
            # which that happens are left out: their peaks may be before or after it.
            end = num_points(forward.problem.num_steps)
            after.append(Span(launches(gather.due + 1), end, -again.shard_bytes))
            until.append(Span(0, running(again.due), -again.shard_bytes))
    pairs = (forward, after), (backward, until)
    return [fixed_by_point(_with_spans(graph.problem, spans)) for graph, spans in pairs]


def keep_unsharded(
    forward: Problem, backward: Problem, gathered: Mapping[int, Transfer]
) -> tuple[Problem, Problem]:
    """Add the memory of kept parameters to both problems, and remove their gathers from backward.

    Args:
        gathered: gathers of the kept parameters in ``forward``, keyed by the position of the same
            parameter's gather in ``backward.transfers``.
    """
    # A kept parameter occupies memory from its last use in forward to its last use in backward.
    after = [
        Span(launches(t.last + 1), num_points(forward.num_steps), t.num_bytes)
        for t in gathered.values()
    ]
    until = [
        Span(0, launches(backward.transfers[i].last + 1), t.num_bytes) for i, t in gathered.items()
    ]
    left = tuple(t for i, t in enumerate(backward.transfers) if i not in gathered)
    return (
        _with_spans(forward, after),
        dataclasses.replace(_with_spans(backward, until), transfers=left),
    )


def _with_spans(problem: Problem, spans: list[Span]) -> Problem:
    added = sum_spans(spans, num_points(problem.num_steps))
    alive = [a + b for a, b in zip(fixed_by_point(problem), added)]
    return with_fixed_bytes(problem, alive)


# --- changes that would help ---------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The effect of one change on a training step.

    Attributes:
        what: description of the change.
        step_us: time of the changed step, for as many tokens as the original step.
        gain: fraction of the step time that the change saves; negative if it costs time.
        memory_bytes: peak memory of a rank, including the margin.
        fits: whether the changed step fits on a device.
        is_machine: whether the machine changes, rather than the recipe.
    """

    what: str
    step_us: float
    gain: float
    memory_bytes: int
    fits: bool
    is_machine: bool


LINK, LATENCY, COMPUTE, BANDWIDTH, HOST = (
    "links twice as fast",
    "no latency of kernel launches and links",
    "matrix products twice as fast",
    "device memory twice as fast",
    "host link and host memory twice as fast",
)
KEPT, FOUR = (
    "parameters kept unsharded for backward (reshard_after_forward=False)",
    "4 microbatches per step (time per microbatch)",
)
_BOTTLENECKS = {
    HOST: "host",
    LINK: "link",
    LATENCY: "latency",
    COMPUTE: "compute",
    BANDWIDTH: "memory bandwidth",
}


def find_changes(traced: TracedStep, recipe: Recipe, cluster: Cluster) -> list[Change]:
    """Plan the step with each change, and compare with the unchanged step.

    Changes that exceed the budget are left out.
    """
    # The unchanged step uses the quick search, too: otherwise its time would not be comparable.
    quick = functools.partial(plan_step, traced, refine=False)
    base_us = quick(recipe, cluster).time.step_us
    hardware = cluster.hardware
    fast_memory = dataclasses.replace(cluster, hardware=faster_machines(hardware)[FASTER_MEMORY])
    plans: dict[str, Callable[[], PlannedStep]] = {
        LINK: lambda: quick(recipe, _scaled_links(cluster, rate=2.0)),
        LATENCY: lambda: quick(recipe, _scaled_links(cluster, latency=0.0), prices=NO_LAUNCHES),
        COMPUTE: lambda: quick(recipe, cluster, prices=FASTER_COMPUTE),
        BANDWIDTH: lambda: quick(recipe, fast_memory, prices=FASTER_MEMORY),
    }
    if recipe.offload:
        rates = {name: scaled(getattr(hardware, name), 2.0) for name in ("host", "host_memory")}
        plans[HOST] = lambda: quick(recipe, _with(cluster, **rates))
    if recipe.kind in ("zero3", "hsdp"):
        plans[KEPT] = lambda: quick(recipe, cluster, keep_all=True)
    if recipe.accumulate == 1:
        plans[FOUR] = lambda: quick(dataclasses.replace(recipe, accumulate=4), cluster)
    changes = []
    for what, plan in plans.items():
        # The unchanged step was planned, so an error means that this change exceeds the budget.
        with contextlib.suppress(ValueError):
            step = plan()
            step_us = step.time.step_us / (4 if what == FOUR else 1)
            memory, gain = step.memory, 1 - step_us / base_us
            is_machine = what in _BOTTLENECKS
            changes.append(Change(what, step_us, gain, memory.total, memory.fits, is_machine))
    return changes


def _with(cluster: Cluster, **parts: Any) -> Cluster:
    return dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, **parts))


def _scaled_links(cluster: Cluster, *, rate: float = 1.0, latency: float = 1.0) -> Cluster:
    hardware, links = cluster.hardware, {}
    for name in ("intra", "inter"):
        link = getattr(hardware, name)
        bus = {k: scaled(r, rate) for k, r in link.bus.items()}
        links[name] = dataclasses.replace(
            link, bus=bus, latency_us=link.latency_us * latency, hop_us=link.hop_us * latency
        )
    launch_us, issue_us = hardware.launch_us * latency, hardware.issue_us * latency
    return _with(cluster, **links, launch_us=launch_us, issue_us=issue_us)


def find_bottleneck(memory: MemoryForecast, changes: Sequence[Change]) -> str:
    """Return "memory" if the step does not fit, else the part whose speedup saves the most time."""
    if not memory.fits:
        return "memory"
    machine = [change for change in changes if change.is_machine]
    return _BOTTLENECKS[max(machine, key=lambda change: change.gain).what]
