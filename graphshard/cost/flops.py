"""Count the floating-point operations of a node, and estimate how efficiently they run.

If a prediction fails, compilation continues: ``call_with_fallback`` returns a fallback instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch.fx.node import Argument, Target

from .._torch.tensors import OpOverload, argument_names, base_name, size_hint
from ..ops.library import dtype_name

# Attention's rate as a fraction of the rate of matrix products. FlashAttention-2 (arXiv 2307.08691)
# reaches 73 % of an A100's peak in forward and 63 % in backward; FlashAttention-3 (arXiv
# 2407.08608), 75 and 57 % of an H100's. Large matrix products reach 87 % (A100) and 80 % (H100).
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.85, 0.7
CAUSAL_BLOCK = 128  # number of keys that an attention kernel skips or computes as one block


def op_names(text: str) -> frozenset[str]:
    """Split ``text`` at spaces into a set of names."""
    return frozenset(text.split())


# Matrix products, by the position of their left operand.
_LEFT_IS_FIRST = op_names("_grouped_mm _scaled_grouped_mm _scaled_mm bmm linear matmul mm mv")
_LEFT_IS_SECOND = op_names("addbmm addmm addmv baddbmm")
# Name prefix of transformers' grouped matrix product and its backward. The product multiplies each
# of the tokens ``[s, k]`` by its expert's weights in ``[experts, k, n]``.
_GROUPED = "transformers.grouped_mm_fallback"

_FLEX = ("flex_attention", "flex_attention_backward")


T = TypeVar("T")

_warned: set[str] = set()  # failed predictions already warned about


def call_with_fallback(
    fallback: T, predict: Callable[..., T], *args: Any, what: str | None = None
) -> T:
    """Return ``predict(*args)`` or, if that raises, ``fallback``; warn once for each ``what``.

    Args:
        what: predicted quantity, for the warning (default: the time of the operator that the node
            ``args[0]`` calls).
    """
    try:
        return predict(*args)
    except Exception as error:
        what = what or f"the time of {args[0].target}"
        if what not in _warned:
            _warned.add(what)
            warnings.warn(
                f"graphshard: cannot predict {what} ({type(error).__name__}: {error}); schedules "
                "use a rough estimate instead",
                stacklevel=2,
            )
        return fallback


class Flops(NamedTuple):
    """The floating-point operations of a node."""

    num_flops: float
    dtype: str  # dtype of the operands, as a key of ``Hardware.flops``
    efficiency: float = 1.0  # rate achieved, as a fraction of the rate of matrix products


def flops(node: fx.Node) -> Flops:
    """Count the operations of a matrix product, attention or convolution; 0 for other nodes."""
    name = aten_name(_called_op(node)[0])
    if name in _LEFT_IS_FIRST or name in _LEFT_IS_SECOND:
        left = node.args[1 if name in _LEFT_IS_SECOND else 0]
        assert isinstance(left, fx.Node)
        return _matmul(node, left.meta["val"])
    if name.startswith("_scaled_dot_product"):
        return _attention(node, backward=name.endswith("_backward"))
    if name in ("convolution", "convolution_backward"):
        return _convolution(node)
    if str(node.target).startswith(_GROUPED):
        return _grouped_fallback(node)
    if str(node.target) in _FLEX:
        return _flex_attention(node)
    return Flops(0.0, "float32")


def _matmul(node: fx.Node, left: torch.Tensor) -> Flops:
    out = shape_of(node.meta["val"])
    num_flops = 2.0 * math.prod(out) * shape_of(left)[-1]
    if aten_name(_called_op(node)[0]) == "addbmm":  # sums the products of all batches
        num_flops *= shape_of(left)[0]
    if len(out) == 3 and left.dim() == 2:  # grouped: the groups split the inner dimension
        num_flops /= out[0]
    return Flops(num_flops, _dtype_name(left))


def _grouped_fallback(node: fx.Node) -> Flops:
    arguments = argument_values(node)
    tokens, weight = shape_of(arguments["input"]), shape_of(arguments["weight"])
    products = 2 if "grad_output" in arguments else 1  # backward: one for each gradient
    return Flops(
        products * 2.0 * tokens[0] * math.prod(weight[1:]), _dtype_name(arguments["input"])
    )


def _attention(node: fx.Node, *, backward: bool) -> Flops:
    arguments = argument_values(node)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    num_keys = shape_of(key)[-2]
    # Causal kernels skip whole blocks of scores: about half of them if there are many.
    causal = min(1.0, (1 + CAUSAL_BLOCK / max(num_keys, 1)) / 2)
    return _products(query, key, value, causal if arguments.get("is_causal") else 1.0, backward)


def _flex_attention(node: fx.Node) -> Flops:
    # Assumes no mask: the blocks of scores to skip are known only at run time.
    query, key, value = (arg.meta["val"] for arg in node.args[:3] if isinstance(arg, fx.Node))
    return _products(query, key, value, 1.0, str(node.target).endswith("_backward"))


def _products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: float, backward: bool
) -> Flops:
    """Count the operations of attention that computes a fraction ``part`` of the scores."""
    depth, depth_of_value = shape_of(query)[-1], shape_of(value)[-1]
    scores = part * 2.0 * math.prod(shape_of(query)[:-1]) * shape_of(key)[-2]
    dtype = _dtype_name(query)
    if backward:  # recomputes the scores
        return Flops(scores * (3 * depth + 2 * depth_of_value), dtype, ATTENTION_BACKWARD)
    return Flops(scores * (depth + depth_of_value), dtype, ATTENTION_FORWARD)


def _convolution(node: fx.Node) -> Flops:
    arguments = argument_values(node)
    x, grad = arguments["input"], arguments.get("grad_output")
    output = node.meta["val"] if grad is None else grad
    # Each output element (transposed: input element) needs a multiply-add per filter weight.
    elements = math.prod(shape_of(x if arguments["transposed"] else output))
    num_flops = 2.0 * elements * math.prod(shape_of(arguments["weight"])[1:])
    if grad is not None:  # the same number for each gradient, of the input and of the weight
        num_flops *= sum(map(bool, arguments["output_mask"][:2]))
    return Flops(num_flops, _dtype_name(x))


def _called_op(node: fx.Node) -> tuple[Target, tuple[Argument, ...]]:
    # Wrappers such as ``run_with_rng_state`` take the operator that they run as an argument.
    for i, arg in enumerate(node.args):
        if isinstance(arg, OpOverload):
            return arg, node.args[i + 1 :]
    return node.target, node.args


def argument_values(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments of a node, keyed by name, with nodes replaced by their values."""
    op, args = _called_op(node)
    arguments = {**dict(zip(argument_names(op), args)), **node.kwargs}
    return {
        name: argument.meta["val"] if isinstance(argument, fx.Node) else argument
        for name, argument in arguments.items()
    }


def _dtype_name(value: torch.Tensor) -> str:
    name = dtype_name(value.dtype)
    return "float8" if name.startswith("float8") else name


def shape_of(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the first value in a list that is not None.

    Symbolic sizes are replaced by their hints. The shape of a value that is no tensor is ().
    """
    while isinstance(value, (list, tuple)):
        value = next((item for item in value if item is not None), None)
    sizes = value.shape if isinstance(value, torch.Tensor) else ()  # a number or None
    return tuple(size if type(size) is int else size_hint(size) for size in sizes)


def aten_name(target: Target) -> str:
    """Return the base name of an ATen or prims op ("add" for ``aten.add.Tensor``), else ""."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return ""
    return base_name(target)
