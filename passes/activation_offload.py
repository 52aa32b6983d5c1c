"""Forward and backward graph: activations that are saved for backward wait for it in the host's memory.

    forward   a = gelu(..)   b = mm(a, ..)   ..       return loss, a
    becomes   a = gelu(..)   b = mm(a, ..)   h = stow(a)   ..   return loss, h

    backward  ..   c = mm(a, ..)              a: an input
    becomes   ..   a = fetch(h)   c = mm(a, ..)

Which of them is decided outside, by the steps between which each is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphshard.ops import markers
from graphshard.ops.emitter import Emitter
from graphshard.ops.nodes import is_view, num_bytes, root_of, uses
from graphshard.planning.activation_offload import SavedActivation

LEAST_BYTES = 1 << 16
"""What is smaller is not worth a copy."""


def stowable(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> dict[fx.Node, fx.Node]:
    """By placeholder of the backward graph, the forward's node that is saved for it, of activations
    whose memory nothing else needs behind their last use in forward. If that is a view, it moves to what
    it is a view of.

    Args:
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
    """
    outputs: Any = forward.output_node().args[0]
    holders: dict[fx.Node, int] = {}
    for node in outputs:
        if isinstance(node, fx.Node):
            root = root_of(node)
            holders[root] = holders.get(root, 0) + 1
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    found = {}
    for node in outputs[num_outputs:]:
        if not isinstance(node, fx.Node) or holders[root_of(node)] > 1 or not _is_large(node):
            continue
        placeholder = placeholders[node.name]
        if placeholder.users:
            found[placeholder] = node
            _raise_view(node)
    return found


def _raise_view(node: fx.Node) -> None:
    if is_view(node) and len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        _raise_view(source)
        source.append(node)


def _is_large(node: fx.Node) -> bool:
    root, value = root_of(node), node.meta.get("val")
    if (
        root.op == "placeholder"
        or root.target in markers.MARKERS
        or root.target is markers.secondary_shard
    ):
        return False
    if (
        not isinstance(value, torch.Tensor) or 0 in value.stride()
    ):  # an expanded one is less than that
        return False
    return num_bytes(value) >= LEAST_BYTES


def describe_saved(
    pairs: Mapping[fx.Node, fx.Node],
    forward_step: Callable[[fx.Node], int],
    backward_step: Callable[[fx.Node], int],
) -> list[SavedActivation]:
    """Of ``stowable``; functions give the step that a node is in."""
    found = []
    for placeholder, saved in pairs.items():
        last = max(map(forward_step, (saved, *uses(root_of(saved)))))
        steps = [backward_step(node) for node in uses(placeholder)] or [0]
        found.append(SavedActivation(num_bytes(saved.meta["val"]), last, min(steps), max(steps)))
    return found


def stow(forward: fx.Graph, pairs: Mapping[fx.Node, fx.Node], num_outputs: int, host: str) -> None:
    """Move what ``pairs`` name, some of ``stowable``, out of the device's memory, in place."""
    moved: dict[Any, fx.Node] = {}
    output = forward.output_node()
    for placeholder, saved in pairs.items():
        device = saved.meta["val"].device
        with forward.inserting_before(output):
            moved[saved] = Emitter(forward, saved.meta)(markers.offload_activation, saved, host)
        placeholder.meta = {**placeholder.meta, "val": moved[saved].meta["val"]}
        placeholder.meta.pop("tensor_meta", None)
        users = list(placeholder.users)
        with placeholder.graph.inserting_before(min(users)):
            back = Emitter(placeholder.graph, placeholder.meta)(
                markers.reload_activation, placeholder, device
            )
        for user in users:
            user.replace_input_with(placeholder, back)
    outputs: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    rest = [moved.get(node, node) for node in outputs[num_outputs:]]
    output.args = ((*outputs[:num_outputs], *rest),)
