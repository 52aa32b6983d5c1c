"""The graphs that AOTAutograd makes: their inputs by name, and which of them a graph is.

AOTAutograd names the inputs of forward and backward graphs ``primals_1``, ``primals_2``, ..., the
gradients of outputs ``tangents_1``, ..., and the inputs of an inference graph ``arg0_1``,
``arg1_1``, ...: torch/_functorch/_aot_autograd/graph_capture_wrappers.py and
torch/fx/experimental/proxy_tensor.py. In front of Dynamo's inputs come

- a token for each kind of effect that operators have (an error that one may raise, a print). A
  backward graph has none, but counts it in its names: after ``primals_1``, a token, ``primals_2``
  is Dynamo's first input, whose gradient is the first output of backward. Inductor removes tokens
  and leaves the names: torch/_functorch/_aot_autograd/graph_compile.py;
- constants that Dynamo keeps as attributes of its graph, which count as its inputs do:
  ``prepare_aot_module_simplified`` in torch/_functorch/aot_autograd.py.

Of a tensor subclass, the tensors that it wraps are inputs, and its symbolic sizes and strides:
``unwrap_tensor_subclasses`` in torch/_functorch/_aot_autograd/subclass_utils.py. Backward returns
one None for it if it requires no gradient.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    DummyAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
)
from torch._functorch._aot_autograd.subclass_utils import unwrap_tensor_subclasses

_PRIMAL, _ARG = re.compile(r"primals_(\d+)"), re.compile(r"arg(\d+)_\d+")

_INPUT = "graphshard_input"
"""In ``meta`` of nodes of a backward graph: of a placeholder, its number as an input of forward; of
a gradient, that of the input whose gradient it is."""


def num_constants(gm: fx.GraphModule) -> int:
    """Return how many constants of Dynamo's graph come before its inputs."""
    parameters = gm.named_parameters(remove_duplicate=False)
    return len([*parameters, *gm.named_buffers(remove_duplicate=False)])


def flat_inputs(gm: fx.GraphModule) -> list[int | None]:
    """Return Dynamo's input, by position, that each input of AOTAutograd's graph is or is part of.

    None stands for a constant. Tokens are not counted.
    """
    positions: list[int | None] = [None] * num_constants(gm)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        parts, _ = unwrap_tensor_subclasses([value], [DummyAOTInput(position)], append_symints=True)
        positions += [position] * len(parts)
    return positions


def original_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number that each placeholder of an original input has, constants counted.

    A backward graph has to be known to :func:`number_inputs` if its forward graph has tokens.
    """
    kind = graph_kind(graph)
    # What forward saves has any name: it may begin as an input of an inference graph does.
    pattern = _ARG if kind == "inference" else _PRIMAL
    matches = {n: pattern.fullmatch(n.target) for n in graph.find_nodes(op="placeholder")}
    names = {node: match for node, match in matches.items() if match}
    if kind == "backward":
        return {node: node.meta.get(_INPUT, int(match[1]) - 1) for node, match in names.items()}
    effects = graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    tokens = {effect.args[0] for effect in effects}
    return {node: i for i, node in enumerate(node for node in names if node not in tokens)}


def number_inputs(forward: fx.Graph, backward: fx.Graph) -> None:
    """Give a backward graph the numbers that the inputs have in its forward graph."""
    numbers = {node.target: number for node, number in original_inputs(forward).items()}
    for node in original_inputs(backward):
        node.meta[_INPUT] = numbers[node.target]
    of_description = {node.meta.get("desc"): i for node, i in original_inputs(forward).items()}
    descriptions = backward.output_node().meta.get("desc", ())
    for gradient, description in zip(_outputs(backward), descriptions):
        if isinstance(gradient, fx.Node) and isinstance(description, GradAOTOutput):
            gradient.meta[_INPUT] = of_description[description.grad_of]


def inputs_of_gradients(backward: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of the input whose gradient each output of a backward graph is."""
    outputs = enumerate(_outputs(backward))
    return {n: n.meta.get(_INPUT, i) for i, n in outputs if isinstance(n, fx.Node)}


def _outputs(graph: fx.Graph) -> Sequence[object]:
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def graph_kind(graph: fx.Graph) -> Literal["forward", "backward", "inference"]:
    """Which graph of AOTAutograd's it is."""
    inputs = graph.find_nodes(op="placeholder")
    if any(map(is_tangent, inputs)):
        return "backward"
    forward = any(str(node.target).startswith("primals_") for node in inputs)
    return "forward" if forward else "inference"


def is_tangent(node: fx.Node) -> bool:
    """Return whether a node is the gradient of an output, as an input."""
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def written_inputs(forward: fx.Graph) -> set[fx.Node]:
    """Return the inputs that a forward graph writes, by itself or when it is done.

    Inductor's graph copies the new value into the input; where the graph cannot, it returns the
    value, and AOTAutograd copies it behind the graph.
    """
    copies = forward.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    descriptions = forward.output_node().meta.get("desc", ())
    returned = {d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)}
    inputs = forward.find_nodes(op="placeholder")
    return {copy.args[0] for copy in copies}.intersection(inputs) | {
        node for node in inputs if node.meta.get("desc") in returned
    }
