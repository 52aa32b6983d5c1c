"""Boundaries of regions: values that a region does not return, and that users recompute.

A compiler assumes that the results of a subgraph call own their memory. A region therefore returns
no view of its inputs or of its other results; users make the view themselves. Without regions,
Inductor keeps some pointwise values out of memory: every kernel that reads one recomputes it. If
such a value is at least as large as the values that it is computed from, regions do not return it.

    before   region a: h = mm(..)   f = h.float()   m = f.mean()   v = h.t()
             region b: f - m   mm(v, ..)
    after    region a: h = mm(..)   f = h.float()   m = f.mean()
             region b: f = h.float()   f - m   v = h.t()   mm(v, ..)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from graphshard._torch.tensors import (
    OpOverload,
    has_lazy_bits,
    returns_nothing,
    writes_arguments,
)
from graphshard.cost.fusion import GraphValues, unmaterialized_values
from graphshard.ops.nodes import is_random, is_view

_NAMESPACES = ("aten", "prims", "graphshard")


def is_pure(node: fx.Node) -> bool:
    """Return whether a node calls an op of ``_NAMESPACES`` that only computes tensors."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace not in _NAMESPACES:
        return False
    return not (writes_arguments(op) or returns_nothing(op)) and _has_tensors(node.meta.get("val"))


def _has_tensors(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(part is None or isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)


def _is_view(node: fx.Node) -> bool:
    """Return whether a node's value shares memory with the value that it is computed from."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]  # the tuple's node
    return is_view(node) or node.target is torch.ops.aten._unsafe_view.default


def _is_constant(node: fx.Node) -> bool:
    """Return whether a node takes no inputs and makes the same tensor every time."""
    if node.op != "call_function" or node.all_input_nodes:
        return False
    return is_pure(node) and not is_random(node)


def _is_lazy(node: fx.Node) -> bool:
    """Return whether a node is a view that is lazily conjugated or negated."""
    # Each user makes its own, because calls of regions cannot take such tensors.
    return node.op == "call_function" and _is_view(node) and has_lazy_bits(node.meta.get("val"))


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node calls a pointwise op that draws no random numbers."""
    tags = getattr(node.target, "tags", ())  # only operators have tags
    return torch.Tag.pointwise in tags and not is_random(node)


def _as_large_as_sources(graph: fx.Graph) -> set[fx.Node]:
    """Return the pointwise values to recompute: at least as large as their sources together.

    Includes only values that Inductor would recompute in every kernel that reads them. Excludes
    random values, and values computed from memory that the graph writes to.
    """
    values = GraphValues(graph)
    # Memory that changes: recomputing a value from it might give another result.
    written = {
        values.roots[argument]
        for node in graph.nodes
        if writes_arguments(node.target)
        for argument in node.all_input_nodes
    }
    reads: dict[fx.Node, frozenset[fx.Node]] = {}
    inlined = unmaterialized_values(values).inlined  # all others are in memory anyway
    for node in filter(inlined.__contains__, graph.nodes):
        roots = [values.roots[source] for source in node.all_input_nodes]
        read = frozenset[fx.Node]().union(*(reads.get(root, {root}) for root in roots))
        is_large = sum(values.num_bytes[root] for root in read) <= values.num_bytes[node]
        if is_pointwise(node) and is_large and read.isdisjoint(written):
            reads[node] = read
    return set(reads)


def recompute_at_users(graph: fx.Graph, runs: Sequence[list[fx.Node]]) -> list[list[fx.Node]]:
    """Make users outside a run recompute values that its region does not return.

    Returns:
        The nodes of each run in graph order, including new copies and excluding erased nodes.
    """
    home = {node: i for i, run in enumerate(runs) for node in run}
    recomputation = _Recomputation(graph, home)
    for node in list(graph.nodes):
        own = {used: recomputation.copy_for(node, used) for used in node.all_input_nodes}
        if any(used is not copy for used, copy in own.items()):
            # All at once: see ``replace_in_output``.
            node.args = fx.map_arg(node.args, own.__getitem__)
            node.kwargs = fx.map_arg(node.kwargs, own.__getitem__)
    for node in reversed(graph.nodes):
        if not node.users and recomputation.may_be_copied(node):
            home.pop(node, None)
            graph.erase_node(node)
    nodes: list[list[fx.Node]] = [[] for _ in runs]
    for node in graph.nodes:
        if node in home:
            nodes[home[node]].append(node)
    return nodes


class _Recomputation:
    """Copies of nodes that their users recompute, because no region returns them.

    Constants are copied into every region that uses them.

    Args:
        home: region of each node that is in one; copies are added.
    """

    def __init__(self, graph: fx.Graph, home: dict[fx.Node, int]) -> None:
        self._graph, self._home = graph, home
        self._recomputed = _as_large_as_sources(graph)
        self._copies: dict[tuple[int | None, fx.Node], fx.Node] = {}

    def copy_for(self, user: fx.Node, used: fx.Node) -> fx.Node:
        """Return the node for ``user`` to read: ``used``, or a copy shared within its region."""
        place = self._home.get(user)
        if not self._is_needed(used, place):
            return used
        key = place, used
        if key not in self._copies:
            sources = {source: self.copy_for(user, source) for source in used.all_input_nodes}
            with self._graph.inserting_before(user):
                copy = self._graph.node_copy(used, sources.__getitem__)
            self._copies[key] = copy
            if place is not None:
                self._home[copy] = place
        return self._copies[key]

    def may_be_copied(self, node: fx.Node) -> bool:
        is_not_returned = _is_view(node) or node in self._recomputed
        return _is_constant(node) or _is_lazy(node) or (node in self._home and is_not_returned)

    def _is_needed(self, used: fx.Node, place: int | None) -> bool:
        if used not in self._home:  # a constant or a lazy view
            return place is not None and self.may_be_copied(used)
        return self.may_be_copied(used) and self._home[used] != place
