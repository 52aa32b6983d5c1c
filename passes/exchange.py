"""Joint graphs: send gradients in their own dtype, and sum them in a wider one on the receiver.

    before   shard = reduce_grad(grad16, .., fp32)         cast, reduce_scatter in fp32
    after    shard = reduce_grad(grad16, .., fp32, True)   all_to_all in bf16, sum in fp32

The summed values are the same; only their order differs from that of a ring reduce-scatter.
"""

from __future__ import annotations

from torch import fx

from graphshard.ops.marker_specs import ReduceGradSpec
from graphshard.ops.markers import change, reduce_grad
from graphshard.passes.contract import PassContext


def exchange_gradients(gm: fx.GraphModule, context: PassContext) -> None:
    """Mark the reductions of gradients that are narrower than their reduction dtype, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=reduce_grad):
        if ReduceGradSpec.of_node(node).is_narrow:
            change(node, exchange=True)
