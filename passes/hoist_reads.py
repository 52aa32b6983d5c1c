"""Traced graph: read parameters before higher-order operators instead of inside their bodies.

``torch.cond``, ``while_loop``, ``scan``, ``associative_scan``, ``map`` and ``flex_attention`` stay
in the graph, with their bodies. A parameter that is read in a body would be gathered in the body,
outside of any plan, and as often as values and sizes dictate. Ranks with different values would
then pair the gathers of different parameters.

    before   y = cond(pred, true, false, (x, shard))
             true:   w = unshard(p)   return (x @ w,)
    after    w = unshard(shard)   y = cond(pred, true, false, (x, w))
             true:   return (x @ p,)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from graphshard._torch.tensors import HigherOrderOperator, traced_storage
from graphshard.ops.markers import UNSHARD_MARKERS

_STAYING = (
    torch.ops.higher_order.cond,
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.scan,
    torch.ops.higher_order.associative_scan,
    torch.ops.higher_order.map_impl,
    torch.ops.higher_order.flex_attention,
)
"""Operators that AOTAutograd leaves in the graph; it traces through all others."""


def hoist_reads(gm: fx.GraphModule) -> None:
    """Move reads of parameters out of the bodies of higher-order operators, in place."""
    _hoist(gm, out_of_all=False)


def _hoist(gm: fx.GraphModule, out_of_all: bool) -> None:
    """Move reads out of the operators of ``gm``, innermost first.

    Args:
        out_of_all: whether to include operators that AOTAutograd would trace through; True inside a
            body that stays.
    """
    changed, modules = False, dict(gm.named_modules())
    for call in gm.graph.nodes:
        if isinstance(call.target, HigherOrderOperator):
            is_left = out_of_all or call.target in _STAYING
            bodies = _bodies(modules, call)
            for body in bodies:
                _hoist(body, is_left)
            if is_left:
                changed |= _read_before(call, bodies)
    if changed:
        gm.recompile()


def _bodies(modules: Mapping[str, nn.Module], call: fx.Node) -> list[fx.GraphModule]:
    """Return the bodies of a higher-order operator's call, from ``modules`` by name."""
    bodies = [modules.get(str(n.target)) for n in call.all_input_nodes if n.op == "get_attr"]
    return [module for module in bodies if isinstance(module, fx.GraphModule)]


def _read_before(call: fx.Node, bodies: Sequence[fx.GraphModule]) -> bool:
    """Pass full parameters to ``call`` if its bodies read them from shards.

    Returns:
        Whether its bodies read any.
    """
    outer = {traced_storage(node): node for node in call.all_input_nodes}
    reads = [n for body in bodies for n in body.graph.nodes if n.target in UNSHARD_MARKERS]
    shards = {read: outer[traced_storage(read.args[0])] for read in reads}
    full: dict[fx.Node, fx.Node] = {}  # by shard
    for read, shard in shards.items():
        if shard not in full:
            with call.graph.inserting_before(call):
                full[shard] = call.graph.node_copy(read, lambda n: outer[traced_storage(n)])
        _use_input(read)
    for shard, whole in full.items():
        call.replace_input_with(shard, whole)
    for body in bodies:
        body.recompile()
    return bool(full)


def _use_input(read: fx.Node) -> None:
    """Replace a read with the body's input, which was the shard and is now the full parameter."""
    inside = read.args[0]
    assert isinstance(inside, fx.Node)
    # Not changed in place, because the branches of torch.cond share the dictionary.
    inside.meta = {**inside.meta, "example_value": read.meta["example_value"]}
    read.replace_all_uses_with(inside)
    read.graph.erase_node(read)
