"""Borders of regions: what a region returns, and what others make again for themselves.

    before   region a: h = mm(..)   v = h.t()     region b: mm(v, ..)
    after    region a: h = mm(..)                 region b: v = h.t()   mm(v, ..)

A compiler takes what a call of a subgraph returns for memory of its own. So a region returns no
view, neither of what it is given nor of what else it returns: whoever uses a view makes it of the
value itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphshard._torch.tensors import OpOverload, returns_nothing, writes_arguments

_NAMESPACES = ("aten", "prims", "graphshard")


def is_pure(node: fx.Node) -> bool:
    """Return whether a node calls an operator that does nothing but return tensors."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace not in _NAMESPACES:
        return False
    return not (writes_arguments(op) or returns_nothing(op)) and _has_tensors(node.meta.get("val"))


def _has_tensors(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(part is None or isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)


def _is_view(node: fx.Node) -> bool:
    """Return whether a node's value is memory of another node's."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]  # of a tuple's node
    op: Any = node.target
    return getattr(op, "is_view", False) or op is torch.ops.aten._unsafe_view.default


def _is_constant(node: fx.Node) -> bool:
    """Return whether a node makes the same tensor always: it costs nothing to make it anew."""
    op = node.target
    is_random = isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
    made = node.op == "call_function" and not node.all_input_nodes
    return made and not is_random and is_pure(node)


def with_own_views(graph: fx.Graph, runs: Sequence[list[fx.Node]]) -> list[list[fx.Node]]:
    """Have everybody make the views that he uses of a region.

    Returns:
        The nodes of each run, in the order of the graph, without views that nobody uses any more.
    """
    home = {node: i for i, run in enumerate(runs) for node in run}
    views = _Views(graph, home)
    for node in list(graph.nodes):
        for used in node.all_input_nodes:
            own = views.copy_for(node, used)
            if own is not used:
                node.replace_input_with(used, own)
    for node in reversed(graph.nodes):
        if not node.users and (_is_constant(node) or (node in home and _is_view(node))):
            home.pop(node, None)
            graph.erase_node(node)
    nodes: list[list[fx.Node]] = [[] for _ in runs]
    for node in graph.nodes:
        if node in home:
            nodes[home[node]].append(node)
    return nodes


class _Views:
    """Copies views into the regions that use them.

    Args:
        home: by node, the number of its region; copies are added to it.
    """

    def __init__(self, graph: fx.Graph, home: dict[fx.Node, int]) -> None:
        self._graph, self._home = graph, home
        self._copies: dict[tuple[int | None, fx.Node], fx.Node] = {}

    def copy_for(self, user: fx.Node, view: fx.Node) -> fx.Node:
        """Return a copy of ``view`` where ``user`` is, made in front of it or earlier."""
        place = self._home.get(user)
        if not self._is_needed(view, place):
            return view
        key = place, view
        if key not in self._copies:
            sources = {source: self.copy_for(user, source) for source in view.all_input_nodes}
            with self._graph.inserting_before(user):
                copy = self._graph.node_copy(view, sources.__getitem__)
            self._copies[key] = copy
            if place is not None:
                self._home[copy] = place
        return self._copies[key]

    def _is_needed(self, view: fx.Node, place: int | None) -> bool:
        if _is_constant(view):
            return place is not None
        return view in self._home and self._home[view] != place and _is_view(view)
