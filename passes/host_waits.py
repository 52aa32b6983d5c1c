"""Joint graph: let parameters bypass waits of the host, such as ``torch.cuda.synchronize()``.

All values pass through such a wait. After it, a gathered parameter would look like an activation
and be saved for backward in full:

    before   w = unshard(p)   y = x @ w   (y', w') = wait(y, w)   z = y'.relu()   ..   g @ w'.t()
    after    w = unshard(p)   y = x @ w   y' = wait(y)            z = y'.relu()   ..   g @ w.t()
"""

from __future__ import annotations

from torch import fx

from graphshard._torch.aot_graphs import bypass_wait, is_sync_node
from graphshard.passes.reshard import param_derived


def bypass_sync_nodes(gm: fx.GraphModule) -> None:
    """Let parameters, and values derived from them alone, bypass waits of the host, in place."""
    for node in list(gm.graph.nodes):
        if is_sync_node(node):
            bypass_wait(node, frozenset(param_derived(gm.graph)))
