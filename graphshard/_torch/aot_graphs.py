"""AOTAutograd's graphs: kinds and input numbering.

AOTAutograd names the inputs of forward and backward graphs ``primals_1``, ``primals_2``, ..., the
gradients of outputs ``tangents_1``, ..., and the inputs of inference graphs ``arg0_1``, ``arg1_1``,
...: torch/_functorch/_aot_autograd/graph_capture_wrappers.py and
torch/fx/experimental/proxy_tensor.py. Dynamo's inputs come after constants, and after tokens, which
order operators with side effects such as printing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    DummyAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
)
from torch._functorch._aot_autograd.subclass_utils import unwrap_tensor_subclasses
from torch.fx.node import Argument

from .patches import patch

_PRIMAL, _ARG = re.compile(r"primals_(\d+)"), re.compile(r"arg(\d+)_\d+")

# Key in ``meta`` of backward nodes. On a placeholder: its number as an input of forward. On a
# gradient: the number of its input.
_INPUT = "graphshard_input"

# Key in ``meta`` of a subgraph, for the schema of its calls.
_SCHEMA = "graphshard_schema"


def flat_inputs(gm: fx.GraphModule) -> list[int | None]:
    """Return, for each input of AOTAutograd's graph, its position among Dynamo's inputs.

    The position of a constant is None. Tokens are omitted.
    """
    # Dynamo stores constants as attributes of its graph; AOTAutograd numbers them before the inputs
    # (``prepare_aot_module_simplified`` in torch/_functorch/aot_autograd.py).
    parameters = gm.named_parameters(remove_duplicate=False)
    constants = [*parameters, *gm.named_buffers(remove_duplicate=False)]
    positions: list[int | None] = [None] * len(constants)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        # A tensor subclass becomes several inputs: its inner tensors, and its symbolic sizes and
        # strides (torch/_functorch/_aot_autograd/subclass_utils.py).
        parts, _ = unwrap_tensor_subclasses([value], [DummyAOTInput(position)], append_symints=True)
        positions += [position] * len(parts)
    return positions


def original_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the input number of each placeholder, counted from 0 and including constants.

    Tokens, and a backward graph's tangents and saved activations, are omitted.

    A backward graph must have gone through :func:`number_inputs` if its forward graph has tokens.
    """
    kind = graph_kind(graph)
    # Saved activations have arbitrary names, even ones that match inputs of inference graphs.
    pattern = _ARG if kind == "inference" else _PRIMAL
    matches = {n: pattern.fullmatch(n.target) for n in graph.find_nodes(op="placeholder")}
    names = {node: match for node, match in matches.items() if match}
    # A backward graph has no tokens, but its names count them: if ``primals_1`` is a token,
    # ``primals_2`` is Dynamo's first input, whose gradient is the first output. Inductor removes
    # tokens and keeps the names (torch/_functorch/_aot_autograd/graph_compile.py).
    if kind == "backward":
        return {node: node.meta.get(_INPUT, int(match[1]) - 1) for node, match in names.items()}
    effects = graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    tokens = {effect.args[0] for effect in effects}
    return {node: i for i, node in enumerate(node for node in names if node not in tokens)}


def number_inputs(forward: fx.Graph, backward: fx.Graph) -> None:
    """Mark a backward graph's inputs and gradients with the input numbers of its forward graph."""
    numbers = {node.target: number for node, number in original_inputs(forward).items()}
    for node in original_inputs(backward):
        node.meta[_INPUT] = numbers[node.target]
    of_description = {node.meta.get("desc"): i for node, i in original_inputs(forward).items()}
    descriptions = backward.output_node().meta.get("desc", ())
    for gradient, description in zip(outputs_of(backward), descriptions):
        if isinstance(gradient, fx.Node) and isinstance(description, GradAOTOutput):
            gradient.meta[_INPUT] = of_description[description.grad_of]


def inputs_of_gradients(backward: fx.Graph) -> dict[fx.Node, int]:
    """Map each gradient that a backward graph returns to the number of its forward input."""
    # For a tensor subclass that requires no gradient, backward returns a single None, even if the
    # subclass becomes several inputs. Positions of later outputs then differ from input numbers.
    outputs = enumerate(outputs_of(backward))
    return {n: n.meta.get(_INPUT, i) for i, n in outputs if isinstance(n, fx.Node)}


def outputs_of(graph: fx.Graph) -> Sequence[Argument]:
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def graph_kind(graph: fx.Graph) -> Literal["forward", "backward", "inference"]:
    inputs = graph.find_nodes(op="placeholder")
    if any(map(is_tangent, inputs)):
        return "backward"
    forward = any(str(node.target).startswith("primals_") for node in inputs)
    return "forward" if forward else "inference"


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


# Wrappers of recomputed random operators: by default, GPUs use the second one.
_WITH_RNG_STATE = ("run_with_rng_state", "graphsafe_run_with_rng_state")


def is_recomputed(node: fx.Node) -> bool:
    """Return whether a node of a backward graph recomputes a part of forward."""
    # Backward's copies of forward nodes keep the tag that AOTAutograd sets in the joint graph. The
    # partitioner's wrappers of recomputed random operators have no tag.
    is_forward = node.meta.get("partitioner_tag") == "is_forward"
    return is_forward or str(node.target) in _WITH_RNG_STATE


def mutated_inputs(forward: fx.Graph) -> set[fx.Node]:
    """Return the inputs that forward mutates, in the graph or in AOTAutograd's epilogue."""
    # A graph either copies the new value into the input itself, or returns the value, which
    # AOTAutograd then copies into the input.
    copies = forward.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    descriptions = forward.output_node().meta.get("desc", ())
    returned = {d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)}
    inputs = forward.find_nodes(op="placeholder")
    return {copy.args[0] for copy in copies}.intersection(inputs) | {
        node for node in inputs if node.meta.get("desc") in returned
    }


@functools.cache  # patched once
def keep_subgraphs(keeps: Callable[[fx.GraphModule], bool]) -> None:
    """Keep AOTAutograd from partitioning the subgraphs of a joint graph ``gm`` if ``keeps(gm)``."""

    def wrap(partition_subgraphs: Any) -> Any:
        @functools.wraps(partition_subgraphs)
        def unless_kept(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            return gm if keeps(gm) else partition_subgraphs(gm, *args, **kwargs)

        return unless_kept

    patch("torch._functorch._aot_autograd.graph_compile.run_joint_graph_passes_on_hops", wrap)


@functools.cache  # patched once
def forbid_effects(prefix: str, error: type[Exception]) -> None:
    """Raise ``error`` if a subgraph whose name contains ``prefix`` has side effects."""
    # Torch finds them at the first call. Later calls pass a token and return a list, and an
    # autograd.Function does not make the tensors in a list differentiable.

    def wrap(add_effects: Any) -> Any:
        @functools.wraps(add_effects)
        def unless_forbidden(self: Any, name: str, effects: Any) -> Any:
            if prefix in name:
                raise error(f"{name} has side effects")
            return add_effects(self, name, effects)

        return unless_forbidden

    patch("torch._guards.InvokeSubgraphCache.add_effects", wrap)


@functools.cache  # patched once
def derive_schemas_once(prefix: str) -> None:
    """Make torch derive the schema of each subgraph whose name contains ``prefix`` only once.

    All calls of such a subgraph must have the same schema: arguments may differ only in values.
    """

    def wrap(gen_schema: Any) -> Any:
        @functools.wraps(gen_schema)
        def derived(self: Any, subgraph: Any, name: str, *operands: Any) -> Any:
            if prefix not in name or not isinstance(subgraph, fx.GraphModule):
                return gen_schema(self, subgraph, name, *operands)
            if _SCHEMA not in subgraph.meta:
                subgraph.meta[_SCHEMA] = gen_schema(self, subgraph, name, *operands)
            return subgraph.meta[_SCHEMA]

        return derived

    patch("torch._higher_order_ops.invoke_subgraph.InvokeSubgraphHOP.gen_schema", wrap)
