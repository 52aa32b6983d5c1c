"""Outputs of a forward graph that are saved for backward; they follow the user's outputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphshard.ops.nodes import outputs_of


def saved_nodes(forward: fx.Graph, num_outputs: int) -> list[fx.Node]:
    """Return the nodes that a forward graph saves.

    Args:
        num_outputs: number of user outputs of the graph.
    """
    return [node for node in outputs_of(forward)[num_outputs:] if isinstance(node, fx.Node)]


def replace_saved(
    forward: fx.Graph, replacements: Mapping[fx.Node, fx.Node], num_outputs: int
) -> None:
    """Replace nodes that a forward graph saves, in place.

    Args:
        replacements: node to save instead, by saved node.
        num_outputs: number of user outputs of the graph.
    """
    outputs = outputs_of(forward)
    saved = [
        replacements.get(node, node) if isinstance(node, fx.Node) else node
        for node in outputs[num_outputs:]
    ]
    forward.output_node().args = ((*outputs[:num_outputs], *saved),)
