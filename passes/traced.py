"""Traced graph: read parameters at the top level, and request dense gradients.

Parameters that are read inside a subgraph would be gathered there, outside any plan.

``torch.cond``, ``while_loop``, ``scan``, ``associative_scan``, ``map`` and ``flex_attention`` stay
in the graph, with their bodies. How often a body runs can depend on values and sizes. If these
differ between ranks, gathers of different parameters would be paired, so reads are moved out:

    before   y = cond(pred, true, false, (x, shard))
             true:   w = unshard(p)   return (x @ w,)
    after    w = unshard(shard)   y = cond(pred, true, false, (x, w))
             true:   return (x @ p,)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from graphshard._torch.tensors import HigherOrderOperator, traced_storage
from graphshard.ops.markers import UNSHARD_MARKERS
from graphshard.ops.nodes import graph_modules, replace_by_results
from graphshard.passes.contract import PassContext
from graphshard.passes.layers import INVOKE

# Operators that AOTAutograd leaves in the graph; it traces through all others.
_STAYING = (
    torch.ops.higher_order.cond,
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.scan,
    torch.ops.higher_order.associative_scan,
    torch.ops.higher_order.map_impl,
    torch.ops.higher_order.flex_attention,
)

# Positions of the arguments ``weight`` and ``sparse``.
_SPARSE_POSITIONS: dict[Callable[..., Any], tuple[int, int]] = {
    F.embedding: (1, 6),
    F.embedding_bag: (1, 7),
    torch.embedding: (0, 4),
    torch.embedding_bag: (0, 5),
}


def inline_regions(gm: fx.GraphModule, context: PassContext) -> None:
    """Inline ``nested_compile_region`` regions and shared layers, recursively and in place."""
    # Dynamo still traces a region marked with ``torch.compiler.nested_compile_region`` only once
    # for all calls, and ``SchedulePolicy(regions=...)`` compiles equal layers once.
    #
    #     before   r = invoke_subgraph(code, "code", x, p)   y = r[0]   z = y + x
    #              code:   a = unshard(p)   b = x @ a   return (b,)
    #     after    a = unshard(p)   b = x @ a   z = b + x
    _inline_regions(gm, _staying(gm))


def _inline_regions(gm: fx.GraphModule, staying: Container[fx.GraphModule]) -> None:
    for call, bodies in _calls(gm):
        for body in bodies:
            _inline_regions(body, staying)
        if call.target is INVOKE:
            # Hoist before copying: the copies share the bodies of the region's operators, but read
            # other parameters.
            _hoist(bodies[0], staying)
            _inline(gm, call, bodies[0])


def _inline(gm: fx.GraphModule, call: fx.Node, code: fx.GraphModule) -> None:
    target, _, *arguments = call.args
    assert isinstance(target, fx.Node)
    inputs = code.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
    with gm.graph.inserting_before(call):
        results: Any = gm.graph.graph_copy(code.graph, copies)
    for node in code.graph.find_nodes(op="get_attr"):
        copies[node].target = f"{target.target}.{node.target}"
    replace_by_results(call, results)
    if not target.users:
        gm.graph.erase_node(target)


def hoist_reads(gm: fx.GraphModule, context: PassContext) -> None:
    """Move reads of parameters out of the bodies of ``_STAYING`` operators, in place."""
    _hoist(gm, _staying(gm))


def _hoist(gm: fx.GraphModule, staying: Container[fx.GraphModule]) -> None:
    for call, bodies in _calls(gm):
        for body in bodies:
            _hoist(body, staying)
        # Nothing traces through operators inside a body that stays.
        if call.target in _STAYING or gm in staying:
            _read_before(call, bodies)


def _staying(gm: fx.GraphModule) -> set[fx.GraphModule]:
    """Return the bodies of ``_STAYING`` operators, and the graphs inside them."""
    calls = [call for part in graph_modules(gm) for call in _calls(part)]
    bodies = [body for call, bodies in calls if call.target in _STAYING for body in bodies]
    return {part for body in bodies for part in graph_modules(body)}


def _calls(gm: fx.GraphModule) -> list[tuple[fx.Node, list[fx.GraphModule]]]:
    """Return the calls of higher-order operators in a graph, each with its bodies."""
    calls = [node for node in gm.graph.nodes if isinstance(node.target, HigherOrderOperator)]
    return [(call, _bodies(gm, call)) for call in calls]


def _bodies(gm: fx.GraphModule, call: fx.Node) -> list[fx.GraphModule]:
    named = (attrgetter(str(n.target)) for n in call.all_input_nodes if n.op == "get_attr")
    return [value for get in named if isinstance(value := get(gm), fx.GraphModule)]


def _read_before(call: fx.Node, bodies: Sequence[fx.GraphModule]) -> None:
    outer = {traced_storage(node): node for node in call.all_input_nodes}
    reads = [n for body in bodies for n in body.graph.nodes if n.target in UNSHARD_MARKERS]
    shards = {read: outer[traced_storage(read.args[0])] for read in reads}
    full: dict[fx.Node, fx.Node] = {}  # keyed by shard
    for read, shard in shards.items():
        if shard not in full:
            with call.graph.inserting_before(call):
                full[shard] = call.graph.node_copy(read, lambda n: outer[traced_storage(n)])
        _use_input(read)
    for shard, whole in full.items():
        call.replace_input_with(shard, whole)


def _use_input(read: fx.Node) -> None:
    """Replace a read with the body's input, which was the shard and is now the full parameter."""
    inside = read.args[0]
    assert isinstance(inside, fx.Node)
    # Not changed in place, because the branches of torch.cond share the dictionary.
    inside.meta = {**inside.meta, "example_value": read.meta["example_value"]}
    read.replace_all_uses_with(inside)
    read.graph.erase_node(read)


def use_dense_gradients(gm: fx.GraphModule, context: PassContext) -> None:
    """Set ``sparse=False`` on embeddings of sharded weights, in place."""
    # Reductions require dense gradients. A body's placeholder may be a full parameter, moved there
    # by ``hoist_reads``; its storage is then not among ``inputs``.
    inputs = set(map(traced_storage, gm.graph.find_nodes(op="placeholder")))
    for part in graph_modules(gm):
        for node in part.graph.nodes:
            if node.target in _SPARSE_POSITIONS:
                _use_dense(node, inputs)


def _use_dense(node: fx.Node, inputs: Container[int | None]) -> None:
    weight_position, position = _SPARSE_POSITIONS[node.target]  # type: ignore[index]  # a function
    has_weight = len(node.args) > weight_position
    weight: Any = node.args[weight_position] if has_weight else node.kwargs["weight"]
    if weight.op == "placeholder" and traced_storage(weight) in inputs:
        return  # not sharded: nothing reduces its gradient
    # The values are the same: a dense gradient also stores the zero rows.
    if len(node.args) > position:
        node.update_arg(position, False)
    elif "sparse" in node.kwargs:
        node.update_kwarg("sparse", False)
