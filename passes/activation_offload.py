"""Forward and backward graphs: offload saved activations to host memory.

    forward   a = gelu(..)   b = mm(a, ..)   ..       return loss, a
    becomes   a = gelu(..)   b = mm(a, ..)   h = offload_activation(a)   ..   return loss, h

    backward  ..   c = mm(a, ..)                             a: an input
    becomes   ..   a = reload_activation(h)   c = mm(a, ..)

The planner chooses the activations, given the steps between which each is unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

from graphshard.ops import markers
from graphshard.ops.emitter import Emitter
from graphshard.ops.marker_specs import OffloadSpec, ReloadSpec
from graphshard.ops.nodes import num_bytes, outputs_of, root_of, users_through_views, value_of
from graphshard.passes.saved import replace_saved, saved_nodes
from graphshard.planning.offload import SavedActivation

MIN_BYTES = 1 << 16
"""Size of the smallest activation that is worth a copy."""


def offloadable(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> dict[fx.Node, fx.Node]:
    """Return the saved activations whose memory is free after their last use in forward.

    Args:
        num_outputs: number of user outputs of the forward graph; its other outputs are saved.

    Returns:
        The forward node that is saved for each placeholder of the backward graph.
    """
    # Number of outputs, by the node that owns their memory.
    num_returned: Counter[fx.Node] = Counter()
    for node in outputs_of(forward):
        if isinstance(node, fx.Node):
            num_returned[root_of(node)] += 1
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    pairs = {}
    for node in saved_nodes(forward, num_outputs):
        if num_returned[root_of(node)] > 1 or not _is_large(node):
            continue
        placeholder = placeholders[node.name]
        if placeholder.users:
            pairs[placeholder] = node
    return pairs


def _is_large(node: fx.Node) -> bool:
    """Return whether a saved node is an activation worth a copy."""
    root, value = root_of(node), node.meta.get("val")
    if root.op == "placeholder" or root.target in (*markers.MARKERS, markers.secondary_shard):
        return False
    if not isinstance(value, torch.Tensor):
        return False
    is_expanded = 0 in value.stride()  # takes less memory than its size suggests
    return not is_expanded and num_bytes(value) >= MIN_BYTES


def describe_saved(
    pairs: Mapping[fx.Node, fx.Node],
    forward_step: Mapping[fx.Node, int],
    backward_step: Mapping[fx.Node, int],
) -> list[SavedActivation]:
    """Describe the activations of ``offloadable`` for the planner.

    Args:
        forward_step: step of each node of the forward graph.
        backward_step: step of each node of the backward graph.
    """
    descriptions = []
    for placeholder, saved in pairs.items():
        backward_steps = [backward_step[node] for node in users_through_views(placeholder)] or [0]
        descriptions.append(
            SavedActivation(
                num_bytes=num_bytes(value_of(saved)),
                last=max(
                    forward_step[node] for node in (saved, *users_through_views(root_of(saved)))
                ),
                first=min(backward_steps),
                until=max(backward_steps),
            )
        )
    return descriptions


def offload(
    forward: fx.Graph, pairs: Mapping[fx.Node, fx.Node], num_outputs: int, host_memory: str
) -> None:
    """Move activations to host memory, in both graphs, in place.

    Args:
        pairs: subset of ``offloadable``.
    """
    offloaded: dict[fx.Node, fx.Node] = {}
    output = forward.output_node()
    for placeholder, saved in pairs.items():
        device = value_of(saved).device
        with forward.inserting_before(output):
            emit = Emitter(forward, saved.meta)
            copied = OffloadSpec(activation=saved, host_memory=host_memory).call(emit)
        offloaded[saved] = copied
        placeholder.meta = {**placeholder.meta, "val": copied.meta["val"]}
        placeholder.meta.pop("tensor_meta", None)
        users = list(placeholder.users)
        with placeholder.graph.inserting_before(min(users)):
            emit = Emitter(placeholder.graph, placeholder.meta)
            reloaded = ReloadSpec(offloaded=placeholder, device=device).call(emit)
        for user in users:
            user.replace_input_with(placeholder, reloaded)
    replace_saved(forward, offloaded, num_outputs)
