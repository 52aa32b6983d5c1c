"""Derive training steps with other depths, meshes or CPU offload from traced steps.

If layers repeat, two *shallow copies* of a model, with fewer layers, determine the step of any
depth (``deepen``). With partial recomputation, layers are of two kinds, recomputed and saved, and
four copies determine the step for any number of each: a base copy, and copies with one more period
of recomputed layers, of saved layers, and of both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..fake_mesh import Ranks
from ..kinds import TransferKind
from ..planning.plan import PlanParam, Problem, Transfer
from .cluster import Cluster
from .deepen import Layers, NotPeriodicError, deepen
from .recipe import Recipe
from .trace import StepGraph, TracedStep, trace
from .workload import Workload, num_recomputed, recompute_layers

Progress = Callable[[str], None]  # called with a description of the work that starts

# Minimum periods per kind of layer in a shallow copy; the first and last may be irregular.
LEAST_PERIODS = 3


class Depth(NamedTuple):
    """Numbers of recomputed layers, which come first, and of saved layers."""

    recomputed: int
    saved: int

    @classmethod
    def at(cls, num_layers: int, recipe: Recipe) -> Depth:
        first = num_recomputed(num_layers, recipe.recompute)
        return cls(first, num_layers - first)

    def shallow(self, period: int) -> Depth:
        """Return the depth of the first shallow copy from which to derive this depth.

        All layers of a kind are kept if the second copy would have at least as many of them.
        """
        return Depth(*(_few(number, period) for number in self))


def _few(num_layers: int, period: int) -> int:
    least = LEAST_PERIODS * period
    few = least + (num_layers - least) % period
    return few if num_layers > few + period else num_layers


class ShallowCopies(NamedTuple):
    """Traced steps of a model's shallow copies."""

    # The second column has one more period of recomputed layers, the second row one more period of
    # saved layers; each is absent if that kind does not grow.
    steps: Sequence[Sequence[TracedStep]]
    layers: Layers
    shallow: Depth  # depth of the first step

    def nearest(self, depth: Depth) -> Depth:
        """Return ``shallow`` plus the whole periods that fit into ``depth``."""
        pairs = zip(self.shallow, self._periods(depth))
        return Depth(*(few + self.layers.period * number for few, number in pairs))

    def at_depth(self, depth: Depth) -> TracedStep:
        """Return the step at the depth ``nearest(depth)``.

        Raises:
            NotPeriodicError: as ``deepen``.
        """
        first, rest = self._periods(depth)
        rows = [self._deepened(row, first) for row in self.steps]
        of_copies = [note for row in self.steps for step in row for note in step.notes]
        notes = dict.fromkeys([*of_copies, self._note()])
        return dataclasses.replace(self._deepened(rows, rest), notes=tuple(notes))

    def _periods(self, depth: Depth) -> list[int]:
        period = self.layers.period
        return [max(0, deep - few) // period for deep, few in zip(depth, self.shallow)]

    def _deepened(self, steps: Sequence[TracedStep], periods: int) -> TracedStep:
        return steps[0] if len(steps) == 1 else deepen(steps[0], steps[1], periods, self.layers)

    def _note(self) -> str:
        few, num_numbers = sum(self.shallow), len(self.steps) + len(self.steps[0]) - 1
        *most, last = (str(few + i * self.layers.period) for i in range(num_numbers))
        return f"{', '.join(most)} and {last} layers were traced; the other layers repeat them"


def trace_step(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> TracedStep:
    """Trace a step or, if many layers repeat, derive it from traces of shallow copies.

    If the copies do not show that layers repeat, all layers are traced, and a note says why.
    """
    if workload.num_layers is None:
        return _trace(workload, None, recipe, cluster, progress)
    depth = Depth.at(workload.num_layers, recipe)
    if depth.shallow(workload.period) == depth:
        return _trace(workload, depth, recipe, cluster, progress)
    try:
        return trace_copies(workload, depth, recipe, cluster, progress).at_depth(depth)
    except NotPeriodicError as error:
        step = _trace(workload, depth, recipe, cluster, progress)
        notes = (*step.notes, f"all layers were traced, since {error}")
        return dataclasses.replace(step, notes=notes)


def trace_copies(
    workload: Workload,
    depth: Depth,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
) -> ShallowCopies:
    """Trace the shallow copies from which to derive ``depth``; ignore ``recipe.recompute``."""
    period = workload.period
    few = depth.shallow(period)
    first, rest = (
        (number, number + period) if deep > number else (number,)
        for deep, number in zip(depth, few)
    )
    layers = Layers(_path_of_layers(workload, sum(few)), period)
    copies = itertools.count(1)

    def count(text: str) -> None:
        progress(f"{text} ({next(copies)} of {len(first) * len(rest)} copies)")

    steps = [[_trace(workload, Depth(a, b), recipe, cluster, count) for a in first] for b in rest]
    return ShallowCopies(steps, layers, few)


def depths(num_layers: int, period: int) -> list[Depth]:
    """Return the depths derivable from ``trace_all_depths``, fewest saved layers first."""
    least, more = LEAST_PERIODS * period, num_layers % period
    saved = range(least + more, num_layers - least + 1, period)
    return [Depth(num_layers - number, number) for number in saved]


def trace_all_depths(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> ShallowCopies:
    """Trace the four shallow copies from which to derive all ``depths`` of a model."""
    assert workload.num_layers is not None
    deep = (LEAST_PERIODS + 2) * workload.period
    depth = Depth(deep, deep + workload.num_layers % workload.period)
    return trace_copies(workload, depth, recipe, cluster, progress)


def _trace(
    workload: Workload,
    depth: Depth | None,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress,
) -> TracedStep:
    if recipe.offload and cluster.hardware.device_type == "cpu":
        raise ValueError("offload=True on a CPU: shards are in host memory already; omit offload")
    if recipe.dtype == "fp8" and not cluster.has_fp8:
        raise ValueError(f'dtype="fp8": {cluster.hardware.name} has no fp8; use bf16')
    if workload.tokens % recipe.ep:
        raise ValueError(
            f"ep={recipe.ep}: must divide the {workload.tokens} {workload.unit} of a microbatch, "
            f"because forecasts assume that each rank sends equally many to all {recipe.ep} ranks: "
            f"use a batch with a multiple of {recipe.ep} {workload.unit}"
        )
    num_layers: int | None = None
    part = recipe.recompute
    if depth is not None:
        num_layers, part = sum(depth), depth.recomputed / sum(depth)
    progress(f"tracing {num_layers or 'all'} layers")
    return trace(
        lambda: workload.make(num_layers),
        recipe.ranks(cluster.num_gpus),
        cluster.hardware,
        recipe.traced_options(),
        functools.partial(recompute_layers, part=part),
        workload.parallelize if recipe.ep == 1 else workload.split_experts,
        workload.symbols,
    )


def _path_of_layers(workload: Workload, num_layers: int) -> str:
    with torch.device("meta"):
        model, _ = workload.make(num_layers)
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    return lists[0] if lists else ""


# --- another mesh, shards on the host ------------------------------------------------------------


def for_strategy(traced: TracedStep, recipe: Recipe, num_gpus: int) -> TracedStep | None:
    """Adapt a ZeRO-3 step to the strategy of ``recipe``: ZeRO-3, ZeRO-2, or HSDP with replicas.

    Return None if the strategy needs its own trace: HSDP does if a parameter is replicated or, in
    the ZeRO-3 step, padded, or if a transfer is of another kind than those of ZeRO-3. Otherwise,
    ZeRO-3 and HSDP differ only in how many bytes each rank holds and in which ranks exchange them.
    """
    if recipe.kind != "hsdp":
        return traced  # ZeRO-2, too: see ``Recipe.traced_options``
    # The time to compute the fp8 scales of each rank's shards is not adapted: an error of 1.3 ms in
    # a step of one second for Llama 3 8B on 8 shards instead of 64.
    ranks = recipe.ranks(num_gpus)
    num_shards = ranks.replicas * ranks.shards  # of ``traced``
    if not all(_is_even(p, num_shards) for graph in traced.graphs for p in graph.params):
        return None
    if not all(_is_plain(t) for graph in traced.graphs for t in graph.problem.transfers):
        return None
    held = traced.held
    return dataclasses.replace(
        traced,
        graphs=tuple(_with_replicas(graph, ranks) for graph in traced.graphs),
        held=dataclasses.replace(
            held,
            parameters=held.parameters * ranks.replicas,
            trained=held.trained * ranks.replicas,
        ),
    )


def _is_even(param: PlanParam, num_shards: int) -> bool:
    return param.padded_rows is not None and param.shape[0] % num_shards == 0


def _is_plain(transfer: Transfer) -> bool:
    # ALL_REDUCE_MAX reduces fp8 scales.
    kinds = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE_MAX)
    return transfer.kind in kinds


def _with_replicas(graph: StepGraph, ranks: Ranks) -> StepGraph:
    input_bytes = graph.input_bytes * ranks.replicas
    problem = graph.problem
    return dataclasses.replace(
        graph,
        params=tuple(
            dataclasses.replace(p, padded_rows=(p.padded_rows or 0) * ranks.replicas)
            for p in graph.params
        ),
        problem=dataclasses.replace(
            _with_inputs(problem, input_bytes - graph.input_bytes),
            transfers=tuple(_transfer_with_replicas(t, ranks) for t in problem.transfers),
        ),
        input_bytes=input_bytes,
    )


def _transfer_with_replicas(transfer: Transfer, ranks: Ranks) -> Transfer:
    reduces = transfer.kind == TransferKind.REDUCE_SCATTER
    return dataclasses.replace(
        transfer,
        group="shard",
        world=ranks.shards,
        shard_bytes=transfer.shard_bytes * ranks.replicas,
        replicas="replicate" if reduces else "",
        num_replicas=ranks.replicas if reduces else 1,
        replica_stride=ranks.shards * ranks.tp if reduces else 1,
    )


def on_host(traced: TracedStep) -> TracedStep:
    """Return a ZeRO-3 or HSDP step with its shards and reduced gradients on the host."""
    return dataclasses.replace(traced, graphs=tuple(map(_with_shards_on_host, traced.graphs)))


def _with_shards_on_host(graph: StepGraph) -> StepGraph:
    # A transfer with ``host=True`` counts its shard only while the shard is on the device.
    transfers = tuple(dataclasses.replace(t, host=True) for t in graph.problem.transfers)
    problem = _with_inputs(graph.problem, -graph.input_bytes)
    problem = dataclasses.replace(problem, transfers=transfers)
    return dataclasses.replace(graph, problem=problem, input_bytes=0)


def _with_inputs(problem: Problem, added_bytes: int) -> Problem:
    return dataclasses.replace(
        problem,
        fixed_bytes=tuple(value + added_bytes for value in problem.fixed_bytes),
        fixed_boundary_bytes=tuple(value + added_bytes for value in problem.fixed_boundary_bytes),
    )
