"""The arithmetic of mxfp8 linears: casts with a scale for each block of 32 values, and products.

The format is MXFP8 of the OCP Microscaling Formats specification 1.0, as Blackwell's tensor cores
multiply it: e4m3 values, and for each 32 of them along the dimension over which the product sums,
a power of two in e8m0 (the 8 exponent bits of a float32). The exponent is rounded up, so no value
saturates ("rceil", as in cuBLAS and torchao/prototype/mx_formats/mx_tensor.py).

    y      = x @ w.T     blocks along a row of x,      and along a row of w
    grad_x = g @ w       blocks along a row of g,      and along a column of w
    grad_w = g.T @ x     blocks along a column of g,   and along a column of x

The blocks of a weight differ between forward and backward, and so do its bytes. A gather sends the
scales after the values of each row (``packed``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .float8_math import (
    ALIGNMENT,
    E4M3,
    as_dtype,
    contiguous,
    convert,
    padded,
    transposed_copy,
)
from .nodes import Call, Value, value_of

MXFP8 = "mxfp8"
BLOCK = 32  # values that share a scale

_MANTISSA = 1 << 23  # a float32's bits are its exponent times this, plus its mantissa
_TILE = 128, 4  # rows and columns of scales that tensor cores read together

_aten = torch.ops.aten


class Blocks(NamedTuple):
    """A matrix in mxfp8, with blocks along its rows."""

    values: Any  # e4m3, [rows, columns]
    exponents: Any  # uint8, [rows, columns / 32]: biased exponents of the blocks' scales


def times_transposed(call: Call, left: Value, right: Blocks) -> Any:
    """Return the mxfp8 product ``left @ right.T`` in the dtype of ``left``."""
    return _product(call, by_rows(call, left), right, value_of(left).dtype)


def grad_weight(call: Call, grad: Value, x: Value) -> Any:
    """Return the mxfp8 product ``grad.T @ x`` in the dtype of ``x``."""
    return _product(call, by_columns(call, grad), by_columns(call, x), value_of(x).dtype)


def by_rows(call: Call, x: Value) -> Blocks:
    """Cast ``x`` to mxfp8 in blocks along its rows.

    Raises:
        RuntimeError: the row length is not a multiple of 32.
    """
    columns = value_of(x).shape[1]
    if columns % BLOCK:
        raise RuntimeError(
            f"mxfp8: a linear multiplies rows of {columns} values, not a multiple of {BLOCK}: "
            "pad in_features or out_features, or exclude the linear with fp8.filter_fn"
        )
    return _cast(call, x, 1)


def by_columns(call: Call, x: Value) -> Blocks:
    """Cast ``x.T`` to mxfp8 in blocks along its rows, padded to a multiple of 32 values."""
    return _transposed(call, _cast(call, padded(call, x, 0, BLOCK), 0))


def packed(call: Call, shard: Value, dim: int) -> Any:
    """Return a matrix cast to mxfp8 in blocks along ``dim``, with scales, as one uint8 tensor.

    Its shape is ``[rows, columns * 33 / 32]``. The number of columns must be a multiple of 32; with
    ``dim=0``, the number of rows, too. Scales follow the values of each row; with ``dim=0``, the
    scales that 32 rows share are spread over these rows.
    """
    values, exponents = _cast(call, shard, dim)
    columns = value_of(values).shape[1]
    scales = _view(call, exponents, [-1, columns // BLOCK])
    return call(_aten.cat.default, [call(_aten.view.dtype, values, torch.uint8), scales], 1)


def packed_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the result of ``packed`` for a matrix of the given shape."""
    rows, columns = shape
    return torch.Size([rows, columns + columns // BLOCK])


def unpacked(call: Call, rows: Value, dim: int) -> Blocks:
    """Return the right side of a product, given the gathered rows of ``packed`` shards."""
    width = value_of(rows).shape[1]
    columns = width * BLOCK // (BLOCK + 1)
    values = call(_aten.slice.Tensor, rows, 1, 0, columns)
    values = call(_aten.view.dtype, values, E4M3)
    exponents = call(_aten.slice.Tensor, rows, 1, columns, width)
    if dim == 0:
        return _transposed(call, Blocks(values, _view(call, exponents, [-1, columns])))
    # Tensor cores read rows that are a multiple of 16 bytes apart.
    return Blocks(contiguous(call, values) if width % ALIGNMENT else values, exponents)


def _transposed(call: Call, matrix: Blocks) -> Blocks:
    exponents = call(_aten.permute.default, matrix.exponents, [1, 0])
    return Blocks(call(transposed_copy, matrix.values), contiguous(call, exponents))


def _cast(call: Call, x: Value, dim: int) -> Blocks:
    """Cast ``x`` to mxfp8 in blocks along ``dim``; ``exponents`` has one element per block."""
    columns = value_of(x).shape[1]
    num_across = columns // BLOCK if dim else columns
    blocks = _view(call, x, [-1, num_across, BLOCK] if dim else [-1, BLOCK, columns])
    amax = call(_aten.amax.default, call(_aten.abs.default, blocks), [dim + 1], True)
    # Smallest scale with which no value of a block exceeds the largest e4m3 value, 448.
    least = call(_aten.div.Tensor, as_dtype(call, amax, torch.float32), torch.finfo(E4M3).max)
    bits = call(_aten.view.dtype, least, torch.int32)
    exponent = call(_aten.__rshift__.Scalar, call(_aten.sub.Tensor, bits, 1), 23)
    exponent = call(_aten.add.Tensor, exponent, 1)  # rounded up
    exponent = call(_aten.clamp_max.default, exponent, 255)  # NaN, as in e8m0
    inverse = call(_aten.mul.Tensor, call(_aten.sub.Tensor, exponent, 254), -_MANTISSA)
    inverse = call(_aten.view.dtype, inverse, torch.float32)
    scaled = call(_aten.mul.Tensor, as_dtype(call, blocks, torch.float32), inverse)
    return Blocks(
        _view(call, call(convert, scaled, E4M3), [-1, columns]),
        _view(call, call(convert, exponent, torch.uint8), [-1, num_across]),
    )


def _product(call: Call, a: Blocks, b: Blocks, dtype: torch.dtype) -> Any:
    """Return ``a @ b.T``."""
    if value_of(a.values).device.type == "cpu":  # CPUs have no such product
        left, right = _exact(call, a, dtype), _exact(call, b, dtype)
        return call(_aten.mm.default, left, call(_aten.permute.default, right, [1, 0]))
    product = call(
        _aten._scaled_mm.default,
        a.values,
        call(_aten.permute.default, b.values, [1, 0]),
        _tiled(call, a.exponents),
        _tiled(call, b.exponents),
        out_dtype=torch.bfloat16,  # as in torchao, also for float32
    )
    return as_dtype(call, product, dtype)


def _exact(call: Call, matrix: Blocks, dtype: torch.dtype) -> Any:
    """Dequantize the matrix to ``dtype``, which can represent its values exactly."""
    bits = call(_aten.mul.Tensor, call(convert, matrix.exponents, torch.int32), _MANTISSA)
    scales = call(_aten.unsqueeze.default, call(_aten.view.dtype, bits, torch.float32), 2)
    values = call(convert, matrix.values, torch.float32)
    blocks = _view(call, values, [*_sizes(matrix.exponents), BLOCK])
    scaled = call(_aten.mul.Tensor, blocks, scales)
    return as_dtype(call, _view(call, scaled, _sizes(matrix.values)), dtype)


def _tiled(call: Call, exponents: Value) -> Any:
    """Return scales as a 1D tensor of e8m0, in the order in which tensor cores read them.

    Scales are padded to whole tiles (cuBLAS documentation, 1D Block Scaling Factors Layout).
    """
    rows, columns = _TILE
    whole = padded(call, padded(call, exponents, 0, rows), 1, columns)
    down, across = (-1 if n < 0 else n // tile for n, tile in zip(_sizes(whole), _TILE))
    tiles = _view(call, whole, [down, 4, rows // 4, across, columns])
    ordered = contiguous(call, call(_aten.permute.default, tiles, [0, 3, 2, 1, 4]))
    return call(_aten.view.dtype, _view(call, ordered, [-1]), torch.float8_e8m0fnu)


def _sizes(x: Value) -> list[int]:
    """Return the sizes for a view, with -1 for the symbolic one, if any."""
    return [size if isinstance(size, int) else -1 for size in value_of(x).shape]


def _view(call: Call, x: Value, shape: list[Any]) -> Any:
    return call(_aten.view.default, contiguous(call, x), shape)
