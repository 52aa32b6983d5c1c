"""Forward and backward graphs: save more of a gathered parameter for backward than its shard.

``keep`` saves all of it. ``keep_secondary_shards`` saves a larger part, so that few ranks together
hold the whole parameter (hpZ):

    forward   w = unshard(shard)   y = mm(x, w)   ..                return loss, shard
    all       w = unshard(shard)   y = mm(x, w)   ..                return loss, w
    part      w = unshard(shard)   p = secondary_shard(w)   ..      return loss, p

    backward  w = unshard(shard)  ..         all   w: an input  ..         part   w = unshard(p)  ..
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphshard._torch.tensors import size_hint
from graphshard.ops.bucket_copy import copy_out
from graphshard.ops.collectives import span_of
from graphshard.ops.emitter import Emitter
from graphshard.ops.marker_specs import UnshardSpec
from graphshard.ops.markers import change, secondary_shard, unshard
from graphshard.ops.nodes import (
    HELD_BYTES,
    num_bytes,
    outputs_of,
    root_of,
    users_through_views,
    value_of,
)
from graphshard.passes.describe import source_of
from graphshard.passes.saved import replace_saved, saved_nodes


def regathered_params(
    forward: fx.Graph, backward: fx.Graph, num_outputs: int
) -> dict[fx.Node, fx.Node]:
    """Return the ``unshard`` markers of parameters that both graphs gather.

    Args:
        num_outputs: number of user outputs of the forward graph; its other outputs are saved.

    Returns:
        The marker in the forward graph, by marker in the backward graph.
    """
    saved = {node.name: node for node in saved_nodes(forward, num_outputs)}
    gathered = {m.args[0]: m for m in forward.find_nodes(op="call_function", target=unshard)}
    pairs = {}
    for marker in backward.find_nodes(op="call_function", target=unshard):
        shard = source_of(marker)
        if len(shard.users) == 1 and saved.get(shard.name) in gathered:
            pairs[marker] = gathered[saved[shard.name]]
    return pairs


def keep(
    forward: fx.Graph, backward: fx.Graph, pairs: Mapping[fx.Node, fx.Node], num_outputs: int
) -> None:
    """Save full parameters instead of their shards, in place.

    Args:
        pairs: subset of ``regathered_params``.
    """
    saved = {source_of(gathered): gathered for gathered in pairs.values()}
    replace_saved(forward, saved, num_outputs)
    for marker, gathered in pairs.items():
        change(gathered, regather_group=None)
        shard = source_of(marker)
        held = {HELD_BYTES: _gathered_bytes(gathered)}
        shard.meta = {**shard.meta, **held, "val": marker.meta["val"]}
        marker.replace_all_uses_with(shard)
        marker.graph.erase_node(marker)
    _drop_unused_scales(backward)


def note_held_bytes(forward: fx.Graph, backward: fx.Graph) -> None:
    """Note the memory of the gathered parameters that forward already saves.

    Forward saves a view without the padding, so the backward graph does not show its full memory.
    """
    saved = {node.name: node for node in outputs_of(forward) if isinstance(node, fx.Node)}
    for placeholder in backward.find_nodes(op="placeholder"):
        node = saved.get(placeholder.name)
        if node is not None and (gathered := root_of(node)).target is unshard:
            placeholder.meta[HELD_BYTES] = _gathered_bytes(gathered)


def _gathered_bytes(gathered: fx.Node) -> int:
    """Return the bytes of a gathered parameter, padding included."""
    spec, full = UnshardSpec.of_node(gathered), value_of(gathered)
    rows = span_of(spec.group).world * size_hint(value_of(source_of(gathered)).shape[0])
    return num_bytes(full) // max(size_hint(full.shape[0]), 1) * rows


def keep_secondary_shards(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
    """Save secondary shards of the parameters that backward gathers from another group, in place.

    Args:
        num_outputs: number of user outputs of the forward graph; its other outputs are saved.
    """
    saved: dict[fx.Node, fx.Node] = {}
    position = {node: i for i, node in enumerate(forward.nodes)}
    for marker, gathered in regathered_params(forward, backward, num_outputs).items():
        spec = UnshardSpec.of_node(marker)
        if spec.regather_group in (None, spec.group):
            continue
        users = users_through_views(gathered) or [gathered]  # no uses if it is only returned
        with forward.inserting_after(min(users, key=position.__getitem__)):
            emit = Emitter(forward, gathered.meta)
            secondary = emit(secondary_shard, gathered, spec.regather_group)
        saved[source_of(gathered)] = secondary
        shard = source_of(marker)
        held = {HELD_BYTES: num_bytes(value_of(secondary))}
        shard.meta = {**shard.meta, **held, "val": secondary.meta["val"]}
        change(
            marker, group=spec.regather_group, dtype=None, scales=None, scale_index=0, device=None
        )
    replace_saved(forward, saved, num_outputs)
    _drop_unused_scales(backward)


def _drop_unused_scales(backward: fx.Graph) -> None:
    """Erase the scales that no gather uses any more."""
    for scales in backward.find_nodes(op="call_function", target=copy_out):
        if not scales.users:
            backward.erase_node(scales)
