"""Forward and backward graph: more of a gathered parameter is saved for backward than its shard: all of
it (``keep``), or so large a part that few ranks together have it all (``keep_parts``).

    forward   w = unshard(shard)   y = mm(x, w)   ..   return loss, shard
    keep                                               return loss, w
    parts                          p = own_part(w)     return loss, p

    backward  w = unshard(shard)  ..         keep   w: an input  ..         parts   w = unshard(p)  ..
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from graphshard.ops.bucket_copy import unpack
from graphshard.ops.emitter import Emitter
from graphshard.ops.markers import arguments, change, secondary_shard, unshard
from graphshard.ops.nodes import uses


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
    saved = {gathered.args[0]: gathered for gathered in pairs.values()}
    _save(forward, saved, num_outputs)
    for marker, gathered in pairs.items():
        change(gathered, regather="")
        shard: Any = marker.args[0]
        shard.meta = {**shard.meta, "val": marker.meta["val"]}
        marker.replace_all_uses_with(shard)
        marker.graph.erase_node(marker)
    _drop_scales(backward)


def keep_parts(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
    """Gather from another group in backward where that is asked for, in place."""
    saved: dict[Any, fx.Node] = {}
    position = {node: i for i, node in enumerate(forward.nodes)}
    for marker, gathered in keepable(forward, backward, num_outputs).items():
        few = arguments(marker)["regather"]
        if few in ("", arguments(marker)["group"]):
            continue
        users = uses(gathered) or [gathered]  # or it is returned alone
        with forward.inserting_after(min(users, key=position.__getitem__)):
            emit = Emitter(forward, gathered.meta)
            part = saved[gathered.args[0]] = emit(secondary_shard, gathered, few)
        shard: Any = marker.args[0]
        shard.meta = {**shard.meta, "val": part.meta["val"]}
        change(marker, group=few, dtype=None, scales=None, at=0, device=None)
    _save(forward, saved, num_outputs)
    _drop_scales(backward)


def _save(forward: fx.Graph, saved: Mapping[Any, fx.Node], num_outputs: int) -> None:
    """Return other nodes for backward."""
    output = forward.output_node()
    outputs: Any = output.args[0]
    outputs = [*outputs[:num_outputs], *(saved.get(node, node) for node in outputs[num_outputs:])]
    output.args = (tuple(outputs),)


def _drop_scales(backward: fx.Graph) -> None:
    for scales in backward.find_nodes(op="call_function", target=unpack):
        if not scales.users:
            backward.erase_node(scales)
