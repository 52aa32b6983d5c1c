"""Joint graph: parameters do not pass through waits of the host.

Saved for backward behind one, a gathered parameter would look like an activation, and stay:

    before   w = unshard(p)   y = x @ w   (y', w') = wait(y, w)   z = y'.relu()   ..   g @ w'.t()
    after    w = unshard(p)   y = x @ w   y' = wait(y)            z = y'.relu()   ..   g @ w.t()
"""

from __future__ import annotations

from torch import fx

from graphshard._torch.host_waits import is_wait, lead_past
from graphshard.passes.reshard import parameter_derived


def lead_parameters_past(gm: fx.GraphModule) -> None:
    """Let parameters, and what they alone determine, be used behind a wait as before it."""
    for node in list(gm.graph.nodes):
        if is_wait(node):
            lead_past(node, frozenset(parameter_derived(gm.graph)))
