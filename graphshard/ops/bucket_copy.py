"""Operators that copy into and out of packed buffers, opaque to Inductor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from .._torch.tensors import chunk_cat_, chunk_cat_is_one_kernel, foreach_copy_
from .accumulators import take
from .library import define, dtype_named, fake, implement

# Opaque for two reasons: Inductor's C++ for a ``cat`` of a hundred tensors takes longer to compile
# than the rest of a graph; and slices of one buffer differ in offset, which would keep equal layers
# from sharing kernels.
copy_in = define(
    "copy_in(Tensor[] tensors, int[] rows, str[] wire_dtypes, int[] counts, str[] buffer_dtypes,"
    " int world) -> Tensor[]"
)
copy_out = define("copy_out(Tensor buffer, int[] sizes, int world) -> Tensor[]")
add_accumulated = define(
    "add_accumulated(Tensor flat, Tensor[] keys, int[] starts, ScalarType dtype) -> Tensor"
)


@implement(copy_in)
def _copy_in(
    tensors: list[torch.Tensor],
    rows: list[int],
    wire_dtypes: list[str],
    counts: list[int],
    buffer_dtypes: list[str],
    world: int,
) -> list[torch.Tensor]:
    """Cast, pad and pack tensors: the first ``counts[0]`` into the first buffer, and so on.

    Args:
        rows: number of rows of each tensor to send to each rank, or 0 for a tensor without rows.
        buffer_dtypes: dtype of each buffer, or uint8 if its tensors are sent as bytes.
        world: number of ranks that a reduce-scatter splits each buffer among; 1 for other
            collectives.
    """
    buffers = _copy_in_fake(tensors, rows, wire_dtypes, counts, buffer_dtypes, world)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    transfers = zip(tensors, rows, wire_dtypes, strict=True)
    for buffer, count in zip(buffers, counts):
        own = [sent for sent in itertools.islice(transfers, count) if sent[0].numel()]
        if _is_chunk_cat(buffer, own, world):
            chunk_cat_(buffer.view(world, -1), [tensor for tensor, _, _ in own])
        else:
            parts += _parts(buffer, own, world)
    if parts:
        foreach_copy_(*zip(*parts))
    return buffers


# A tensor, the number of its rows to send to each rank, and its wire dtype.
_PackedTensor: TypeAlias = tuple[torch.Tensor, int, str]


def _is_chunk_cat(buffer: torch.Tensor, sent: Sequence[_PackedTensor], world: int) -> bool:
    """Return whether one kernel can pack ``sent`` for several ranks."""
    if world == 1 or not sent:
        return False
    evenly = all(rows and rows == -(-tensor.shape[0] // world) for tensor, rows, _ in sent)
    on_gpu = buffer.device.type == "cuda"  # a CPU makes padded copies first
    return on_gpu and evenly and chunk_cat_is_one_kernel(buffer, [tensor for tensor, _, _ in sent])


def _parts(
    buffer: torch.Tensor, sent: Sequence[_PackedTensor], world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of a buffer, each with its source; set the padding to zero."""
    start = 0
    for tensor, num_rows, dtype in sent:
        flat = _flattened(tensor, dtype_named(dtype), buffer.dtype)
        stop = start + _num_sent_per_rank(flat, tensor, num_rows)
        part = buffer.view(world, buffer.numel() // world)[:, start:stop]
        start = stop
        num_full, rest = divmod(flat.numel(), part.shape[1])
        yield part[:num_full], flat[: flat.numel() - rest].view(num_full, -1)
        if num_full < world:
            part[num_full:].zero_()
            yield part[num_full, :rest], flat[flat.numel() - rest :]


def _flattened(tensor: torch.Tensor, dtype: torch.dtype, buffer_dtype: torch.dtype) -> torch.Tensor:
    if buffer_dtype == dtype:
        return tensor.reshape(-1)  # the copy casts it
    return tensor.to(dtype).reshape(-1).view(torch.uint8)


def _num_sent_per_rank(flat: torch.Tensor, tensor: torch.Tensor, num_rows: int) -> int:
    """Return the number of elements of ``flat`` that are sent to each rank, including padding."""
    return flat.numel() // tensor.shape[0] * num_rows if num_rows else flat.numel()


@fake(copy_in)
def _copy_in_fake(
    tensors: list[torch.Tensor],
    rows: list[int],
    wire_dtypes: list[str],
    counts: list[int],
    buffer_dtypes: list[str],
    world: int,
) -> list[torch.Tensor]:
    buffers = []
    transfers = zip(tensors, rows, wire_dtypes, strict=True)
    for count, name in zip(counts, buffer_dtypes, strict=True):
        buffer_dtype = dtype_named(name)
        num_bytes = sum(
            _num_sent_per_rank(tensor, tensor, num_rows) * dtype_named(dtype).itemsize
            for tensor, num_rows, dtype in itertools.islice(transfers, count)
        )
        size = world * num_bytes // buffer_dtype.itemsize
        buffers.append(tensors[0].new_empty(size, dtype=buffer_dtype))
    return buffers


@implement(copy_out)
def _copy_out(buffer: torch.Tensor, sizes: list[int], world: int) -> list[torch.Tensor]:
    """Split a buffer of all ranks' parts into a contiguous ``[world, size]`` tensor per size."""
    parts = _copy_out_fake(buffer, sizes, world)
    # Without ``out``, CUDA would launch one kernel per output.
    torch.split_with_sizes_copy(buffer.view(world, -1), sizes, 1, out=parts)
    return parts


@fake(copy_out)
def _copy_out_fake(buffer: torch.Tensor, sizes: list[int], world: int) -> list[torch.Tensor]:
    return [buffer.new_empty((world, size)) for size in sizes]


@implement(add_accumulated)
def _add_accumulated(
    flat: torch.Tensor, keys: list[torch.Tensor], starts: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Take the totals of accumulators, and add them to a copy of ``flat`` in ``dtype``.

    Args:
        keys: keys of the accumulators; one without a total adds nothing.
        starts: position in ``flat`` of the first element that each total is added to.
    """
    result = flat.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for key, start in zip(keys, starts):
        if (total := take(key)) is not None:
            part = result.view(-1)[start : start + total.numel()]
            part.view(total.shape).add_(total.to(result))
    return result


fake(add_accumulated)(lambda flat, keys, starts, dtype: flat.new_empty(flat.shape, dtype=dtype))
