"""Traced graph: replace sparse gradients of embeddings with dense ones, which can be reduced.

    before   w = unshard(p)   y = embedding(ids, w, .., sparse=True)
    after    w = unshard(p)   y = embedding(ids, w, .., sparse=False)

The values are the same: a sparse gradient has only the rows that were looked up, a dense one has
the zero rows as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from graphshard.ops.nodes import graph_modules

_POSITIONS: dict[Callable[..., Any], tuple[int, int]] = {
    F.embedding: (1, 6),
    F.embedding_bag: (1, 7),
    torch.embedding: (0, 4),
    torch.embedding_bag: (0, 5),
}
"""Positions of the arguments ``weight`` and ``sparse``."""


def use_dense_gradients(gm: fx.GraphModule) -> None:
    """Make embeddings in a graph and its subgraphs return dense gradients, in place."""
    for part in graph_modules(gm):
        lookups = [node for node in part.graph.nodes if node.target in _POSITIONS]
        for node in lookups:
            _use_dense(node)
        if lookups:
            part.recompile()


def _use_dense(node: fx.Node) -> None:
    position, position_of_sparse = _POSITIONS[node.target]  # type: ignore[index]  # a function
    weight: Any = node.args[position] if len(node.args) > position else node.kwargs["weight"]
    if weight.op == "placeholder":  # not sharded: nothing reduces its gradient
        return
    if len(node.args) > position_of_sparse:
        node.update_arg(position_of_sparse, False)
    elif "sparse" in node.kwargs:
        node.update_kwarg("sparse", False)
