"""Joint graph: the partitioner saves nothing for backward that only parameters determine (ZeRO-3).

The partitioner would save gathered parameters, or casts and transposes of them, and training
would silently be ZeRO-2. Every node that is derived from unsharded parameters alone is marked for
recomputation, so the backward graph starts from the shards and gathers again:

    saved before   unshard(p), t(unshard(p))          saved after   p
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ops.marker_specs import UnshardSpec
from graphshard.ops.markers import UNSHARD_MARKERS, replicate, unshard


def parameter_derived(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that parameters, sizes and constants alone determine and that are not kept.

    A size of the batch, to which a parameter may be expanded, is a number that backward has, too.
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
    """Return whether an ``unshard`` marker's parameter stays gathered for backward."""
    return UnshardSpec.of_node(marker).regather_group is None


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def reshard(gm: fx.GraphModule) -> None:
    """Tag a joint graph for the partitioner, in place."""
    for node in gm.graph.nodes:
        if node.target is unshard and _is_kept(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in parameter_derived(gm.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        # Without its region the partitioner does not save it at a checkpointed region's border.
        node.meta.pop("ac_graph_id", None)
