"""Joint graph: replace calls of shared layers with the nodes of their own joint graphs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphshard._torch.inductor import SEEDED
from graphshard._torch.recompute import REGION
from graphshard._torch.tensors import FakeTensor, on_storage, size_expr, storage_of, tree_map
from graphshard.ops.nodes import erase_unused, replace_by_results
from graphshard.passes.contract import PassContext
from graphshard.passes.layers import INVOKE, SHARED_LAYER


class LayersDiffer(Exception):
    """Raised if AOTAutograd's graphs of a shared layer cannot be inlined."""


def keep_calls(gm: fx.GraphModule) -> bool:
    """Inline the shared layers now, unless all calls of subgraphs can be kept for later.

    Calls can be kept if they are all calls of shared layers without random seeds.

    Returns:
        Whether the calls were kept, for ``inline_layers``.

    Raises:
        LayersDiffer: a call cannot be inlined, as in ``inline_layers``.
    """
    calls = _calls(gm)
    shared = list(filter(_is_shared, calls))
    # If a layer with random seeds were inlined later, its copies would have equal seed nodes, which
    # the partitioner would merge.
    if calls and shared == calls and not _are_seeded(gm, calls):
        return True
    _inline_calls(gm, shared)
    return False


def _are_seeded(gm: fx.GraphModule, calls: Sequence[Any]) -> bool:
    graphs = {getattr(gm, call.args[0].target).graph for call in calls}
    return any(
        getattr(node.target, "overloadpacket", None) in SEEDED
        for graph in graphs
        for node in graph.nodes
    )


def inline_layers(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace calls of shared layers with copies of their nodes, in place.

    Raises:
        LayersDiffer: a call cannot be inlined; the layers must be inlined before AOTAutograd.
    """
    _inline_calls(gm, list(filter(_is_shared, _calls(gm))))


def check_inlined(gm: fx.GraphModule) -> None:
    """Check that no calls of shared layers are left.

    Raises:
        LayersDiffer: some are left, because AOTAutograd traced an inference graph.
    """
    # Of all calls, also of those through ``with_effects(token, invoke_subgraph, ..)``.
    arguments = (argument for node in gm.graph.nodes for argument in node.args)
    if any(isinstance(argument, str) and SHARED_LAYER in argument for argument in arguments):
        raise LayersDiffer("AOTAutograd traced no joint graph, in which layers are inlined")


def _inline_calls(gm: fx.GraphModule, calls: Sequence[Any]) -> None:
    if not calls:
        return
    forwards = {call.args[2:]: call for call in calls if not _is_backward(call)}
    # A backward call takes its forward call's arguments, then the gradient of the output.
    backwards = {call.args[2:-1]: call for call in calls if _is_backward(call)}
    if len(forwards) + len(backwards) < len(calls) or not backwards.keys() <= forwards.keys():
        raise LayersDiffer("forward and backward calls of a layer cannot be paired by arguments")
    order = {forward: 2 * i + 1 for i, forward in enumerate(forwards.values())}
    _order_regions(gm.graph, order)
    before = itertools.takewhile(lambda node: node not in order, gm.graph.nodes)
    values = {node: node.meta.get("val") for node in before}
    sizes = {size_expr(v): node for node, v in values.items() if isinstance(v, torch.SymInt)}
    for arguments, forward in forwards.items():
        _inline(gm, forward, backwards.get(arguments, forward), order[forward], sizes)
    _number_regions(gm.graph)
    erase_unused(gm.graph)


def _calls(gm: fx.GraphModule) -> list[Any]:
    return gm.graph.find_nodes(op="call_function", target=INVOKE)


def _is_shared(call: Any) -> bool:
    return SHARED_LAYER in call.args[1]


def _order_regions(graph: fx.Graph, order: Mapping[fx.Node, int]) -> None:
    """Prefix the numbers of checkpoints outside layers, to sort them between the calls.

    The prefix is 0 before the first call, then the preceding call's ``order`` plus 1.
    """
    latest = 0
    for node in graph.nodes:
        latest = order.get(node, latest - 1) + 1
        if REGION in node.meta:
            node.meta[REGION] = latest, node.meta[REGION]


def _number_regions(graph: fx.Graph) -> None:
    """Renumber the checkpoints in order, which gives each copy of a layer its own numbers."""
    nodes = [node for node in graph.nodes if REGION in node.meta]
    order = sorted({node.meta[REGION] for node in nodes})
    number = {key: i for i, key in enumerate(order, 1)}
    for node in nodes:
        node.meta[REGION] = number[node.meta[REGION]]


def _is_backward(call: fx.Node) -> bool:
    name: Any = call.args[1]  # AOTAutograd adds "fw_" or "bw_"
    return bool(name.startswith("bw_"))


def _inline(
    gm: fx.GraphModule, forward: fx.Node, backward: fx.Node, order: int, sizes: dict[Any, fx.Node]
) -> None:
    """Inline a layer's forward and backward calls, or its only call if both are the same node.

    Args:
        order: prefix for the numbers of the layer's checkpoints.
        sizes: nodes of symbolic sizes before ``forward``, keyed by expression; the sizes that the
            layer's forward computes are added.
    """
    # The backward call's graph is the layer's joint graph: it returns gradients, then the output.
    target: Any = backward.args[0]
    joint = getattr(gm, target.target).graph
    inputs = joint.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, backward.args[2:], strict=True))
    storages = {
        storage_of(n.meta["val"]): copies[n].meta["val"].untyped_storage()
        for n in inputs
        if isinstance(n.meta["val"], torch.Tensor)
    }
    late = {inputs[-1]} if backward is not forward else set()  # backward's nodes
    for node in joint.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or "val" not in node.meta:
            raise LayersDiffer(
                f"a node of a layer is not a call or has no fake value: {node.format_node()}"
            )
        value = node.meta["val"]
        size = size_expr(value) if isinstance(value, torch.SymInt) else None
        if size in sizes:
            copies[node] = sizes[size]
            continue
        # Nodes that Inductor's passes add have no tag.
        tag = node.meta.get("partitioner_tag")
        is_backward = tag == "is_backward" or not late.isdisjoint(node.all_input_nodes)
        if is_backward:
            late.add(node)
        with gm.graph.inserting_before(backward if is_backward else forward):
            copies[node] = gm.graph.node_copy(node, copies.__getitem__)
        if size is not None and not is_backward:
            sizes[size] = copies[node]
        if REGION in node.meta:
            copies[node].meta[REGION] = order, node.meta[REGION]
        copies[node].meta["val"] = tree_map(
            lambda v: on_storage(v, storages) if isinstance(v, FakeTensor) else v, value
        )
    results: Any = joint.output_node().args[0]
    *gradients, output = [n if n is None else copies[n] for n in results]
    if backward is not forward:
        replace_by_results(backward, gradients)
    replace_by_results(forward, [output])
