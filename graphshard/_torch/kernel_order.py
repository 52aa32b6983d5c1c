"""Keep launches and waits in their written order while Inductor fuses kernels around them.

Inductor runs a fused kernel where its first node was, preceded by everything the kernel needs. If a
later node needs a later wait, that wait moves up, ahead of launches that were written before it.
This pass therefore moves the kernel after the waits that it needs:

    written   embedding   launch b   wait a   norm     embedding and norm are fused
    Inductor  wait a   kernel   launch b
    here      launch b   wait a   kernel

If a launch before the wait sends a result of the kernel, the kernel must not move and is split:

    written   grad   launch grad   wait a   norm       grad and norm share an input: fused
    Inductor  wait a   kernel   launch grad
    here      grad   launch grad   wait a   norm

When kernels are split, a large allocation written after a wait is treated as if it needed the wait,
because it should reuse the memory that the wait frees.

Relies on its imports, with the same names in torch 2.11 and 2.13 except ``CustomSchedulerPass``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, TypeAlias

import networkx as nx
from torch._inductor import custom_graph_pass
from torch._inductor.scheduler import BaseSchedulerNode, FusedSchedulerNode
from torch._inductor.utils import contains_collective, contains_wait
from torch._inductor.virtualized import V

_MIN_SPLIT_BYTES = 64 << 20  # smallest allocation that justifies splitting a fused kernel

_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.11 lacks it


class KeepWaits(_Pass):
    """Scheduler pass that orders kernels, for Inductor's ``_post_fusion_custom_pass``.

    ``on_schedule`` is called with the name of each graph and subgraph.
    """

    def __init__(self, on_schedule: Callable[[str], object] | None = None) -> None:
        self._on_schedule = on_schedule

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        if self._on_schedule is not None:
            self._on_schedule(V.graph.name or "")
        while len(split := _split(nodes)) > len(nodes):
            nodes = split
        return _ordered(nodes)

    def uuid(self) -> bytes:
        return b"graphshard"  # the cache key of our graph pass already covers all our sources

    def __getstate__(self) -> dict[str, object]:
        return {}  # torch 2.11 pickles its options for cache keys


_Nodes = list[BaseSchedulerNode]
# Edges lead from each node to the nodes that it must follow.
_Dependencies: TypeAlias = "nx.DiGraph[Any]"
_ROOT = object()


def _split(nodes: _Nodes) -> _Nodes:
    """Split each fused kernel that needs a wait but feeds a launch or wait written before it."""
    needed = _dependencies(nodes)
    last_wait = _last_waits_for_memory(nodes, needed)
    writer = _writers(nodes)
    split: _Nodes = []
    for node in nodes:
        is_late = _is_fused(node) and last_wait[node] > node.min_order
        if is_late and _delays_launch(node, last_wait[node], needed):
            late = {name for name, n in writer.items() if last_wait[n] > node.min_order}
            split += _parts(node, late)
        else:
            split.append(node)
    return split


def _is_fused(node: BaseSchedulerNode) -> bool:
    is_list_operator = getattr(node, "is_foreach", bool)()
    return len(getattr(node, "snodes", ())) > 1 and not is_list_operator


def _delays_launch(node: BaseSchedulerNode, wait: int, needed: _Dependencies) -> bool:
    """Return whether a launch or wait that was written before ``wait`` depends on ``node``."""
    return any(
        user.min_order < wait and (contains_wait(user) or contains_collective(user))
        for user in nx.ancestors(needed, node)
    )


def _parts(kernel: Any, late_buffers: set[str]) -> _Nodes:
    """Split a fused kernel into nodes that need no late buffer, and nodes that do.

    Return the kernel itself if its nodes are all of one kind.
    """
    late = late_buffers.difference(kernel.get_buffer_names())
    groups: tuple[_Nodes, _Nodes] = [], []
    for node in kernel.snodes:
        is_late = any(dep.name in late for dep in node.unmet_dependencies)
        groups[is_late].append(node)
        if is_late:
            late.update(node.get_buffer_names())
    if not all(groups):  # another kernel must be split instead
        return [kernel]
    parts: _Nodes = []
    for group in groups:
        # Nodes that cannot share a loop become one kernel each. On a CPU none can, because Inductor
        # has adapted their loops to each other, and may have done so across the two parts.
        whole = kernel.get_device().type != "cpu" and _can_share_triton_kernel(group)
        parts += [_fused(kernel, nodes) for nodes in ([group] if whole else [[n] for n in group])]
    return parts


def _can_share_triton_kernel(nodes: list[Any]) -> bool:
    # Nodes can be one Triton kernel if each iterates over all elements, or over the results of a
    # reduction (``generate_node_schedule`` in torch/_inductor/codegen/simd.py).
    _, (rows, columns) = max(nodes, key=lambda node: node.is_reduction()).group
    sizes = ((rows, columns), (rows * columns, 1), (rows, 1))
    return all(tuple(node.group[1]) in sizes for node in nodes)


def _fused(kernel: Any, nodes: _Nodes) -> BaseSchedulerNode:
    one = nodes[0] if len(nodes) == 1 else FusedSchedulerNode(kernel.scheduler, nodes)
    kernel.scheduler.name_to_fused_node.update({node.get_name(): one for node in nodes})
    return one


def _last_waits_for_memory(nodes: _Nodes, needed: _Dependencies) -> dict[BaseSchedulerNode, int]:
    """Return, for each node, the written position of the last wait that it depends on, or -1.

    A large allocation counts as if it needed the last wait before it, because the completed
    collective frees memory for the allocation.
    """
    waits = [-1, *sorted(node.min_order for node in nodes if contains_wait(node))]
    own = {}
    for node in nodes:
        # Allocations, such as the zeros that a gradient is added to, have no inputs.
        makes = not (needed[node] or contains_collective(node))
        frees_first = contains_wait(node) or (
            makes and node.get_write_buffer_sizes() >= _MIN_SPLIT_BYTES
        )
        own[node] = waits[bisect_right(waits, node.min_order) - 1] if frees_first else -1
    return _latest(own, needed)


def _latest(
    own: dict[BaseSchedulerNode, int], needed: _Dependencies
) -> dict[BaseSchedulerNode, int]:
    """Return, for each node, the maximum of ``own`` over the node and all its dependencies."""
    latest: dict[BaseSchedulerNode, int] = {}
    for node, number in own.items():  # dependencies come first
        latest[node] = max([number, *(latest.get(other, -1) for other in needed[node])])
    return latest


def _ordered(nodes: _Nodes) -> _Nodes:
    """Return nodes in written order, each delayed until after its waits and other dependencies."""
    needed = _dependencies(nodes)
    own = {node: node.min_order if contains_wait(node) else -1 for node in nodes}
    last_wait = _latest(own, needed)
    # On ties, put waits first.
    by_order = sorted(nodes, key=lambda n: (max(n.min_order, last_wait[n]), not contains_wait(n)))
    needed.add_edges_from((_ROOT, node) for node in by_order)
    return [node for node in nx.dfs_postorder_nodes(needed, _ROOT) if node is not _ROOT]


def _writers(nodes: _Nodes) -> dict[str, BaseSchedulerNode]:
    return {name: node for node in nodes for name in node.get_buffer_names()}


def _dependencies(nodes: _Nodes) -> _Dependencies:
    writer = _writers(nodes)
    graph: _Dependencies = nx.DiGraph()
    graph.add_nodes_from(nodes)
    for node in nodes:
        for dep in sorted(node.unmet_dependencies, key=lambda dep: dep.name):
            # A fused node may list its own buffers as dependencies.
            if writer.get(dep.name, node) is not node:
                graph.add_edge(node, writer[dep.name])
    return graph
