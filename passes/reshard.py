"""Joint graph: gather parameters again in backward instead of saving them (ZeRO-3).

The partitioner would save gathered parameters, or casts and transposes of them, and training would
silently be ZeRO-2. Therefore every node derived from parameters alone is tagged for recomputation:

    saved before   unshard(p), t(unshard(p))          saved after   p
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard._torch.aot_graphs import is_tangent
from graphshard._torch.inductor import has_activation_budget
from graphshard._torch.recompute import REGION
from graphshard.cost.fusion import NodeKind, node_kind
from graphshard.ops.marker_specs import UnshardSpec
from graphshard.ops.markers import UNSHARD_MARKERS, change, replicate, unshard
from graphshard.ops.nodes import is_random, value_of
from graphshard.passes.contract import PassContext

_aten = torch.ops.aten
_LOOKUPS = (
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.gather.default,
    _aten.embedding.default,
)


def param_derived(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes computed from parameters, and otherwise only from sizes and constants.

    Excludes random nodes, and nodes computed from a parameter that stays unsharded until backward.
    """
    derived: dict[fx.Node, None] = {}
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        # A parameter may be expanded to the size of a batch, which backward also has.
        if isinstance(node.meta.get("val"), torch.SymInt):
            constant.add(node)
        if node in constant or node.op != "call_function" or is_random(node):
            continue
        if node.target in UNSHARD_MARKERS:
            if node.target is replicate or not _is_kept(node):
                derived[node] = None
            continue
        inputs = node.all_input_nodes
        if all(n in constant for n in inputs):
            constant.add(node)
        elif all(n in derived or n in constant for n in inputs):
            derived[node] = None
    return list(derived)


def _is_kept(marker: fx.Node) -> bool:
    return UnshardSpec.of_node(marker).regather_group is None


def fix_backward_gathers(gm: fx.GraphModule, context: PassContext) -> None:
    """Make backward's gathers independent of sizes, which may differ between ranks."""
    # The partitioner chooses by size what to recompute. If only one rank recomputed ``h``, that
    # rank alone would gather the table in backward:
    #
    #     h = unshard(table)[ids]; z = gelu(h)
    #     saved before   ids, or h                  saved after   h
    sources, backward = _sources(gm.graph), _backward(gm.graph)
    needed = {marker for node in backward for marker in _read(node, sources)}
    markers = {node for node in sources if node.target is unshard}
    vectors = {marker for marker in markers if value_of(marker).dim() < 2}
    # With an activation budget, sizes also decide whether products are recomputed, which read a
    # bias. Keep all vectors, even those that backward itself needs: its needs may depend on sizes.
    #
    #     y = addmm(unshard(bias), x, w); z = gelu(y)
    #     saved before   x, or y                    saved after   x, unshard(bias), or y
    shrunk: set[fx.Node] = set()
    if context.ranks_differ or has_activation_budget():
        for marker in vectors:
            change(marker, regather_group=None)
    else:  # sizes decide about lookups, but not about elementwise operators, such as adding a bias
        vectors -= {m for n in gm.graph.nodes if n.target in _LOOKUPS for m in _read(n, sources)}
        # They do decide about results that are smaller than their inputs. For up to four rows, the
        # partitioner would recompute ``y``, and gather the bias in backward:
        #
        #     y = (x + unshard(bias)).mean(0); z = sin(y)
        #     saved before   x, or y                        saved after   y
        shrunk = _shrunk(gm.graph, sources, vectors - needed)
    # If backward would gather a parameter only to recompute, such as a table, save the results of
    # all its users instead.
    only_recomputed = markers - vectors - needed
    for node in gm.graph.nodes:
        forward = node.op == "call_function" and node not in sources and node not in backward
        reads = _read(node, sources) & only_recomputed
        # An existing tag is from a checkpointed region: the user's choice, the same on all ranks.
        if forward and (reads or node in shrunk) and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _shrunk(
    graph: fx.Graph, sources: dict[fx.Node, set[fx.Node]], vectors: set[fx.Node]
) -> set[fx.Node]:
    """Return the reductions and lookups of values computed elementwise from ``vectors``."""
    shrunk: set[fx.Node] = set()
    elementwise: set[fx.Node] = set()
    for node in graph.nodes:
        reads = _read(node, sources) & vectors or not elementwise.isdisjoint(node.all_input_nodes)
        if node in sources or not reads:
            continue
        kind = node_kind(node)
        if kind == NodeKind.REDUCTION or node.target in _LOOKUPS:
            shrunk.add(node)
        elif kind in (NodeKind.VIEW, NodeKind.POINTWISE):
            elementwise.add(node)
    return shrunk


def _sources(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return the markers of the parameters that each parameter-derived node depends on."""
    sources: dict[fx.Node, set[fx.Node]] = {}
    for node in param_derived(graph):
        sources[node] = {node} if node.target is unshard else _read(node, sources)
    return sources


def _read(node: fx.Node, sources: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    return {marker for n in node.all_input_nodes for marker in sources.get(n, ())}


def _backward(graph: fx.Graph) -> set[fx.Node]:
    backward: set[fx.Node] = set()  # nodes that depend on the gradient of an output
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and any(n in backward or is_tangent(n) for n in inputs):
            backward.add(node)
    return backward


def reshard(gm: fx.GraphModule, context: PassContext) -> None:
    """Tag, in place, the nodes that the partitioner must recompute or, if kept unsharded, save."""
    for node in gm.graph.nodes:
        if node.target is unshard and _is_kept(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in param_derived(gm.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        # With this tag, the partitioner would save the node at the boundary of a checkpoint.
        node.meta.pop(REGION, None)
