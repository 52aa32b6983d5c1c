"""A forecast of a training step: `plan`, and `forecast_of` from graphs that are traced already."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cost.hardware import Hardware
from ..cost.model import CostModel
from ..kinds import GraphKind, TransferKind
from ..planning.keep_unsharded import choose_kept
from ..planning.memory_budget import ScheduleLimits
from ..planning.plan import Plan, Problem
from ..planning.search import find_schedule
from ..show.dump import Dump
from ..show.table import exposed_reason, is_notable
from .cluster import Cluster
from .keep import kept_from_forward
from .peak import MemoryForecast, PlannedGraph, outside_bytes, peak_of_step
from .recipe import OPTIMIZERS, Recipe
from .trace import (
    AS_IS,
    FASTER_COMPUTE,
    FASTER_MEMORY,
    NO_LAUNCHES,
    Held,
    TracedGraphOfStep,
    TracedStep,
    faster_machines,
)


@dataclass(frozen=True)
class TimeForecast:
    """Microseconds of a step; its parts add up to ``step_us``.

    Attributes:
        compute_us: in which a GPU computes or copies, in all microbatches.
        exposed_us: in which it waits for communication.
        lost_us: that hidden communication costs it.
        optimizer_us: that it updates parameters.
    """

    compute_us: float
    exposed_us: float
    lost_us: float
    optimizer_us: float

    @property
    def step_us(self) -> float:
        return self.compute_us + self.exposed_us + self.lost_us + self.optimizer_us


@dataclass(frozen=True)
class Exposed:
    """A collective for which compute waits.

    Attributes:
        what: the graph, the kind and what travels.
        us: in one microbatch.
        why: nothing hides it.
    """

    what: str
    us: float
    why: str


@dataclass(frozen=True)
class Change:
    """What a step would take if one thing were different; planned anew.

    Attributes:
        what: is different.
        step_us: that a step would take; per step of as many tokens.
        gain: part of the time of a step that it saves; below 0: it costs time.
        memory_bytes: that a rank would need, margin included.
        fits: whether a device has that.
        is_machine: whether the machine differs, and not the recipe.
    """

    what: str
    step_us: float
    gain: float
    memory_bytes: int
    fits: bool
    is_machine: bool


@dataclass(frozen=True)
class Forecast:
    """What a training step on a cluster would take; ``print`` shows it.

    Attributes:
        model: its name.
        num_params: of the full model.
        tokens: samples, or tokens, that all ranks train on in a step.
        unit: what ``tokens`` counts.
        mfu: part of the peak of the GPU's matrix products, in the dtype of the recipe (fp8: in
            bfloat16), that the model's own products take; three times those of forward, so that
            what is recomputed does not count.
        exposed: collectives that compute waits for longest.
        binds: what a step is bound by: memory, compute, memory bandwidth, link or latency.
        changes: what would help, the largest gain first.
        dumps: the plan of each graph.
        notes: what was assumed.
    """

    model: str
    num_params: int
    cluster: Cluster
    recipe: Recipe
    tokens: int
    unit: str
    time: TimeForecast
    memory: MemoryForecast
    mfu: float
    exposed: tuple[Exposed, ...]
    binds: str
    changes: tuple[Change, ...]
    dumps: tuple[Dump, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.time.step_us * 1e6

    @property
    def fits(self) -> bool:
        """Whether a device has the memory, and the schedule the budget."""
        return self.memory.fits

    def code(self) -> str:
        """Return the lines of Python that train so."""
        budget = self.dumps[0].limits.peak
        return self.recipe.code(self.cluster.num_gpus, None if budget is None else budget / 1e9)

    def to_json(self) -> str:
        """Return all numbers; times in microseconds, sizes in bytes."""
        raw = {
            "model": self.model,
            "num_params": self.num_params,
            "device": self.cluster.hardware.name,
            "gpus": self.cluster.num_gpus,
            "nodes": self.cluster.num_nodes,
            "recipe": dataclasses.asdict(self.recipe),
            self.unit: self.tokens,
            f"{self.unit}_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "time": {**dataclasses.asdict(self.time), "step_us": self.time.step_us},
            "memory": {
                **dataclasses.asdict(self.memory),
                "allocated": self.memory.allocated,
                "total": self.memory.total,
                "fits": self.memory.fits,
            },
            "exposed": [dataclasses.asdict(exposed) for exposed in self.exposed],
            "binds": self.binds,
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "notes": list(self.notes),
            "code": self.code(),
        }
        return json.dumps(raw, indent=1)

    def __str__(self) -> str:
        from .text import forecast_text

        return forecast_text(self)


# --- from traced graphs --------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedStep:
    """A step on one machine.

    Attributes:
        dumps: the plan of each graph.
    """

    dumps: tuple[Dump, ...]
    time: TimeForecast
    memory: MemoryForecast


def plan_step(
    traced: TracedStep,
    recipe: Recipe,
    cluster: Cluster,
    *,
    prices: str = AS_IS,
    keep_all: bool = False,
    refine: bool = True,
) -> PlannedStep:
    """Plan the graphs of a step, and predict what it takes.

    Args:
        prices: of compute, a key of ``TracedGraphOfStep.compute_us``; the cluster has the links.
        keep_all: have every gathered parameter stay for backward, as ZeRO-2 does.
        refine: see ``planning.search.find_schedule``.

    Raises:
        BackendError: no schedule keeps the budget.
    """
    held, hardware = traced.held, cluster.hardware
    optimizer_bytes = int(OPTIMIZERS[recipe.optimizer].states * held.trained)
    outside = outside_bytes(held, optimizer_bytes, recipe.accumulate)
    cost_model = CostModel(hardware)
    graphs = [_priced(graph, prices) for graph in traced.graphs]
    limits = [_limits(graph, recipe, outside) for graph in graphs]
    graphs = _with_kept(graphs, cost_model, limits, keep_all)
    dumps = []
    for graph, limit in zip(graphs, limits):
        buckets = find_schedule(graph.problem, cost_model, limit, refine=refine)
        dumps.append(Dump(Plan(graph.params, graph.problem, buckets), hardware, limit))
    planned = [
        PlannedGraph(dump.plan.problem, dump.plan.buckets, graph.input_bytes)
        for dump, graph in zip(dumps, graphs)
    ]
    memory = peak_of_step(
        planned,
        held,
        optimizer_bytes=optimizer_bytes,
        accumulate=recipe.accumulate,
        device_bytes=cluster.memory_bytes,
    )
    return PlannedStep(tuple(dumps), _time(dumps, recipe, held, hardware), memory)


def _priced(graph: TracedGraphOfStep, prices: str) -> TracedGraphOfStep:
    problem = dataclasses.replace(graph.problem, compute_us=graph.compute_us[prices])
    return dataclasses.replace(graph, problem=problem)


def _limits(graph: TracedGraphOfStep, recipe: Recipe, outside: int) -> ScheduleLimits:
    """Return the limits of a graph: its own shards count, those outside of it do not."""
    if recipe.budget_gb is None:
        return ScheduleLimits()
    peak = int(recipe.budget_gb * 1e9) - outside + graph.input_bytes
    if peak <= 0:
        raise ValueError(
            f"budget_gb={recipe.budget_gb:g}: parameters and optimizer alone need "
            f"{outside / 1e9:.1f} GB on each GPU; give more, or take more GPUs"
        )
    return ScheduleLimits(peak=peak)


def _with_kept(
    graphs: Sequence[TracedGraphOfStep],
    cost_model: CostModel,
    limits: Sequence[ScheduleLimits],
    keep_all: bool,
) -> list[TracedGraphOfStep]:
    """Keep gathered for backward what the planner would, as the partitioner's pass does."""
    if [graph.kind for graph in graphs] != [GraphKind.FORWARD, GraphKind.BACKWARD]:
        return list(graphs)  # several of each: the pass looks at each pair alone
    forward, backward = graphs
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
    problems: tuple[Problem, Problem] = (forward.problem, backward.problem)
    peaks = [limit.peak for limit in limits if limit.peak is not None]
    budget = min(peaks, default=None)
    chosen = list(gathered) if keep_all else choose_kept(*problems, gathered, cost_model, budget)
    kept = kept_from_forward(*problems, {i: gathered[i] for i in chosen})
    return [dataclasses.replace(graph, problem=problem) for graph, problem in zip(graphs, kept)]


def _time(dumps: Sequence[Dump], recipe: Recipe, held: Held, hardware: Hardware) -> TimeForecast:
    totals = [dump.totals for dump in dumps]
    moved = OPTIMIZERS[recipe.optimizer].passes * held.trained
    exposed_us = sum(t.total_us - t.compute_us for t in totals)
    return TimeForecast(
        compute_us=recipe.accumulate * sum(t.compute_us for t in totals),
        exposed_us=recipe.accumulate * exposed_us,
        lost_us=recipe.accumulate * sum(t.lost_us for t in totals),
        optimizer_us=hardware.memory.us(moved) + hardware.launch_us,
    )


def forecast_of(
    traced: TracedStep,
    recipe: Recipe,
    cluster: Cluster,
    *,
    model: str,
    tokens: int,
    unit: str = "tokens",
    notes: Sequence[str] = (),
) -> Forecast:
    """Return the forecast of a step whose graphs are traced.

    Args:
        tokens: of a microbatch on one rank.
        unit: what ``tokens`` counts.
    """
    step = plan_step(traced, recipe, cluster)
    changes = _changes(traced, recipe, cluster)
    forward = sum(g.num_flops for g in traced.graphs if g.kind == GraphKind.FORWARD)
    peak = cluster.hardware.flops_of("float32" if recipe.dtype == "float32" else "bfloat16").peak
    return Forecast(
        model=model,
        num_params=int(traced.held.num_params),
        cluster=cluster,
        recipe=recipe,
        tokens=tokens * recipe.accumulate * cluster.num_gpus,
        unit=unit,
        time=step.time,
        memory=step.memory,
        mfu=3 * forward * recipe.accumulate / (step.time.step_us * 1e-6) / peak,
        exposed=tuple(_exposed(step.dumps)),
        binds=_binds(step.memory, changes),
        changes=tuple(sorted(changes, key=lambda change: -change.gain)),
        dumps=step.dumps,
        notes=tuple(notes),
    )


def _exposed(dumps: Sequence[Dump], most: int = 8) -> list[Exposed]:
    """Return the collectives that compute waits for, the longest first."""
    found = [
        Exposed(
            f"{dump.plan.graph} {bucket.kind} of {dump.bucket_label(bucket)}",
            us,
            exposed_reason(dump, i),
        )
        for dump in dumps
        for i, (bucket, us) in enumerate(zip(dump.plan.buckets, dump.timeline.exposed_us))
        if is_notable(us)
    ]
    return sorted(found, key=lambda exposed: -exposed.us)[:most]


# --- what would help -----------------------------------------------------------------------------

LINK, LATENCY, COMPUTE, BANDWIDTH = (
    "links twice as fast",
    "no latency of kernels and links",
    "matrix products twice as fast",
    "device memory twice as fast",
)
_BINDS = {LINK: "link", LATENCY: "latency", COMPUTE: "compute", BANDWIDTH: "memory bandwidth"}


def _changes(traced: TracedStep, recipe: Recipe, cluster: Cluster) -> list[Change]:
    """Plan the step anew with one thing different, by the quick search; compare with that."""
    quick = functools.partial(plan_step, traced, refine=False)
    base = quick(recipe, cluster).time.step_us
    machines = faster_machines(cluster.hardware)

    def change(what: str, plan: Callable[[], PlannedStep], is_machine: bool = True) -> Change:
        step = plan()
        gain = 1 - step.time.step_us / base
        memory = step.memory
        return Change(what, step.time.step_us, gain, memory.total, memory.fits, is_machine)

    with_links = {
        LINK: _scaled_links(cluster, rate=2.0),
        LATENCY: _scaled_links(cluster, latency=0.0),
    }
    with_rates = {
        COMPUTE: (FASTER_COMPUTE, cluster),
        BANDWIDTH: (FASTER_MEMORY, _with(cluster, machines[FASTER_MEMORY])),
    }
    changes = [
        change(LINK, lambda: quick(recipe, with_links[LINK])),
        change(LATENCY, lambda: quick(recipe, with_links[LATENCY], prices=NO_LAUNCHES)),
        *(
            change(what, functools.partial(quick, recipe, other, prices=prices))
            for what, (prices, other) in with_rates.items()
        ),
    ]
    if recipe.kind in ("zero3", "hsdp"):
        changes.append(
            change(
                "parameters kept from forward to backward (reshard_after_forward=False)",
                lambda: quick(recipe, cluster, keep_all=True),
                is_machine=False,
            )
        )
    if recipe.accumulate > 1:
        return changes
    accumulating = dataclasses.replace(recipe, accumulate=4)
    four = quick(accumulating, cluster)
    gain = 1 - four.time.step_us / 4 / base
    changes.append(
        Change(
            "4 microbatches in a step (per microbatch)",
            four.time.step_us / 4,
            gain,
            four.memory.total,
            four.memory.fits,
            is_machine=False,
        )
    )
    return changes


def _with(cluster: Cluster, hardware: Hardware) -> Cluster:
    return dataclasses.replace(cluster, hardware=hardware)


def _scaled_links(cluster: Cluster, *, rate: float = 1.0, latency: float = 1.0) -> Cluster:
    links = {}
    for name in ("intra", "inter"):
        link = getattr(cluster.hardware, name)
        bus = {k: dataclasses.replace(r, peak=r.peak * rate) for k, r in link.bus.items()}
        links[name] = dataclasses.replace(
            link, bus=bus, latency_us=link.latency_us * latency, hop_us=link.hop_us * latency
        )
    launch_us = cluster.hardware.launch_us * latency
    issue_us = cluster.hardware.issue_us * latency
    return _with(
        cluster,
        dataclasses.replace(cluster.hardware, **links, launch_us=launch_us, issue_us=issue_us),
    )


def _binds(memory: MemoryForecast, changes: Sequence[Change]) -> str:
    """Return what a step is bound by: memory that is lacking, else the part to be twice as fast."""
    if not memory.fits:
        return "memory"
    machine = [change for change in changes if change.is_machine]
    return _BINDS[max(machine, key=lambda change: change.gain).what]
