"""The arithmetic of fp8 linears: scaled casts and products.

Scaling is dynamic, as in the recipes of ``torchao.float8`` (torchao/float8/config.py,
float8_utils.py). Before each of a linear's three products, both sides are multiplied by a scale,
``largest fp8 value / largest absolute value``, then clamped and cast; the product is divided by
both scales, except in "rowwise" ``grad_x`` (see ``grad_input``):

    y      = x8 @ w8.T          x8: e4m3   w8: e4m3
    grad_x = g8 @ w8            g8: e5m2 ("tensorwise"), e4m3 ("rowwise")
    grad_w = g8.T @ x8

"tensorwise" has one scale per tensor. "rowwise" has one scale, rounded down to a power of two, for
each row of the left matrix and each column of the right one. Unlike in torchao, ``grad_x`` uses the
``w8`` of forward, with one scale per row of ``w``: ``g`` is divided by these scales, then scaled
and cast itself.

Functions that take a ``Call`` run operators, or insert them into a graph.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TypeVar

import torch

from .._torch.inductor import lower_as_transposed_copy
from .library import define, fake, implement
from .nodes import Call, Value, value_of

# Recipes with scales that all ranks share; ``mx_math.MXFP8`` has a scale for every 32 values.
TENSORWISE, ROWWISE = RECIPES = ("tensorwise", "rowwise")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.bfloat16, torch.float32)  # accepted for inputs and results of fp8 products

_EPS = 1e-12  # smallest amax, as in torchao/float8/float8_utils.py
_EXPONENT = 0x7F800000  # exponent bits of a float32
ALIGNMENT = 16

_Value = TypeVar("_Value", bound=Value)

_aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def is_of_torchao(value: object) -> bool:
    """Return whether the type of ``value`` is from ``torchao.float8``; does not import torchao."""
    return type(value).__module__.startswith("torchao.float8.")


class Scaled(NamedTuple):
    """A matrix in fp8, and the factor that undoes its scaling."""

    values: Value
    inverse: Value  # a scalar, or one value for each vector that the product sums over


def scale_of(call: Call, amax: _Value, dtype: torch.dtype, recipe: str) -> _Value:
    """Return the scale for a largest absolute value, like torchao's ``amax_to_scale``."""
    wide = call(_aten.clamp_min.default, call(convert, amax, torch.float64), _EPS)
    inverse = call(_aten.mul.Tensor, call(_aten.reciprocal.default, wide), torch.finfo(dtype).max)
    scale = call(convert, inverse, torch.float32)
    if recipe == TENSORWISE:
        return scale
    bits = call(_aten.view.dtype, scale, torch.int32)
    exponent = call(_aten.bitwise_and.Scalar, bits, _EXPONENT)
    return call(_aten.view.dtype, exponent, torch.float32)


def cast(call: Call, x: _Value, scale: Value, dtype: torch.dtype, dim: int) -> _Value:
    """Return ``x * scale`` as ``dtype``, saturated.

    Args:
        dim: dimension of ``x`` over which the matrix product sums; used if ``scale`` is a vector.
    """
    largest = torch.finfo(dtype).max
    if value_of(scale).dim() == 1:
        scale = call(_aten.unsqueeze.default, scale, dim)
    scaled = call(_aten.mul.Tensor, as_dtype(call, x, torch.float32), scale)
    # Eager casts saturate only from torch 2.12 on.
    clamped = call(
        _aten.clamp_max.default, call(_aten.clamp_min.default, scaled, -largest), largest
    )
    return call(convert, clamped, dtype)


def quantized(call: Call, x: _Value, dtype: torch.dtype, recipe: str, dim: int) -> Scaled:
    """Cast ``x`` to fp8 with scales computed from its largest absolute values.

    Args:
        dim: dimension of ``x`` over which the matrix product sums; used by "rowwise".
    """
    scale = scale_of(call, _amax(call, x, [] if recipe == TENSORWISE else [dim]), dtype, recipe)
    return Scaled(cast(call, x, scale, dtype, dim), call(_aten.reciprocal.default, scale))


def _amax(call: Call, x: _Value, dims: list[int]) -> _Value:
    value = value_of(x)
    if isinstance(value.numel(), int) and not value.numel():  # amax refuses empty tensors
        shape = [value.shape[1 - dim] for dim in dims]
        return call(_aten.full.default, shape, 0.0, dtype=value.dtype, device=value.device)
    return call(_aten.amax.default, call(_aten.abs.default, x), dims)


def forward(call: Call, x: _Value, weight: Scaled, recipe: str) -> _Value:
    """Return the fp8 product ``x @ weight.T`` in the dtype of ``x``."""
    left = quantized(call, x, E4M3, recipe, 1)
    left = left._replace(values=_row_major(call, left.values))
    return _product(call, left, _transposed(call, weight), value_of(x).dtype, recipe, fast=True)


def grad_input(call: Call, grad: _Value, weight: Scaled, recipe: str) -> _Value:
    """Return the fp8 product ``grad @ weight`` in the dtype of ``grad``."""
    dtype = value_of(grad).dtype
    if recipe == ROWWISE:
        # grad @ (values / scale) sums over the weight's rows, whose scales differ: divide the
        # gradient by the scales instead.
        grad = call(_aten.mul.Tensor, as_dtype(call, grad, torch.float32), weight.inverse)
        values = value_of(weight.values)
        options = {"dtype": torch.float32, "device": values.device}
        ones = call(_aten.full.default, [values.shape[1]], 1.0, **options)
        weight = Scaled(weight.values, ones)
    return _product(call, _grad(call, grad, recipe, 1), weight, dtype, recipe)


def grad_weight(call: Call, grad: _Value, x: _Value, recipe: str) -> _Value:
    """Return the fp8 product ``grad.T @ x`` in the dtype of ``x``."""
    if value_of(x).device.type == "cuda":
        # Tensor cores can only sum over a multiple of ``ALIGNMENT`` rows.
        grad, x = padded(call, grad, 0, ALIGNMENT), padded(call, x, 0, ALIGNMENT)
    left, right = _grad(call, grad, recipe, 0), quantized(call, x, E4M3, recipe, 0)
    if recipe == ROWWISE:
        left = left._replace(values=call(transposed_copy, left.values))
        right = right._replace(values=_t(call, call(transposed_copy, right.values)))
    else:
        left = _transposed(call, left)
        right = right._replace(values=_column_major(call, right.values))
    return _product(call, left, right, value_of(x).dtype, recipe)


# A transposed copy that Inductor writes in a separate kernel. Fused into a kernel that reduces rows
# of the same values, it would store single bytes, each in a different sector of 32 bytes:
#     fused    read a row, reduce it, write the row, write a column
#     here     read a row, reduce it, write the row;  read a tile of rows, write it as columns
# The second kernel costs two more bytes of traffic per element.
transposed_copy = define("transposed_copy(Tensor x) -> Tensor")
implement(transposed_copy)(lambda x: x.t().clone(memory_format=torch.contiguous_format))
fake(transposed_copy)(lambda x: x.new_empty((x.shape[1], x.shape[0])))
lower_as_transposed_copy(transposed_copy)


def padded(call: Call, x: Value, dim: int, multiple: int) -> Any:
    """Pad ``dim`` of a matrix with zeros to a multiple of ``multiple``."""
    missing: Any = -value_of(x).shape[dim] % multiple
    if not isinstance(missing, int):
        missing = call(operator.mod, call(operator.neg, _size(call, x, dim)), multiple)
    elif not missing:
        return x
    return call(_aten.constant_pad_nd.default, x, [0, missing] if dim else [0, 0, 0, missing])


def _grad(call: Call, grad: _Value, recipe: str, dim: int) -> Scaled:
    return quantized(call, grad, E5M2 if recipe == TENSORWISE else E4M3, recipe, dim)


def _product(
    call: Call, a: Scaled, b: Scaled, dtype: torch.dtype, recipe: str, *, fast: bool = False
) -> Any:
    """Return ``a @ b`` with the scaling undone; ``a`` is made row-major and ``b`` column-major."""
    product = call(
        _aten._scaled_mm.default,
        contiguous(call, a.values),
        b.values if _is_column_major(b.values) else _t(call, contiguous(call, _t(call, b.values))),
        _factor(call, a.inverse, recipe, 1),
        _factor(call, b.inverse, recipe, 0),
        # Kernels with row-wise scales only write bfloat16 (torchao/float8/float8_ops.py).
        out_dtype=dtype if recipe == TENSORWISE else torch.bfloat16,
        use_fast_accum=fast,
    )
    return as_dtype(call, product, dtype)


def _transposed(call: Call, matrix: Scaled) -> Scaled:
    return matrix._replace(values=_t(call, matrix.values))


def _factor(call: Call, inverse: _Value, recipe: str, dim: int) -> _Value:
    """Return an inverse scale in the shape that ``_scaled_mm`` expects."""
    num_dims = value_of(inverse).dim()
    # Inductor requires the same number of dimensions for both sides.
    if recipe == TENSORWISE and num_dims:
        return call(_aten.view.default, inverse, [])
    if num_dims != 1:
        return inverse
    sizes: list[Any] = [_size(call, inverse, 0)]
    sizes.insert(dim, 1)
    # Some kernels check that all strides are 1.
    return call(_aten.as_strided.default, inverse, sizes, [1, 1])


# ``as_strided`` makes Inductor write an operand once, in the layout that ``_scaled_mm`` requires,
# instead of once for each linear that reads a cast of the same input. It also keeps a transposed
# operand out of kernels that reduce over rows, such as a norm's backward, which would store single
# bytes far apart. With row-wise scales, only ``transposed_copy`` prevents such stores.


def _row_major(call: Call, x: _Value) -> _Value:
    rows, columns = _size(call, x, 0), _size(call, x, 1)
    return call(_aten.as_strided.default, contiguous(call, x), [rows, columns], [columns, 1])


def _column_major(call: Call, x: _Value) -> _Value:
    rows, columns = _size(call, x, 0), _size(call, x, 1)
    transposed = contiguous(call, _t(call, x))
    return call(_aten.as_strided.default, transposed, [rows, columns], [1, rows])


def _size(call: Call, x: Value, dim: int) -> Any:
    size = value_of(x).shape[dim]
    return size if isinstance(size, int) else call(_aten.sym_size.int, x, dim)


def _t(call: Call, x: _Value) -> _Value:
    return call(_aten.permute.default, x, [1, 0])


def _is_column_major(x: Value) -> bool:
    return value_of(x).t().is_contiguous()


def contiguous(call: Call, x: _Value) -> _Value:
    """Return ``x`` with contiguous memory, copied if necessary."""
    if value_of(x).is_contiguous():
        return x
    return call(_aten.clone.default, x, memory_format=torch.contiguous_format)


def as_dtype(call: Call, x: _Value, dtype: torch.dtype) -> _Value:
    """Convert ``x`` to ``dtype``, unless it has that dtype."""
    return x if value_of(x).dtype == dtype else call(convert, x, dtype)
