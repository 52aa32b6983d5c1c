"""The passes, in order. The joint graph is rewritten before it is partitioned; each of the forward,
backward and inference graphs is read as a problem, scheduled, and lowered by the plan, after
Inductor's own passes.

    joint graph ─► merge ─► casts ─► reshard ─► [partitioner] ─► forward, backward ─► keep
                                       [Inductor] ─► each ─► steps ─► lower
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from graphshard import ops
from graphshard.cost import CostModel
from graphshard.passes.casts import cast_before_gather, cast_early
from graphshard.passes.keep import keep, keepable
from graphshard.passes.lower import (
    apply_buckets,
    apply_replicate,
    describe_params,
    describe_transfer,
    markers_of,
)
from graphshard.passes.merge import merge, merge_unshards
from graphshard.passes.reshard import parameter_derived, reshard
from graphshard.passes.steps import fill_values, read_problem, sink_gathered
from graphshard.plan import BACKWARD, FORWARD, INFERENCE, REASON, Bucket, Plan, Problem, Transfer

JOINT = (merge, cast_early, reshard)

__all__ = ["JOINT", "keep_gathered", "lower", "parameter_derived"]


def lower(
    graph: fx.Graph,
    kind: str,
    costs: CostModel,
    decide: Callable[[Problem, CostModel], tuple[Bucket, ...]],
) -> Plan:
    """Have ``decide`` say when what travels in ``graph``, and rewrite it so in place."""
    merge_unshards(graph)
    if kind == INFERENCE:
        cast_before_gather(graph)
    params = describe_params(graph)
    unique = tuple(dict.fromkeys(params.values()))
    index = {param: i for i, param in enumerate(unique)}
    problem, markers, steps = _read(graph, kind, costs, lambda marker: index[params[marker]])
    buckets = decide(problem, costs)
    kept = tuple(index[params[m]] for m in markers if m.target is ops.unshard and not m.args[3])
    reasons = tuple((index[params[m]], m.meta[REASON]) for m in markers if REASON in m.meta)
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
            ``graphshard.keep``.

    Returns:
        The names of the forward's nodes that are saved now.
    """
    params = {**describe_params(forward), **describe_params(backward)}
    before, gathers, _ = _read(forward, FORWARD, costs, lambda marker: params[marker].input)
    after, markers, _ = _read(backward, BACKWARD, costs, lambda marker: params[marker].input)
    pairs = keepable(forward, backward, num_outputs)
    transfers = dict(zip(gathers, before.transfers, strict=True))
    gathered = {i: transfers[pairs[m]] for i, m in enumerate(markers) if m in pairs}
    chosen = [markers[i] for i in decide(before, after, gathered, costs)]
    keep(forward, {marker: pairs[marker] for marker in chosen}, num_outputs)
    return [pairs[marker].name for marker in chosen]


def _read(
    graph: fx.Graph, kind: str, costs: CostModel, param_of: Callable[[fx.Node], int]
) -> tuple[Problem, list[fx.Node], list[fx.Node]]:
    """The problem of ``graph``, the marker of every transfer, and the first node of every step."""
    sink_gathered(graph)
    fill_values(graph)
    communicating = [marker for marker in markers_of(graph) if marker.target in ops.KINDS]
    transfers = {marker: describe_transfer(marker, param_of(marker)) for marker in communicating}
    problem, steps = read_problem(graph, kind, transfers, costs.compute_us(graph))
    return problem, communicating, steps
