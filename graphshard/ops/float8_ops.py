"""The operators of fp8 linears, before ``graphshard.passes.float8`` decomposes them.

    traced    float8_linear(x, w, bias)
    joint     y = float8_mm(x, w)      grad_x = float8_mm_grad_input(g, w)
                                       grad_w = float8_mm_grad_weight(g, w, x)

``w`` is a full weight in its own dtype; the eager ops cast it themselves. The pass moves this cast
ahead of the all-gather. (``float8_mm_grad_weight`` takes ``w`` only to identify the weight whose
gradient it computes.) To scale shards, ``local_amax`` returns their largest absolute values, and
``own_rows`` the scales of the rows that this rank owns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.distributed import process_group
from .._torch.tensors import OpOverload, foreach_max_abs
from . import mx_math
from .float8_math import E4M3, ROWWISE, Scaled, forward, grad_input, grad_weight, quantized
from .library import define, differentiate, fake, implement
from .mx_math import MXFP8, Blocks
from .nodes import Call, run

float8_linear = define("float8_linear(Tensor x, Tensor weight, Tensor? bias, str recipe) -> Tensor")
float8_mm = define("float8_mm(Tensor x, Tensor weight, str recipe) -> Tensor")
float8_mm_grad_input = define(
    "float8_mm_grad_input(Tensor grad, Tensor weight, str recipe) -> Tensor"
)
float8_mm_grad_weight = define(
    "float8_mm_grad_weight(Tensor grad, Tensor weight, Tensor x, str recipe) -> Tensor"
)
local_amax = define(
    "local_amax(Tensor[] shards, ScalarType dtype, str group, str recipe) -> Tensor"
)
own_rows = define("own_rows(Tensor full, str group) -> Tensor")
# torchao's name for the result of each product of a linear.
PRODUCTS: dict[OpOverload, str] = {
    float8_mm: "output",
    float8_mm_grad_input: "grad_input",
    float8_mm_grad_weight: "grad_weight",
}


@implement(float8_linear, "CompositeImplicitAutograd")
def _float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str
) -> torch.Tensor:
    product = float8_mm(x.reshape(-1, x.shape[-1]), weight, recipe)
    y: torch.Tensor = product.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def product(
    call: Call, op: object, arguments: Sequence[Any], weight: Scaled | Blocks | None = None
) -> Any:
    """Return the result of ``op``, one of ``PRODUCTS``.

    Args:
        weight: fp8 weight (for "mxfp8", in the blocks of the product's right side), or None to cast
            the weight in ``arguments``; ignored for weight gradients.

    Raises:
        RuntimeError: torch or the device does not support the product, or "mxfp8" would need blocks
            along rows whose length is not a multiple of 32.
        ValueError: torch rejects the sizes, dtypes or layouts of the matrices.
    """
    left, own, recipe = arguments[0], arguments[1], arguments[-1]
    if op is float8_mm_grad_weight:
        x = arguments[2]
        if recipe == MXFP8:
            return mx_math.grad_weight(call, left, x)
        return grad_weight(call, left, x, recipe)
    if recipe == MXFP8:
        by_blocks = mx_math.by_rows if op is float8_mm else mx_math.by_columns
        blocks = weight if isinstance(weight, Blocks) else by_blocks(call, own)
        return mx_math.times_transposed(call, left, blocks)
    assert not isinstance(weight, Blocks), "only mxfp8 has blocks"
    weight = weight or quantized(call, own, E4M3, recipe, 1)
    return (forward if op is float8_mm else grad_input)(call, left, weight, recipe)


for _op in PRODUCTS:
    implement(_op)(lambda *arguments, _op=_op: product(run, _op, arguments))


@functools.cache
def float8_error(device_type: str, recipe: str) -> str | None:
    """Return why a type of device cannot compute the products of an fp8 recipe, or None.

    The reason is the first line of torch's error.
    """
    values = torch.ones(mx_math.BLOCK, mx_math.BLOCK, dtype=torch.bfloat16, device=device_type)
    try:
        for op in PRODUCTS:
            others = [values] if op is float8_mm_grad_weight else []
            product(run, op, (values, values, *others, recipe))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


fake(float8_mm_grad_input)(lambda grad, w, recipe: grad.new_empty((grad.shape[0], w.shape[1])))
fake(float8_mm_grad_weight)(lambda grad, w, x, recipe: torch.empty_like(w))


@fake(float8_mm)
def _float8_mm_fake(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
    if x.dtype != weight.dtype:
        raise RuntimeError(
            f"linear: the input is {x.dtype}, but the weight is {weight.dtype}: cast one of them"
        )
    return x.new_empty((x.shape[0], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.recipe = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    x_grad = float8_mm_grad_input(grad, weight, ctx.recipe) if ctx.needs_input_grad[0] else None
    weight_grad = None
    if ctx.needs_input_grad[1]:
        weight_grad = float8_mm_grad_weight(grad, weight, x, ctx.recipe)
    return x_grad, weight_grad, None


differentiate(float8_mm, _save, _backward)


def _autocast(device_type: str) -> Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]:
    def cast_inputs(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        # Cast the inputs as autocast does for a linear.
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return float8_mm(x.to(dtype), weight.to(dtype), recipe)

    return cast_inputs


for _device_type in ("cpu", "cuda"):
    implement(float8_mm, f"Autocast{_device_type.upper()}")(_autocast(_device_type))


@implement(local_amax)
def _local_amax(
    shards: list[torch.Tensor], dtype: torch.dtype, group: str, recipe: str
) -> torch.Tensor:
    """Return each shard's largest absolute value, rounded to ``dtype``, as float32 ``[shards]``.

    With the recipe "rowwise", return one value per row instead, ``[rows of all ranks' padded
    shards]``, with 0 in the rows of other ranks.
    """
    # Rounding is monotonic, so the cast may come last.
    if recipe != ROWWISE:
        return foreach_max_abs(shards).to(dtype).float()
    amax = _local_amax_fake(shards, dtype, group, recipe).zero_()
    start, world, rank = 0, process_group(group).size(), process_group(group).rank()
    for shard in shards:
        rows = shard.shape[0]
        own = amax[start + rank * rows :][:rows]
        own.copy_(shard.abs().amax(1).to(dtype))
        start += world * rows
    return amax


@fake(local_amax)
def _local_amax_fake(
    shards: list[torch.Tensor], dtype: torch.dtype, group: str, recipe: str
) -> torch.Tensor:
    world = process_group(group).size()
    sizes = [shard.shape[0] * world if recipe == ROWWISE else 1 for shard in shards]
    return shards[0].new_empty(sum(sizes), dtype=torch.float32)


@implement(own_rows)
def _own_rows(full: torch.Tensor, group: str) -> torch.Tensor:
    """Return this rank's part of a row vector of scales, as a column ``[rows, 1]``.

    Args:
        full: scales, ``[1, rows of all ranks' padded shards]``.
    """
    process = process_group(group)
    return full.view(process.size(), -1, 1)[process.rank()].clone()


@fake(own_rows)
def _own_rows_fake(full: torch.Tensor, group: str) -> torch.Tensor:
    return full.new_empty((full.shape[1] // process_group(group).size(), 1))
