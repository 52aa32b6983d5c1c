"""Forward graph: save mutated inputs as they were before forward wrote to them.

The partitioner saves an input from which backward recomputes something, even if forward writes to
it in between, as it does to a running average in a buffer. Backward would read the new value: a
wrong gradient without an error if Inductor's graph writes the input, and an autograd error if
AOTAutograd does (torch 2.11 to 2.13, pytorch/pytorch#197039).

    y = x + average; average.copy_(new)
    saved before   x, average                saved after   x, clone(average)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphshard._torch.aot_graphs import mutated_inputs
from graphshard.ops.emitter import Emitter
from graphshard.ops.nodes import root_of
from graphshard.passes.saved import replace_saved, saved_nodes


def clone_mutated_inputs(forward: fx.Graph, num_outputs: int) -> None:
    """Save clones of the inputs that a forward graph writes to, and views of these, in place.

    Args:
        num_outputs: number of user outputs of the graph.
    """
    written = mutated_inputs(forward)
    saved = [node for node in saved_nodes(forward, num_outputs) if root_of(node) in written]
    copies = {root: _copied(root) for root in dict.fromkeys(map(root_of, saved))}
    replace_saved(forward, {node: _as_view(node, copies) for node in saved}, num_outputs)


def _copied(node: fx.Node) -> fx.Node:
    """Return a clone of an input, made before anything is written."""
    inputs = node.graph.find_nodes(op="placeholder")
    with node.graph.inserting_after(inputs[-1]):
        return Emitter(node.graph, node.meta)(torch.ops.aten.clone.default, node)


def _as_view(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Apply the view ``node`` to the clone of its root.

    Backward expects a view with the strides of ``node``.
    """
    if node in copies:
        return copies[node]
    view: Any = node.target
    source: Any = node.args[0]
    with node.graph.inserting_after(node):
        emit = Emitter(node.graph, node.meta)
        return emit(view, _as_view(source, copies), *node.args[1:], **node.kwargs)
