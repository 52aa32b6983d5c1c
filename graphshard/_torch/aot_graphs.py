"""The graphs that AOTAutograd makes: their inputs by name, and which of them a graph is.

AOTAutograd names the inputs of forward and backward graphs ``primals_1``, ``primals_2``, ..., the
gradients of outputs ``tangents_1``, ..., and the inputs of an inference graph ``arg0_1``,
``arg1_1``, ...: torch/_functorch/_aot_autograd/graph_capture_wrappers.py and
torch/fx/experimental/proxy_tensor.py.
"""

from __future__ import annotations

import re
from typing import Literal

from torch import fx

_PRIMAL, _ARG = re.compile(r"primals_(\d+)"), re.compile(r"arg(\d+)_\d+")


def original_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """The position that each placeholder of an original input had in Dynamo's graph."""
    # What forward saves has any name: it may begin as an input of an inference graph does.
    is_inference = graph_kind(graph) == "inference"
    pattern, first = (_ARG, 0) if is_inference else (_PRIMAL, 1)
    matches = ((n, pattern.fullmatch(n.target)) for n in graph.find_nodes(op="placeholder"))
    return {node: int(match[1]) - first for node, match in matches if match}


def graph_kind(graph: fx.Graph) -> Literal["forward", "backward", "inference"]:
    """Which graph of AOTAutograd's it is."""
    names = [node.target for node in graph.find_nodes(op="placeholder")]
    if any(name.startswith("tangents_") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals_") for name in names) else "inference"
