"""The outputs of a forward graph that are saved for backward, behind those of the user."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphshard.ops.nodes import outputs_of


def saved_nodes(forward: fx.Graph, num_outputs: int) -> list[fx.Node]:
    """The nodes that a forward graph saves.

    Args:
        num_outputs: how many of its outputs are the user's.
    """
    return [node for node in outputs_of(forward)[num_outputs:] if isinstance(node, fx.Node)]


def replace_saved(
    forward: fx.Graph, replacements: Mapping[fx.Node, fx.Node], num_outputs: int
) -> None:
    """Save other nodes than the forward graph does, in place.

    Args:
        replacements: by saved node, the one to save.
        num_outputs: how many of the graph's outputs are the user's.
    """
    outputs = outputs_of(forward)
    saved = [
        replacements.get(node, node) if isinstance(node, fx.Node) else node
        for node in outputs[num_outputs:]
    ]
    forward.output_node().args = ((*outputs[:num_outputs], *saved),)
