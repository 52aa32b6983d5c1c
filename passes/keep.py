"""Forward and backward graph: a gathered parameter is saved for backward in place of its shard.

forward   w = unshard(shard)   ..   return loss, shard         backward   w = unshard(shard)  ..
after     w = unshard(shard)   ..   return loss, w             after      w: an input         ..
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from graphshard.ops import change, unshard
from graphshard.wires import unpack


def keepable(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> dict[fx.Node, fx.Node]:
    """By marker of the backward graph, that of the same parameter in the forward graph.

    Args:
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
    """
    outputs: Any = forward.output_node().args[0]
    saved = {node.name: node for node in outputs[num_outputs:] if isinstance(node, fx.Node)}
    gathered = {m.args[0]: m for m in forward.find_nodes(op="call_function", target=unshard)}
    found = {}
    for marker in backward.find_nodes(op="call_function", target=unshard):
        shard: Any = marker.args[0]
        if len(shard.users) == 1 and saved.get(shard.name) in gathered:
            found[marker] = gathered[saved[shard.name]]
    return found


def keep(
    forward: fx.Graph, backward: fx.Graph, pairs: Mapping[fx.Node, fx.Node], num_outputs: int
) -> None:
    """Do not gather again what the markers of ``pairs`` do, some of ``keepable``, in place."""
    output = forward.output_node()
    outputs: Any = output.args[0]
    saved = {gathered.args[0]: gathered for gathered in pairs.values()}
    outputs = [*outputs[:num_outputs], *(saved.get(node, node) for node in outputs[num_outputs:])]
    output.args = (tuple(outputs),)
    for marker, gathered in pairs.items():
        change(gathered, reshard=False)
        shard: Any = marker.args[0]
        shard.meta = {**shard.meta, "val": marker.meta["val"]}
        marker.replace_all_uses_with(shard)
        marker.graph.erase_node(marker)
    for scales in backward.find_nodes(op="call_function", target=unpack):
        if not scales.users:
            backward.erase_node(scales)
