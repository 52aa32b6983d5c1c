"""Forward, backward and inference graphs: move nodes to where the planner expects them.

    before   w = unshard(..)   v = unshard(..)   t = v.t()   a = x @ w   b = a.relu()   c = b @ t
    after    w = unshard(..)   a = x @ w   b = a.relu()   v = unshard(..)   t = v.t()   c = b @ t

Operators without a fake value get one, or None if they return nothing.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx

from graphshard._torch.aot_graphs import outputs_of
from graphshard._torch.tensors import fake_mode_of, returns_nothing
from graphshard.ops import markers
from graphshard.ops.bucket_copy import copy_out
from graphshard.ops.nodes import is_view, root_of
from graphshard.passes.contract import PassContext


def normalize(gm: fx.GraphModule, context: PassContext) -> None:
    """Bring a graph into the form that ``build_problem`` reads, in place."""
    graph = gm.graph
    _raise_inputs(graph)
    _raise_scales(graph)
    _raise_returned_views(graph)
    _sink_gathered(graph)
    _fill_values(graph)


def _raise_inputs(graph: fx.Graph) -> None:
    first = next(iter(graph.nodes))  # Inductor creates the tokens of effects before the inputs
    if first.op != "placeholder":
        for node in graph.find_nodes(op="placeholder"):
            first.prepend(node)


def _raise_scales(graph: fx.Graph) -> None:
    """Move copy-outs of saved scales to the front, before all gathers."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="call_function", target=copy_out):
        if node.args[0].op == "placeholder":
            first.prepend(node)


def _raise_returned_views(graph: fx.Graph) -> None:
    """Move returned views right after the node that computes their memory."""
    # Inductor then computes the value in the layout that the views need. If another kernel read the
    # value first, Inductor would write it twice.
    for node in outputs_of(graph):
        if not isinstance(node, fx.Node) or _is_gathered(node):
            continue
        if root_of(node).op == "call_function":
            _raise_view(node)


def _raise_view(node: fx.Node) -> None:
    if is_view(node) and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        _raise_view(source)
        if source.next is not node:
            source.append(node)


def _sink_gathered(graph: fx.Graph) -> None:
    """Move gathered parameters, reloaded activations and their views right before first use."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    anchor: dict[fx.Node, fx.Node] = {}  # the unmoved node that each moved node precedes
    front: dict[fx.Node, fx.Node] = {}  # the first node moved before each anchor
    for node in reversed(list(position)):
        if node.users and _is_gathered(node):
            first_user = min(node.users, key=position.__getitem__)
            target = anchor[node] = anchor.get(first_user, first_user)
            # Nodes moved before one node keep their order, in which each precedes its users.
            front.get(target, target).prepend(node)
            front[target] = node
            position[node] = position[target]


def _is_gathered(node: fx.Node) -> bool:
    return root_of(node).target in (*markers.UNSHARD_MARKERS, markers.reload_activation)


def _fill_values(graph: fx.Graph) -> None:
    """Compute missing fake values of nodes, from which times and bytes are derived."""
    # AOTAutograd sets no value for operators that it wraps to set the state of a random generator,
    # or that return nothing, such as ``torch.cuda.synchronize()``.
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = None if returns_nothing(node.target) else _value(node)


def _value(node: fx.Node) -> Any:
    arguments: Any = (node.args, node.kwargs)
    args, kwargs = fx.map_arg(arguments, _value_or_subgraph)
    target: Any = node.target
    with fake_mode_of(other.meta.get("val") for other in node.graph.nodes):
        return target(*args, **kwargs)


def _value_or_subgraph(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta.get("val")
