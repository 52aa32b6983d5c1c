"""Joint graph: nothing that only parameters determine is saved for backward (ZeRO-3).

The partitioner would save gathered parameters, or casts and transposes of them, and the result
would silently be ZeRO-2. Every node that is derived from unsharded parameters alone is marked for
recomputation, so the backward graph starts from the shards and gathers again:

    saved before   unshard(p), t(unshard(p))          saved after   p
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ops.markers import UNSHARD, arguments, replicate, unshard


def parameter_derived(graph: fx.Graph) -> list[fx.Node]:
    """Nodes computed from parameters alone (with constants) that are not to be kept, in order."""
    derived: dict[fx.Node, None] = {}
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or _is_random(node):
            continue
        if node.target in UNSHARD:
            if node.target is replicate or arguments(node)["regather"]:
                derived[node] = None
            continue
        inputs = node.all_input_nodes
        if all(n in constant for n in inputs):
            constant.add(node)
        elif all(n in derived or n in constant for n in inputs):
            derived[node] = None
    return list(derived)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def reshard(gm: fx.GraphModule) -> None:
    """Tag a joint graph for the partitioner, in place."""
    for node in gm.graph.nodes:
        if node.target is unshard and not arguments(node)["regather"]:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in parameter_derived(gm.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        # Without its region the partitioner does not save it at a checkpointed region's border.
        node.meta.pop("ac_graph_id", None)
