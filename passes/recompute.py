"""Joint graph: make the set of parameters that backward gathers independent of batch sizes.

With an activation budget, the partitioner chooses by size what to recompute, and ranks may have
batches of different sizes. If only one rank recomputed ``y``, that rank alone would gather the bias
in backward. So:

- Vectors are kept unsharded, even if backward itself needs them: whether it does may depend on
  sizes, too.
- A larger parameter that backward would gather only for recomputation, such as an embedding or the
  first layer's weight, is not gathered in backward: the results of all its users are saved.

What a checkpointed region recomputes is the user's choice, and the same on all ranks.

    y = addmm(unshard(bias), x, w); z = gelu(y)
    saved before   x, or y                    saved after   x, unshard(bias), or y
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard._torch.aot_graphs import is_tangent
from graphshard._torch.inductor import has_activation_budget
from graphshard.ops.markers import change, unshard
from graphshard.ops.nodes import value_of
from graphshard.passes.reshard import param_derived


def fix_backward_gathers(gm: fx.GraphModule, *, ranks_differ: bool) -> None:
    """Make backward's gathers independent of sizes, in place, if there is an activation budget.

    Args:
        ranks_differ: whether another rank may have an activation budget although this one has none.
    """
    if not (ranks_differ or has_activation_budget()):
        return
    sources, backward = _sources(gm.graph), _backward(gm.graph)
    needed = {marker for node in backward for marker in _read(node, sources)}
    markers = {node for node in sources if node.target is unshard}
    vectors = {marker for marker in markers if value_of(marker).dim() < 2}
    for marker in vectors:
        change(marker, regather_group=None)
    for node in gm.graph.nodes:
        forward = node.op == "call_function" and node not in sources and node not in backward
        reads = _read(node, sources) & (markers - vectors - needed)
        if forward and reads and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _sources(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return the markers of the parameters that each parameter-derived node depends on."""
    sources: dict[fx.Node, set[fx.Node]] = {}
    for node in param_derived(graph):
        sources[node] = {node} if node.target is unshard else _read(node, sources)
    return sources


def _read(node: fx.Node, sources: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Return the markers of the parameters that a node reads."""
    return {marker for n in node.all_input_nodes for marker in sources.get(n, ())}


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on the gradient of an output."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and any(
            n in backward or is_tangent(n) for n in node.all_input_nodes
        ):
            backward.add(node)
    return backward
