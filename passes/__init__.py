"""The passes, in order. The joint graph is rewritten before it is partitioned; each of the forward,
backward and inference graphs is read as a problem, scheduled, and lowered by the plan, after
Inductor's own passes.

    joint graph ─► merge ─► reshard ─► [partitioner] ─► forward, backward ─► steps ─► lower
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from graphshard import ops
from graphshard.cost import CostModel
from graphshard.passes.lower import (
    apply_buckets,
    apply_replicate,
    describe_params,
    describe_transfer,
)
from graphshard.passes.merge import merge, merge_unshards
from graphshard.passes.reshard import parameter_derived, reshard
from graphshard.passes.steps import read_problem, sink_gathered
from graphshard.plan import Bucket, Plan, Problem

JOINT = (merge, reshard)

__all__ = ["JOINT", "lower", "parameter_derived"]


def lower(
    graph: fx.Graph,
    kind: str,
    costs: CostModel,
    decide: Callable[[Problem, CostModel], tuple[Bucket, ...]],
) -> Plan:
    """Have ``decide`` say when what travels in ``graph``, and rewrite it so in place."""
    merge_unshards(graph)
    sink_gathered(graph)
    params = describe_params(graph)
    unique = tuple(dict.fromkeys(params.values()))
    index = {param: i for i, param in enumerate(unique)}
    transfers = {
        marker: describe_transfer(marker, index[param])
        for marker, param in params.items()
        if marker.target in ops.KINDS
    }
    problem, steps = read_problem(graph, kind, transfers, costs.compute_us(graph))
    buckets = decide(problem, costs)
    apply_buckets(graph, buckets, list(transfers), steps)
    apply_replicate(graph, [marker for marker in params if marker not in transfers])
    return Plan(unique, problem, buckets)
