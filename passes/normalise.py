"""Forward, backward and inference graph: nodes move to where they matter, and all have a value.

Inputs come first. Gathered parameters, and views of them, move to their first use; tracing left
them higher up. Views that the graph returns move behind what they are views of: Inductor lays that
out as they need it, where it would write it twice if another kernel had read it before. Scales of
fp8 weights that are inputs move to the front, as a gather can begin behind its scale:

    before   w = unshard(..)   v = unshard(..)   t = v.t()   a = x @ w   b = a.relu()   c = b @ t
    after    w = unshard(..)   a = x @ w   b = a.relu()   v = unshard(..)   t = v.t()   c = b @ t
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx

from graphshard._torch.tensors import fake_mode_of, returns_nothing
from graphshard.ops import markers
from graphshard.ops.bucket_copy import copy_out
from graphshard.ops.nodes import is_view, outputs_of, root_of


def normalise(graph: fx.Graph) -> None:
    """Bring a graph into the form that ``build_problem`` reads, in place."""
    _raise_inputs(graph)
    _raise_scales(graph)
    _raise_returned_views(graph)
    _sink_gathered(graph)
    _fill_values(graph)


def _raise_inputs(graph: fx.Graph) -> None:
    """Move all inputs to the front; Inductor makes tokens of effects before them."""
    first = next(iter(graph.nodes))
    if first.op != "placeholder":
        for node in graph.find_nodes(op="placeholder"):
            first.prepend(node)


def _raise_scales(graph: fx.Graph) -> None:
    """Move to the front the scales of gathered parameters that forward saved."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="call_function", target=copy_out):
        if node.args[0].op == "placeholder":
            first.prepend(node)


def _raise_returned_views(graph: fx.Graph) -> None:
    """Move views that a graph returns behind what computes their memory."""
    for node in outputs_of(graph):
        if not isinstance(node, fx.Node) or _is_gathered(node):
            continue
        if root_of(node).op == "call_function":
            _raise_view(node)


def _raise_view(node: fx.Node) -> None:
    """Move a view, and those that it is a view of, behind the node that owns their memory."""
    if is_view(node) and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        _raise_view(source)
        if source.next is not node:
            source.append(node)


def _sink_gathered(graph: fx.Graph) -> None:
    """Move every gathered parameter, and views of it, in front of its first use."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    last_moved: dict[fx.Node, fx.Node] = {}  # by node, the one that was moved in front of it last
    for node in reversed(list(position)):
        if node.users and _is_gathered(node):
            first_user = min(node.users, key=position.__getitem__)
            last_moved.get(first_user, first_user).prepend(node)
            last_moved[first_user] = node
            position[node] = position[first_user]


def _is_gathered(node: fx.Node) -> bool:
    return root_of(node).target in (*markers.UNSHARD_MARKERS, markers.reload_activation)


def _fill_values(graph: fx.Graph) -> None:
    """Give a fake value to nodes without one, so that their time and bytes are counted.

    AOTAutograd leaves it out where it wraps an operator in the state of a random generator, and of
    operators that return nothing (``torch.cuda.synchronize()`` is one in a graph).
    """
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = None if returns_nothing(node.target) else _value(node)


def _value(node: fx.Node) -> Any:
    """Compute the fake value of a node, which may have no tensors among its arguments."""
    arguments: Any = (node.args, node.kwargs)
    args, kwargs = fx.map_arg(arguments, _value_or_subgraph)
    target: Any = node.target
    with fake_mode_of(other.meta.get("val") for other in node.graph.nodes):
        return target(*args, **kwargs)


def _value_or_subgraph(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta.get("val")
