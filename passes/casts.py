"""Joint and inference graph: a parameter that is only used in a narrower dtype travels in it.

Autocast and hand-written casts work on full parameters; a cast of every shard is the same, bitwise:

    before   w = unshard(p)   c = convert(w, bf16)   y = mm(x, c)   ..   reduce_grad(convert(g, fp32))
    after    c = unshard(p, dtype=bf16)              y = mm(x, c)   ..   reduce_grad(g, reduce=fp32)

Where uses differ, the parameter travels as it is, and its plan says why. A gradient is still reduced
in the dtype that it was cast to, unless ``reduce_dtype`` says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphshard.ops import markers
from graphshard.ops.float8_math import convert
from graphshard.ops.nodes import REASON

_to_copy = torch.ops.aten._to_copy.default


def cast_early(gm: fx.GraphModule) -> None:
    """Move casts of a joint graph in front of gathers and into reductions, in place."""
    cast_before_gather(gm.graph)
    for node in list(gm.graph.nodes):
        if node.target in markers.REDUCE:
            _cast_in_reduction(node)
    gm.graph.eliminate_dead_code()


def cast_before_gather(graph: fx.Graph) -> None:
    """Gather what all uses cast to, where that is narrower."""
    for node in list(graph.nodes):
        if node.target not in markers.UNSHARD or not node.users:
            continue
        value = node.meta["val"]
        if not value.is_floating_point():
            continue
        dtypes = [_cast_to(user) for user in node.users]
        narrow = [d for d in dtypes if d is not None and d.itemsize < value.dtype.itemsize]
        if not narrow:
            continue
        if len({*dtypes}) > 1:
            used = sorted({str(dtype or value.dtype) for dtype in dtypes})
            node.meta[REASON] = f"travels as {value.dtype}: used as {' and '.join(used)}"
            continue
        markers.change(node, dtype=narrow[0])
        for user in list(node.users):
            user.replace_all_uses_with(node)
            graph.erase_node(user)


def _cast_to(node: fx.Node) -> torch.dtype | None:
    """The floating dtype that a node does nothing else than cast to."""
    dtype: Any = None
    if node.target is convert:
        dtype = node.args[1]
    elif node.target is _to_copy and [k for k, v in node.kwargs.items() if v is not None] == [
        "dtype"
    ]:
        dtype = node.kwargs["dtype"]
    return dtype if dtype is not None and dtype.is_floating_point else None


def _cast_in_reduction(node: fx.Node) -> None:
    """Leave out an upcast of what is reduced: it is exact, and made where the bucket is packed."""
    upcast: Any = node.args[0]
    dtype = _cast_to(upcast)
    if dtype is None:
        return
    source = upcast.args[0]
    if source.meta["val"].dtype.itemsize < dtype.itemsize:
        reduce_dtype = markers.arguments(node)["reduce_dtype"] or dtype
        markers.change(node, grad=source, reduce_dtype=reduce_dtype)
