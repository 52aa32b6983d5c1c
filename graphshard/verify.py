"""Invariants of a partition and of a lowered graph, checked at every compile.

A violation is a bug of ours, never of the user's; it is raised before the graph can run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import ops
from .plan import ALL_GATHER, ALL_REDUCE, PLANNED, REDUCE_SCATTER, Plan

_c10d = torch.ops._c10d_functional
_KINDS: dict[Any, str] = {
    _c10d.all_gather_into_tensor.default: ALL_GATHER,
    _c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
    _c10d.all_reduce.default: ALL_REDUCE,
}


def verify_partition(forward: fx.GraphModule, derived: list[str], num_outputs: int) -> None:
    """Nothing that only parameters determine is saved for backward (ZeRO-3).

    Args:
        derived: names of the joint graph's nodes that are derived from parameters alone.
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
    """
    outputs: Any = forward.graph.output_node().args[0]
    saved = {n.name for n in outputs[num_outputs:] if isinstance(n, fx.Node)}
    full = sorted(saved.intersection(derived))
    if full:
        raise AssertionError(f"saved for backward, though parameters alone determine it: {full}")


def verify_lowered(graph: fx.Graph, plan: Plan) -> None:
    """The graph is sound, does what ``plan`` says in its order, and waits once for everything."""
    graph.lint()
    planned = [(bucket.kind, bucket.num_bytes) for bucket in plan.buckets]
    launched = []
    for node in graph.nodes:
        if node.target in (*ops.UNSHARD, *ops.REDUCE):
            raise AssertionError(f"marker {node.name} was not lowered")
        # A model may have collectives of its own.
        if node.target in _KINDS and PLANNED in node.meta:
            _verify_wait(node)
            launched.append((_KINDS[node.target], _full_bytes(node)))
    if launched != planned:
        raise AssertionError(f"planned {planned}, but the graph launches {launched}")


def _verify_wait(node: fx.Node) -> None:
    waits = [user for user in node.users if user.target is _c10d.wait_tensor.default]
    if len(waits) != 1 or len(node.users) != 1:
        raise AssertionError(f"{node.name} is waited for {len(waits)} times")


def _full_bytes(node: fx.Node) -> int:
    """Bytes of the gathered output, or of a reduction's input."""
    full: Any = node if _KINDS[node.target] == ALL_GATHER else node.args[0]
    return int(full.meta["val"].nbytes)
