"""Keeps launches and waits in their written order while Inductor fuses kernels around them.

Inductor runs a fused kernel where its first node stood, and all that its nodes need before it. If
a later node needs what is waited for later, that wait comes too early: before launches that were
written between the two. So a fused kernel moves behind the waits that it needs:

    written   embedding   launch b   wait a   norm     embedding and norm are one kernel
    Inductor  wait a   kernel   launch b
    here      launch b   wait a   kernel

Where the launch sends what the fused kernel computes, that cannot be: such a kernel is taken apart.

    written   grad   launch grad   wait a   norm     grad and norm, which read the same, are one
    Inductor  wait a   kernel   launch grad
    here      grad   launch grad   wait a   norm

The same holds for memory that is made behind a wait: the bytes that the wait frees are the room for
it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from torch._inductor import custom_graph_pass
from torch._inductor.scheduler import BaseSchedulerNode, FusedSchedulerNode
from torch._inductor.utils import contains_collective, contains_wait

_LARGE = 64 << 20
"""Bytes for whose sake a kernel more is worth it."""

_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.11 has none


class KeepWaits(_Pass):
    """The pass, for Inductor's ``_post_fusion_custom_pass``."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Return the nodes of a scheduler in the order in which they are to run."""
        while len(split := _split(nodes)) > len(nodes):
            nodes = split
        return _ordered(nodes)

    def uuid(self) -> bytes:
        """Return the same always: the key of our other pass changes with all sources."""
        return b"graphshard"


Nodes = list[BaseSchedulerNode]
Needed = dict[BaseSchedulerNode, Nodes]
"""By node, those that it has to come after."""


def _split(nodes: Nodes) -> Nodes:
    """Take apart the fused kernels that need a wait and are needed by what is written before it.

    What needs the wait becomes a kernel of its own, or each node where they do not loop alike.
    """
    needed = _needed(nodes)
    last_wait = _last_waits_for_memory(nodes, needed)
    users: Needed = {node: [] for node in nodes}
    for node, others in needed.items():
        for other in others:
            users[other].append(node)
    writer = _writers(nodes)
    split: Nodes = []
    for node in nodes:
        is_late = _is_fused(node) and last_wait[node] > node.min_order
        if is_late and _comes_too_late(node, last_wait[node], users):
            late = {name for name, n in writer.items() if last_wait[n] > node.min_order}
            split += _parts(node, late)
        else:
            split.append(node)
    return split


def _is_fused(node: BaseSchedulerNode) -> bool:
    """Return whether a node is several that can be kernels of their own."""
    is_list_operator = getattr(node, "is_foreach", bool)()
    return len(getattr(node, "snodes", ())) > 1 and not is_list_operator


def _comes_too_late(node: BaseSchedulerNode, wait: int, users: Needed) -> bool:
    """Return whether a launch, or a wait, rests on a node that was written before ``wait``."""
    return any(
        user.min_order < wait and (contains_wait(user) or contains_collective(user))
        for user in _resting_on(node, users)
    )


def _parts(kernel: Any, late_buffers: set[str]) -> Nodes:
    """Return kernels for a fused one: of nodes that need no late buffer, then of those that do."""
    late = late_buffers.difference(kernel.get_buffer_names())
    groups: tuple[Nodes, Nodes] = [], []
    for node in kernel.snodes:
        is_late = any(dep.name in late for dep in node.unmet_dependencies)
        groups[is_late].append(node)
        if is_late:
            late.update(node.get_buffer_names())
    if not all(groups):  # what comes too late is another kernel, which rests on this one
        return [kernel]
    parts: Nodes = []
    for group in groups:
        whole = kernel.get_device().type != "cpu" and _loop_alike(group)
        parts += [_fused(kernel, nodes) for nodes in ([group] if whole else [[n] for n in group])]
    return parts


def _loop_alike(nodes: list[Any]) -> bool:
    """Return whether nodes can be a kernel of Triton: over all elements, or behind a reduction
    (``generate_node_schedule`` in torch/_inductor/codegen/simd.py). For CPUs Inductor has fitted
    loops to each other that may be in different kernels now."""
    _, (rows, columns) = max(nodes, key=lambda node: node.is_reduction()).group
    sizes = ((rows, columns), (rows * columns, 1), (rows, 1))
    return all(tuple(node.group[1]) in sizes for node in nodes)


def _fused(kernel: Any, nodes: Nodes) -> BaseSchedulerNode:
    """Return some of a kernel's nodes as one, and tell the scheduler."""
    one = nodes[0] if len(nodes) == 1 else FusedSchedulerNode(kernel.scheduler, nodes)
    kernel.scheduler.name_to_fused_node.update({node.get_name(): one for node in nodes})
    return one


def _resting_on(node: BaseSchedulerNode, users: Needed) -> Iterator[BaseSchedulerNode]:
    """Yield all nodes that need a node, directly or by way of others."""
    pending, seen = [node], {node}
    while pending:
        for user in users[pending.pop()]:
            if user not in seen:
                seen.add(user)
                pending.append(user)
                yield user


def _last_waits(nodes: Nodes, needed: Needed) -> dict[BaseSchedulerNode, int]:
    """Return where the last wait was written that each node needs; -1: it needs none."""
    own = {node: node.min_order if contains_wait(node) else -1 for node in nodes}
    return _latest(own, needed)


def _last_waits_for_memory(nodes: Nodes, needed: Needed) -> dict[BaseSchedulerNode, int]:
    """Return the same, or where a later wait was written whose collective frees memory before a
    node needs much: such as the zeros that a gradient is added to, which need nothing."""
    waits = [-1, *sorted(node.min_order for node in nodes if contains_wait(node))]
    own = {}
    for node in nodes:
        makes = not (needed[node] or contains_collective(node))
        is_behind = contains_wait(node) or (makes and node.get_write_buffer_sizes() >= _LARGE)
        own[node] = waits[bisect_right(waits, node.min_order) - 1] if is_behind else -1
    return _latest(own, needed)


def _latest(own: dict[BaseSchedulerNode, int], needed: Needed) -> dict[BaseSchedulerNode, int]:
    """Return the largest number of each node and of all that it needs, which come before it."""
    latest: dict[BaseSchedulerNode, int] = {}
    for node, number in own.items():
        latest[node] = max([number, *(latest.get(other, -1) for other in needed[node])])
    return latest


def _ordered(nodes: Nodes) -> Nodes:
    needed = _needed(nodes)
    last_wait = _last_waits(nodes, needed)
    # Among equals the wait comes first.
    by_order = sorted(nodes, key=lambda n: (max(n.min_order, last_wait[n]), not contains_wait(n)))
    ordered: dict[BaseSchedulerNode, None] = {}
    for node in by_order:
        _visit(node, needed, ordered)
    return list(ordered)


def _writers(nodes: Nodes) -> dict[str, BaseSchedulerNode]:
    """Return the node that writes each buffer."""
    return {name: node for node in nodes for name in node.get_buffer_names()}


def _needed(nodes: Nodes) -> Needed:
    """Return the nodes that each one has to come after.

    A fused node may name its own buffers, too.
    """
    writer = _writers(nodes)
    return {
        node: [
            writer[dep.name]
            for dep in sorted(node.unmet_dependencies, key=lambda dep: dep.name)
            if writer.get(dep.name, node) is not node
        ]
        for node in nodes
    }


def _visit(
    node: BaseSchedulerNode,
    needed: Needed,
    ordered: dict[BaseSchedulerNode, None],
) -> None:
    """Append a node behind those that it needs, unless it is there already."""
    pending = [node]
    while pending:
        missing = [other for other in needed[pending[-1]] if other not in ordered]
        if missing:
            pending += missing[::-1]
        else:
            ordered.setdefault(pending.pop())
