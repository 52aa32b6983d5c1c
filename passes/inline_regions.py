"""Traced graph: inline regions that are marked with ``torch.compiler.nested_compile_region``.

Parameters are read inside such a region. Left there, they would be gathered where they are read,
outside of the plan:

    before   r = invoke_subgraph(code, "code", x, p)   y = r[0]   z = y + x
             code:   a = unshard(p)   b = x @ a   return (b,)
    after    a = unshard(p)   b = x @ a   z = b + x

Dynamo still traces a region only once for all its calls. To compile equal layers once, with their
collectives outside, use ``SchedulePolicy(regions=...)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_INVOKE = torch.ops.higher_order.invoke_subgraph


def inline_regions(gm: fx.GraphModule) -> None:
    """Inline the regions of a graph, including nested ones, in place."""
    calls = gm.graph.find_nodes(op="call_function", target=_INVOKE)
    for call in calls:
        _inline(gm, call)
    if calls:
        gm.recompile()


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
    target, _, *arguments = call.args
    assert isinstance(target, fx.Node)
    prefix = str(target.target)
    code = gm.get_submodule(prefix)
    assert isinstance(code, fx.GraphModule)
    inline_regions(code)
    copies = dict(zip(code.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in code.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with gm.graph.inserting_before(call):
            copy = gm.graph.node_copy(node, lambda used: copies[used])
        if node.op == "get_attr":
            copy.target = f"{prefix}.{node.target}"
        copies[node] = copy
    results: Any = fx.map_arg(code.graph.output_node().args[0], lambda used: copies[used])
    for taken in list(call.users):
        taken.replace_all_uses_with(results[taken.args[1]])
        gm.graph.erase_node(taken)
    gm.graph.erase_node(call)
    if not target.users:
        gm.graph.erase_node(target)
