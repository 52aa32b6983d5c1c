"""Joint and final graphs: gather and reduce each parameter once, however often it is used.

Tied weights, and modules that are called twice, read their parameter several times:

    before   a = unshard(p)   b = unshard(p)   ...   g = add(reduce_grad(da), reduce_grad(db))
    after    a = unshard(p)                    ...   g = reduce_grad(add(da, db))

Gradients accumulated over earlier microbatches (``add_accumulated``) are added to the sum once.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx

from graphshard.ops.bucket_copy import add_accumulated
from graphshard.ops.markers import REDUCE_MARKERS, UNSHARD_MARKERS, change, read
from graphshard.passes.contract import PassContext
from graphshard.passes.describe import source_of

_add = torch.ops.aten.add.Tensor


def merge_markers(gm: fx.GraphModule, context: PassContext) -> None:
    """Merge equal unshard markers, and reductions whose results are added, in place."""
    _merge_unshards(gm.graph)
    _merge_reductions(gm.graph)


def _merge_unshards(graph: fx.Graph) -> None:
    first_of: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target not in UNSHARD_MARKERS:
            continue
        spec = read(node)
        # Only autograd uses accumulators, and it has run already.
        if any(getattr(spec, name) is not None for name in spec.accumulators):
            change(node, **dict.fromkeys(spec.accumulators))
        first = first_of.setdefault((node.target, *node.args), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _merge_reductions(graph: fx.Graph) -> None:
    # In graph order, so a chain of additions is folded from its start.
    for node in list(graph.nodes):
        if node.target is not _add or node.kwargs or len(node.args) != 2:
            continue
        left, right = node.args
        if not (_is_reduction(left) and _is_reduction(right)) or left.args[1:] != right.args[1:]:
            continue
        if left.target is not right.target or len(left.users) > 1 or len(right.users) > 1:
            continue
        _merge_two(graph, node, left, right)


def _merge_two(graph: fx.Graph, addition: fx.Node, left: fx.Node, right: fx.Node) -> None:
    (left_grad, left_total), (right_grad, right_total) = _grad_of(left), _grad_of(right)
    accumulated = left_total or right_total
    with graph.inserting_before(addition):
        total = graph.call_function(_add, (left_grad, right_grad))
        total.meta = {**addition.meta, "val": left_grad.meta["val"]}
        if accumulated is not None:
            total = graph.call_function(add_accumulated, (total, *accumulated.args[1:]))
            total.meta = dict(accumulated.meta)
        op: Any = left.target
        reduced = graph.call_function(op, (total, *left.args[1:]))
    reduced.meta = dict(addition.meta)
    addition.replace_all_uses_with(reduced)
    for node in (addition, left, right):
        graph.erase_node(node)


def _grad_of(reduction: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return this microbatch's gradient, and the node that adds accumulated totals, if any."""
    grad = source_of(reduction)
    return (source_of(grad), grad) if grad.target is add_accumulated else (grad, None)


def _is_reduction(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target in REDUCE_MARKERS
