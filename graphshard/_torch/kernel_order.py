"""Keeps launches and waits in their written order while Inductor fuses kernels around them.

Inductor runs a fused kernel where its first node stood, and all that its nodes need before it. If
a later node needs what is waited for later, that wait comes too early: before launches that were
written between the two. So a fused kernel moves behind the waits that it needs:

    written   embedding   launch b   wait a   norm     embedding and norm are one kernel
    Inductor  wait a   kernel   launch b
    here      launch b   wait a   kernel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor import custom_graph_pass
from torch._inductor.utils import contains_wait

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.11 has none


class KeepWaits(_Pass):
    """The pass, for Inductor's ``_post_fusion_custom_pass``."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Return the nodes of a scheduler in the order in which they are to run."""
        return _ordered(nodes)

    def uuid(self) -> bytes:
        """Return the same always: the key of our other pass changes with all sources."""
        return b"graphshard"


def _ordered(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    needed = _needed(nodes)
    last_wait: dict[BaseSchedulerNode, int] = {}
    for node in nodes:  # those that it needs come before it
        own = node.min_order if contains_wait(node) else -1
        last_wait[node] = max([own, *(last_wait.get(other, -1) for other in needed[node])])
    # Among equals the wait comes first.
    by_order = sorted(nodes, key=lambda n: (max(n.min_order, last_wait[n]), not contains_wait(n)))
    ordered: dict[BaseSchedulerNode, None] = {}
    for node in by_order:
        _visit(node, needed, ordered)
    return list(ordered)


def _needed(nodes: list[BaseSchedulerNode]) -> dict[BaseSchedulerNode, list[BaseSchedulerNode]]:
    """Return the nodes that each one has to come after.

    A fused node may name its own buffers, too.
    """
    writer = {name: node for node in nodes for name in node.get_buffer_names()}
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
    needed: dict[BaseSchedulerNode, list[BaseSchedulerNode]],
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
