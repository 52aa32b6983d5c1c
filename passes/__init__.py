"""The passes, in order. The joint graph is rewritten before it is partitioned; each of the forward,
backward and inference graphs is planned and lowered after Inductor's own passes.

    joint graph ─► merge ─► reshard ─► [partitioner] ─► forward, backward ─► buckets ─► lower
"""

from __future__ import annotations

from torch import fx

from graphshard import ops
from graphshard.passes.buckets import launch_marker, plan_buckets
from graphshard.passes.lower import (
    apply_bucket,
    apply_replicate,
    describe_bucket,
    describe_params,
)
from graphshard.passes.merge import merge, merge_unshards
from graphshard.passes.reshard import parameter_derived, reshard
from graphshard.plan import Plan

JOINT = (merge, reshard)

__all__ = ["JOINT", "lower", "parameter_derived"]


def lower(graph: fx.Graph, kind: str) -> Plan:
    """Decide what travels together in ``graph``, rewrite it so in place, and say what was done."""
    merge_unshards(graph)
    params = describe_params(graph)
    unique = tuple(dict.fromkeys(params.values()))
    index = {param: i for i, param in enumerate(unique)}
    buckets = []
    for markers in plan_buckets(params):
        buckets.append(describe_bucket(markers, tuple(index[params[m]] for m in markers)))
        apply_bucket(graph, markers, buckets[-1], at=launch_marker(markers))
    apply_replicate(graph, [marker for marker in params if marker.target is ops.replicate])
    return Plan(kind, unique, tuple(buckets))
