"""The passes, in order. What Dynamo traced is rewritten before it is differentiated, the joint graph
before it is partitioned; each of the forward, backward and inference graphs is read as a problem,
scheduled, and lowered by the plan, after Inductor's own passes.

    traced graph ─► float8 ─► [AOTAutograd]
    joint graph ─► merge ─► casts ─► float8 ─► reshard ─► [partitioner] ─► forward, backward
                                                                              ─► keep ─► offload
                                       [Inductor] ─► each ─► steps ─► lower
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from graphshard.cost.model import CostModel
from graphshard.kinds import HOST_COPIES, GraphKind
from graphshard.ops import markers as marker_ops
from graphshard.ops.host_copy import PINNED
from graphshard.ops.nodes import REASON
from graphshard.passes.activation_offload import describe_saved, stow, stowable
from graphshard.passes.build_problem import (
    fill_values,
    raise_scales,
    read_problem,
    sink_gathered,
    step_of,
)
from graphshard.passes.casts import cast_before_gather, cast_early
from graphshard.passes.dedup import merge, merge_unshards
from graphshard.passes.float8 import gather_float8, scale_before_gather, use_float8
from graphshard.passes.keep_unsharded import keep, keep_parts, keepable
from graphshard.passes.lower import (
    apply_buckets,
    apply_replicate,
    describe_params,
    describe_transfer,
    markers_of,
)
from graphshard.passes.reshard import parameter_derived, reshard
from graphshard.planning.activation_offload import SavedActivation
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer

TRACED = (use_float8,)
JOINT = (merge, cast_early, gather_float8, reshard)

__all__ = [
    "JOINT",
    "TRACED",
    "keep_gathered",
    "keep_parts",
    "lower",
    "parameter_derived",
    "stow_activations",
]


def lower(
    graph: fx.Graph,
    kind: GraphKind,
    costs: CostModel,
    decide: Callable[[Problem, CostModel], tuple[Bucket, ...]],
) -> Plan:
    """Have ``decide`` say when what travels in ``graph``, and rewrite it so in place."""
    merge_unshards(graph)
    if kind == GraphKind.INFERENCE:
        cast_before_gather(graph)
        scale_before_gather(graph)
    params = describe_params(graph)
    unique = tuple(dict.fromkeys(params.values()))
    index = {param: i for i, param in enumerate(unique)}
    at = {marker: index[param] for marker, param in params.items()}
    problem, markers, steps = _read(graph, kind, costs, at)
    buckets = decide(problem, costs)
    gathered = [marker for marker in markers if marker.target is marker_ops.unshard]
    kept = tuple(at[marker] for marker in gathered if not marker_ops.arguments(marker)["regather"])
    reasons = tuple((at[marker], marker.meta[REASON]) for marker in at if REASON in marker.meta)
    apply_buckets(graph, buckets, markers, steps)
    apply_replicate(graph, [marker for marker in params if marker not in markers])
    return Plan(unique, problem, buckets, kept, reasons)


def keep_gathered(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    costs: CostModel,
    decide: Callable[[Problem, Problem, Mapping[int, Transfer], CostModel], Sequence[int]],
) -> list[str]:
    """Have ``decide`` say which parameters stay gathered for backward, and rewrite both graphs so.

    Args:
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
        decide: given both problems, in which ``Transfer.param`` is a graph input; see
            ``graphshard.planning.keep_unsharded``.

    Returns:
        The names of the forward's nodes that are saved now.
    """
    params = {**describe_params(forward), **describe_params(backward)}
    inputs = {marker: param.input for marker, param in params.items()}
    before, gathers, _ = _read(forward, GraphKind.FORWARD, costs, inputs)
    after, markers, _ = _read(backward, GraphKind.BACKWARD, costs, inputs)
    pairs = keepable(forward, backward, num_outputs)
    transfers = dict(zip(gathers, before.transfers, strict=True))
    gathered = {i: transfers[pairs[m]] for i, m in enumerate(markers) if m in pairs}
    chosen = [markers[i] for i in decide(before, after, gathered, costs)]
    keep(forward, backward, {marker: pairs[marker] for marker in chosen}, num_outputs)
    return [pairs[marker].name for marker in chosen]


def stow_activations(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    costs: CostModel,
    decide: Callable[[Problem, Problem, Sequence[SavedActivation], CostModel], Sequence[int]],
) -> None:
    """Have ``decide`` say which activations wait for backward in the host's memory, and rewrite both graphs.

    Args:
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
    """
    pairs = stowable(forward, backward, num_outputs)
    before, _, first = _read(forward, GraphKind.FORWARD, costs, {})
    after, _, then = _read(backward, GraphKind.BACKWARD, costs, {})
    saved = describe_saved(pairs, step_of(forward, first), step_of(backward, then))
    chosen = [list(pairs)[i] for i in decide(before, after, saved, costs)]
    stow(forward, {node: pairs[node] for node in chosen}, num_outputs, PINNED)


def _read(
    graph: fx.Graph, kind: GraphKind, costs: CostModel, param_of: Mapping[fx.Node, int]
) -> tuple[Problem, list[fx.Node], list[fx.Node]]:
    """The problem of ``graph``, the marker of every transfer, and the first node of every step."""
    raise_scales(graph)
    sink_gathered(graph)
    fill_values(graph)
    found = [marker for marker in markers_of(graph) if marker.target in marker_ops.KIND_OF_MARKER]
    # Ranks may differ in what they copy, but not in the numbers of what they send.
    communicating = sorted(
        found, key=lambda marker: marker_ops.KIND_OF_MARKER[marker.target] in HOST_COPIES
    )
    transfers = {m: describe_transfer(m, param_of.get(m)) for m in communicating}
    problem, steps = read_problem(graph, kind, transfers, costs.compute_us(graph))
    return problem, communicating, steps
