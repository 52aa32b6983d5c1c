"""Traced graph: embeddings that ask for sparse gradients get dense ones, which can be reduced.

    before   w = unshard(p)   y = embedding(ids, w, .., sparse=True)
    after    w = unshard(p)   y = embedding(ids, w, .., sparse=False)

The numbers are the same: a sparse gradient has the rows that were looked up, a dense one also those
that are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_POSITION_OF_SPARSE: dict[Callable[..., Any], int] = {
    F.embedding: 6,
    F.embedding_bag: 7,
    torch.embedding: 4,
    torch.embedding_bag: 5,
}


def ask_for_dense_gradients(gm: fx.GraphModule) -> None:
    """Have embeddings of a graph, and of graphs in it, return dense gradients, in place."""
    for graph_module in gm.modules():
        if isinstance(graph_module, fx.GraphModule):
            for op, position in _POSITION_OF_SPARSE.items():
                for node in graph_module.graph.find_nodes(op="call_function", target=op):
                    _ask_for_dense(node, position)
            graph_module.recompile()


def _ask_for_dense(node: fx.Node, position: int) -> None:
    if len(node.args) > position:
        node.update_arg(position, False)
    elif "sparse" in node.kwargs:
        node.update_kwarg("sparse", False)
