"""What a node computes: its floating-point operations, and how well kernels do such work."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .._torch.tensors import argument_names, size_hint

# What of the rate of matrix products attention reaches. FlashAttention-2 (arXiv 2307.08691) has 73 %
# of an A100's peak forward and 63 % backward, FlashAttention-3 (2407.08608) 75 and 57 % of an H100's;
# large products have 87 and 80 %.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.85, 0.7
CAUSAL_BLOCK = 128  # keys that an attention kernel skips or computes together


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Matrix products, by the position of the left matrix.
_LEFT_IS_FIRST = names("_grouped_mm _scaled_grouped_mm _scaled_mm bmm linear matmul mm mv")
_LEFT_IS_SECOND = names("addbmm addmm addmv baddbmm")


def flops(node: fx.Node) -> tuple[float, str, float]:
    """Flops, their dtype, and what of the rate of matrix products they reach."""
    name = aten_name(_called(node)[0])
    if name in _LEFT_IS_FIRST or name in _LEFT_IS_SECOND:
        left = node.args[name in _LEFT_IS_SECOND]
        assert isinstance(left, fx.Node)
        return _matmul(node, left.meta["val"])
    if name.startswith("_scaled_dot_product"):
        return _attention(node)
    if name in ("convolution", "convolution_backward"):
        return _convolution(node)
    return 0.0, "float32", 1.0


def _matmul(node: fx.Node, left: torch.Tensor) -> tuple[float, str, float]:
    out = shape_of(node.meta["val"])
    num_flops = 2.0 * math.prod(out) * shape_of(left)[-1]
    if len(out) == 3 and left.dim() == 2:  # grouped: each group has its part of the inner axis
        num_flops /= out[0]
    return num_flops, _dtype(left), 1.0


def _attention(node: fx.Node) -> tuple[float, str, float]:
    """Scaled dot product attention, and its backward, which computes the scores once more.

    Of a causal mask the kernels skip whole blocks, about half of them where there are many.
    """
    arguments = _arguments(node)
    q, k, v = (shape_of(arguments[name]) for name in ("query", "key", "value"))
    scores = 2.0 * math.prod(q[:-1]) * k[-2]
    if arguments.get("is_causal"):
        scores *= min(1.0, (1 + CAUSAL_BLOCK / max(k[-2], 1)) / 2)
    dtype = _dtype(arguments["query"])
    if aten_name(_called(node)[0]).endswith("_backward"):
        return scores * (3 * q[-1] + 2 * v[-1]), dtype, ATTENTION_BACKWARD
    return scores * (q[-1] + v[-1]), dtype, ATTENTION_FORWARD


def _convolution(node: fx.Node) -> tuple[float, str, float]:
    """Each output (transposed: input) element takes a filter's worth of products per channel."""
    arguments = _arguments(node)
    x, weight, grad = (arguments.get(name) for name in ("input", "weight", "grad_output"))
    many = x if arguments["transposed"] else node.meta["val"] if grad is None else grad
    num_flops = 2.0 * math.prod(shape_of(many)) * math.prod(shape_of(weight)[1:])
    if grad is not None:
        num_flops *= sum(map(bool, arguments["output_mask"][:2]))
    return num_flops, _dtype(x), 1.0


def _arguments(node: fx.Node) -> dict[str, Any]:
    """By name, with the values of those that are nodes."""
    op, args = _called(node)
    given = {**dict(zip(argument_names(op), args)), **node.kwargs}
    return {k: v.meta["val"] if isinstance(v, fx.Node) else v for k, v in given.items()}


def _called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """What runs, and its arguments; ``run_with_rng_state`` and its like run another operator."""
    at = [i for i, arg in enumerate(node.args) if hasattr(arg, "overloadpacket")]
    return (node.args[at[0]], node.args[at[0] + 1 :]) if at else (node.target, node.args)


def _dtype(value: Any) -> str:
    name = str(value.dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def shape_of(value: Any) -> tuple[int, ...]:
    """Of a tensor, or of the first of several."""
    while isinstance(value, (list, tuple)):
        value = value[0]
    return tuple(s if type(s) is int else size_hint(s) for s in value.shape)


def aten_name(target: Any) -> str:
    """``add`` of ``aten.add.Tensor``; "" of what is not of ATen."""
    if getattr(target, "namespace", "") not in ("aten", "prims"):
        return ""
    return target.name().partition("::")[2].partition(".")[0]
