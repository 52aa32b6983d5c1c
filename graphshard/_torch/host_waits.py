"""Host waits that are nodes of a graph, such as ``torch.cuda.synchronize()`` in torch 2.13.

AOTAutograd threads all earlier values through a wait, so that nothing moves across it
(``wrap_all_sync_nodes_with_control_deps`` in torch/_functorch/_aot_autograd/streams.py):

    control_deps((a, w), wait, a, w)      outputs 1 and 2 are a and w; ``wait`` is a submodule
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx


def is_sync_node(node: fx.Node) -> bool:
    """Return whether ``node`` threads values through a host wait or a stream operator."""
    if node.op != "call_function" or str(node.target) != "control_deps":
        return False
    subgraph: Any = node.args[1]
    inside = getattr(node.graph.owning_module, subgraph.target).graph.nodes
    # Other ``control_deps`` only order operators.
    return any(str(other.target).startswith("streams.") for other in inside)


def bypass_wait(wait: fx.Node, values: Container[fx.Node]) -> None:
    """Make ``values`` bypass ``wait``, which then no longer depends on them."""
    arguments: Any = wait.args
    before, subgraph, *passing = arguments
    kept = [i for i, value in enumerate(passing) if value not in values]
    _keep(getattr(wait.graph.owning_module, subgraph.target), kept)
    wait.args = (tuple(n for n in before if n not in values), subgraph, *(passing[i] for i in kept))
    for item in list(wait.users):
        position: Any = item.args[1]
        if position and position - 1 not in kept:
            item.replace_all_uses_with(passing[position - 1])
            wait.graph.erase_node(item)
        elif position:
            item.args = (wait, 1 + kept.index(position - 1))


def _keep(wait: fx.GraphModule, kept: list[int]) -> None:
    """Reduce the inputs and outputs of a wait's submodule to the positions ``kept``."""
    taken = list(wait.graph.find_nodes(op="placeholder"))
    output = wait.graph.output_node()
    results: Any = output.args[0]
    first, *others = results if isinstance(results, (tuple, list)) else [results]
    output.args = ((first, *(others[i] for i in kept)),)
    for i, node in enumerate(taken):
        if i not in kept:
            wait.graph.erase_node(node)
    wait.recompile()
