"""Joint and inference graphs: gather a parameter in the narrower dtype that all uses cast it to.

Autocast and hand-written casts apply to full parameters. Casting the shards before the gather gives
the same bits:

    before   w = unshard(p)   c = convert(w, bf16)   y = mm(x, c)   reduce_grad(convert(g, fp32))
    after    c = unshard(p, dtype=bf16)              y = mm(x, c)   reduce_grad(g, .., fp32)

If uses differ in dtype, the parameter is gathered in its own dtype, and the plan records why. A
gradient is still reduced in the dtype that it was cast to, unless ``reduce_dtype`` overrides it.
"""

from __future__ import annotations

import torch
from torch import fx

from graphshard.ops import markers
from graphshard.ops.float8_math import convert
from graphshard.ops.marker_specs import AllReduceGradSpec, ReduceGradSpec
from graphshard.ops.nodes import REASON, value_of
from graphshard.passes.contract import PassContext
from graphshard.passes.describe import source_of

_to_copy = torch.ops.aten._to_copy.default


def cast_before_gather(gm: fx.GraphModule, context: PassContext) -> None:
    """Move casts before gathers and into reductions, in place."""
    for node in list(gm.graph.nodes):
        if node.target in markers.UNSHARD_MARKERS and value_of(node).is_floating_point():
            _gather_narrower(node)
        elif node.target in markers.REDUCE_MARKERS:
            _cast_in_reduction(node)


def _gather_narrower(node: fx.Node) -> None:
    own = value_of(node).dtype
    dtypes = [_cast_to(user) for user in node.users]
    narrow = [dtype for dtype in dtypes if dtype is not None and dtype.itemsize < own.itemsize]
    if not narrow:
        return
    if len({*dtypes}) > 1:
        used = sorted({str(dtype or own) for dtype in dtypes})
        node.meta[REASON] = f"travels as {own}: used as {' and '.join(used)}"
        return
    markers.change(node, dtype=narrow[0])
    for user in list(node.users):
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)


def _cast_to(node: fx.Node) -> torch.dtype | None:
    """Return the floating dtype that a node casts to, or None if the node is not just a cast."""
    dtype: object = None
    if node.target is convert:
        dtype = node.args[1]
    elif node.target is _to_copy:
        options = {name: value for name, value in node.kwargs.items() if value is not None}
        dtype = options["dtype"] if options.keys() == {"dtype"} else None
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _cast_in_reduction(node: fx.Node) -> None:
    spec = markers.read(node)
    assert isinstance(spec, ReduceGradSpec | AllReduceGradSpec)
    upcast = source_of(node)
    dtype = _cast_to(upcast)
    if dtype is None:
        return
    grad = source_of(upcast)
    # An upcast is exact, and the copy-in of the gradient's bucket casts anyway. Gradients never
    # travel in fp8, which gloo cannot send and no backend can sum.
    if 1 < value_of(grad).dtype.itemsize < dtype.itemsize:
        markers.change(node, grad=grad, reduce_dtype=spec.reduce_dtype or dtype)
