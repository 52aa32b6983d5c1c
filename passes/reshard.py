"""Joint graph: save nothing for backward that depends on parameters alone (ZeRO-3).

Otherwise the partitioner would save gathered parameters, or casts and transposes of them, and
training would silently be ZeRO-2. Every node derived from unsharded parameters alone is tagged for
recomputation, so the backward graph starts from the shards and gathers again:

    saved before   unshard(p), t(unshard(p))          saved after   p
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ops.marker_specs import UnshardSpec
from graphshard.ops.markers import UNSHARD_MARKERS, replicate, unshard


def param_derived(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that depend on parameters, sizes and constants alone, and are not kept.

    Batch sizes, to which a parameter may be expanded, count as constants: backward has them, too.
    """
    derived: dict[fx.Node, None] = {}
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            constant.add(node)
        if node in constant or node.op != "call_function" or _is_random(node):
            continue
        if node.target in UNSHARD_MARKERS:
            if node.target is replicate or not _is_kept(node):
                derived[node] = None
            continue
        inputs = node.all_input_nodes
        if all(n in constant for n in inputs):
            constant.add(node)
        elif all(n in derived or n in constant for n in inputs):
            derived[node] = None
    return list(derived)


def _is_kept(marker: fx.Node) -> bool:
    """Return whether the parameter of an ``unshard`` marker stays gathered for backward."""
    return UnshardSpec.of_node(marker).regather_group is None


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def reshard(gm: fx.GraphModule) -> None:
    """Tag the nodes of a joint graph for the partitioner, in place."""
    for node in gm.graph.nodes:
        if node.target is unshard and _is_kept(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in param_derived(gm.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        # With this tag, the partitioner would save the node at the border of a checkpointed region.
        node.meta.pop("ac_graph_id", None)
