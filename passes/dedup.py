"""Joint graph: one gather and one reduction for each parameter, however often it is used.

Tied weights and modules called twice read their parameter several times:

    before   a = unshard(p)   b = unshard(p)   ...   g = add(reduce_grad(da), reduce_grad(db))
    after    a = unshard(p)                    ...   g = reduce_grad(add(da, db))

A sum of earlier gradients (``add_sums``) is added to their total, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphshard.ops.accumulators import ACCUMULATOR_NAMES
from graphshard.ops.bucket_copy import add_sums
from graphshard.ops.markers import REDUCE, UNSHARD, arguments, change

_add = torch.ops.aten.add.Tensor


def merge(gm: fx.GraphModule) -> None:
    """Merge equal markers of a joint graph, in place."""
    merge_unshards(gm.graph)
    _merge_reductions(gm.graph)


def merge_unshards(graph: fx.Graph) -> None:
    """One gather for each parameter; also for the graph of an inference, which has no joint one.

    Where gradients add up does not matter to a gather, once it is differentiated.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in UNSHARD:
            sums = [name for name in ACCUMULATOR_NAMES if arguments(node).get(name) is not None]
            if sums:
                change(node, **dict.fromkeys(sums))
            kept = first.setdefault((node.target, *node.args), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


def _merge_reductions(graph: fx.Graph) -> None:
    # In graph order, so that a chain of additions folds from its start.
    for node in list(graph.nodes):
        if node.target is not _add or node.kwargs or len(node.args) != 2:
            continue
        left, right = node.args
        if not (_is_reduction(left) and _is_reduction(right)) or left.args[1:] != right.args[1:]:
            continue
        if left.target is not right.target or len(left.users) > 1 or len(right.users) > 1:
            continue
        grads, sums = zip(_split(left), _split(right))
        summed = next((full for full in sums if full is not None), None)
        with graph.inserting_before(node):
            total = graph.call_function(_add, grads)
            total.meta = {**node.meta, "val": grads[0].meta["val"]}
            if summed is not None:
                total = graph.call_function(add_sums, (total, *summed.args[1:]))
                total.meta = dict(summed.meta)
            reduced = graph.call_function(left.target, (total, *left.args[1:]))
        reduced.meta = dict(node.meta)
        node.replace_all_uses_with(reduced)
        for gone in (node, left, right):
            graph.erase_node(gone)
    graph.eliminate_dead_code()


def _split(reduction: fx.Node) -> tuple[Any, Any]:
    """The gradient that is reduced, and what adds a sum to it before, or None."""
    full: Any = reduction.args[0]
    return (full.args[0], full) if full.target is add_sums else (full, None)


def _is_reduction(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target in REDUCE
