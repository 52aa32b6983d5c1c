"""The graph passes, in the order in which they run.

The traced graph (from Dynamo) is rewritten before it is differentiated, and the joint graph before
it is partitioned. After Inductor's own passes, each forward, backward or inference graph is read as
a ``Problem``, scheduled, and lowered according to its plan.

    traced graph ─► inline regions ─► hoist reads ─► dense gradients ─► float8 ─► [AOTAutograd]
    joint graph ─► host waits ─► dedup ─► casts ─► float8 ─► recompute ─► reshard
                ─► single rank ─► [partitioner]
    [partitioner] ─► forward, backward
    forward, backward ─► keep secondary shards ─► note held bytes ─► keep gathered
                      ─► offload activations
    forward ─► clone mutated inputs
    [Inductor] ─► each graph ─► normalise ─► read the problem ─► plan ─► lower ─► regions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind
from graphshard.ops import markers
from graphshard.ops.host_copy import PINNED
from graphshard.ops.marker_specs import UnshardSpec
from graphshard.ops.nodes import HELD_BYTES, REASON, WHOLE_SHARD, memory_bytes, value_of
from graphshard.passes.activation_offload import describe_saved, offload, offloadable
from graphshard.passes.build_problem import GraphProblem, build_problem, waits_on_host
from graphshard.passes.casts import cast_before_gather, cast_early
from graphshard.passes.dedup import merge, merge_unshards
from graphshard.passes.dense_gradients import use_dense_gradients
from graphshard.passes.describe import describe_params
from graphshard.passes.float8 import gather_float8, scale_before_gather, use_float8
from graphshard.passes.hoist_reads import hoist_reads
from graphshard.passes.host_waits import bypass_sync_nodes
from graphshard.passes.inline_regions import inline_regions
from graphshard.passes.keep_unsharded import (
    keep,
    keep_secondary_shards,
    note_held_bytes,
    regathered_params,
)
from graphshard.passes.lower import apply_buckets, apply_replicate
from graphshard.passes.mutated_inputs import clone_mutated_inputs
from graphshard.passes.normalise import normalise
from graphshard.passes.recompute import fix_backward_gathers
from graphshard.passes.regions import share_regions
from graphshard.passes.reshard import param_derived, reshard
from graphshard.passes.single_rank import elide_single_rank_collectives, use_whole_shards
from graphshard.planning.offload import SavedActivation
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem, Transfer

TRACED = (inline_regions, hoist_reads, use_dense_gradients, use_float8)
"""Passes on the graph that Dynamo traced."""

JOINT = (bypass_sync_nodes, merge, cast_early, gather_float8)
"""Passes on the joint graph; ``Partitioner`` runs the other joint passes after them."""

__all__ = [
    "JOINT",
    "TRACED",
    "PartitionProblems",
    "clone_mutated_inputs",
    "elide_single_rank_collectives",
    "fix_backward_gathers",
    "keep_gathered",
    "keep_secondary_shards",
    "lower",
    "note_held_bytes",
    "offload_activations",
    "param_derived",
    "read_partition",
    "read_problem",
    "reshard",
    "shard_bytes",
    "share_regions",
]


class _ReadGraph(NamedTuple):
    """A graph that is ready to be lowered.

    Attributes:
        params: parameters of its plan.
        param_of: position in ``params``, by marker.
        markers_of_params: all markers of parameters, including replicated ones.
        read: the graph as a problem.
    """

    params: tuple[PlanParam, ...]
    param_of: dict[fx.Node, int]
    markers_of_params: list[fx.Node]
    read: GraphProblem


def _read(graph: fx.Graph, kind: GraphKind, cost_model: CostModel) -> _ReadGraph:
    """Normalise a graph in place, and read it as a problem."""
    merge_unshards(graph)
    if kind == GraphKind.INFERENCE:
        cast_before_gather(graph)
        scale_before_gather(graph)
        use_whole_shards(graph)
    params = describe_params(graph)
    unique = tuple(sorted(dict.fromkeys(params.values()), key=lambda param: param.input))
    number = {param: i for i, param in enumerate(unique)}
    param_of = {marker: number[param] for marker, param in params.items()}
    normalise(graph)
    read = build_problem(graph, kind, cost_model, param_of)
    return _ReadGraph(unique, param_of, list(params), read)


def read_problem(
    graph: fx.Graph, kind: GraphKind, cost_models: Sequence[CostModel]
) -> tuple[tuple[PlanParam, ...], list[Problem]]:
    """Normalise ``graph`` in place and read it like ``lower``, once for each cost model.

    Returns:
        The parameters, and one problem for each of ``cost_models``.
    """
    first, *others = cost_models
    ready = _read(graph, kind, first)
    priced = [build_problem(graph, kind, model, ready.param_of).problem for model in others]
    return ready.params, [ready.read.problem, *priced]


def shard_bytes(graph: fx.Graph) -> int:
    """Return the bytes of the shards and replicated parameters among a graph's inputs.

    Shards that live in host memory do not count.
    """
    sources = {
        node
        for node in graph.find_nodes(op="placeholder")
        if WHOLE_SHARD in node.meta
        or (
            any(user.target in markers.UNSHARD_MARKERS for user in node.users)
            and not waits_on_host(node)
        )
    }
    return sum(memory_bytes(value_of(node)) for node in sources if HELD_BYTES not in node.meta)


def lower(
    graph: fx.Graph,
    kind: GraphKind,
    cost_model: CostModel,
    plan_buckets: Callable[[Problem, Sequence[PlanParam], CostModel], tuple[Bucket, ...]],
) -> Plan:
    """Read ``graph`` as a problem, plan it, and rewrite it according to the plan, in place."""
    ready = _read(graph, kind, cost_model)
    problem, marker_nodes, steps, _ = ready.read
    buckets = plan_buckets(problem, ready.params, cost_model)
    gathered = [node for node in marker_nodes if node.target is markers.unshard]
    plan = Plan(
        params=ready.params,
        problem=problem,
        buckets=buckets,
        kept=tuple(
            ready.param_of[node]
            for node in gathered
            if UnshardSpec.of_node(node).regather_group is None
        ),
        reasons=tuple(
            (i, node.meta[REASON]) for node, i in ready.param_of.items() if REASON in node.meta
        ),
    )
    apply_buckets(graph, buckets, marker_nodes, steps)
    apply_replicate(graph, [n for n in ready.markers_of_params if n not in marker_nodes])
    return plan


class PartitionProblems(NamedTuple):
    """A forward and a backward graph as problems, in which ``Transfer.param`` is a graph input."""

    forward: GraphProblem
    backward: GraphProblem


def read_partition(
    forward: fx.Graph, backward: fx.Graph, cost_model: CostModel
) -> PartitionProblems:
    """Normalise both graphs in place, and read them as problems."""
    problems = []
    for graph, kind in ((forward, GraphKind.FORWARD), (backward, GraphKind.BACKWARD)):
        input_of = {node: param.input for node, param in describe_params(graph).items()}
        normalise(graph)
        problems.append(build_problem(graph, kind, cost_model, input_of))
    return PartitionProblems(*problems)


def keep_gathered(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    cost_model: CostModel,
    choose: Callable[[Problem, Problem, Mapping[int, Transfer], CostModel], Sequence[int]],
    problems: PartitionProblems | None = None,
) -> list[str]:
    """Keep parameters that ``choose`` selects unsharded for backward; rewrite both graphs in place.

    Args:
        num_outputs: number of user outputs of the forward graph; its other outputs are saved.
        choose: callback that selects gathers of the backward graph to drop (see
            ``graphshard.planning.keep_unsharded``); ``Transfer.param`` is a graph input.
        problems: both graphs as problems; None: they are read here.

    Returns:
        The names of the forward's nodes that are now saved. If there are none, ``problems`` still
        describes the graphs.
    """
    before, after = problems or read_partition(forward, backward, cost_model)
    pairs = regathered_params(forward, backward, num_outputs)
    transfers = dict(zip(before.markers, before.problem.transfers, strict=True))
    gathered = {i: transfers[pairs[m]] for i, m in enumerate(after.markers) if m in pairs}
    chosen = choose(before.problem, after.problem, gathered, cost_model)
    kept = {after.markers[i]: pairs[after.markers[i]] for i in chosen}
    keep(forward, backward, kept, num_outputs)
    return [node.name for node in kept.values()]


def offload_activations(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    cost_model: CostModel,
    choose: Callable[[Problem, Problem, Sequence[SavedActivation], CostModel], Sequence[int]],
    problems: PartitionProblems | None = None,
) -> None:
    """Offload activations that ``choose`` selects until backward; rewrite both graphs in place.

    Args:
        num_outputs: number of user outputs of the forward graph; its other outputs are saved.
        choose: callback that selects activations (see ``graphshard.planning.offload``).
        problems: both graphs as problems; None: they are read here.
    """
    pairs = offloadable(forward, backward, num_outputs)
    before, after = problems or read_partition(forward, backward, cost_model)
    saved = describe_saved(pairs, before.step_of, after.step_of)
    chosen = choose(before.problem, after.problem, saved, cost_model)
    placeholders = list(pairs)
    offloaded = {placeholders[i]: pairs[placeholders[i]] for i in chosen}
    offload(forward, offloaded, num_outputs, PINNED)
