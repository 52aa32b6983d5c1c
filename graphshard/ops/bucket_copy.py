"""Ops that copy into the buffers that travel, and out of them; opaque to Inductor: see ``graphshard.ops.collectives``."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .._torch.tensors import foreach_copy_
from .accumulators import take

_lib = torch.library.Library("graphshard", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_lib.define(
    "copy_in(Tensor[] tensors, int[] rows, str[] dtypes, int[] counts, str[] wires, int world)"
    " -> Tensor[]",
    tags=_tags,
)
_lib.define("unpack(Tensor flat, int[] sizes, int world) -> Tensor[]", tags=_tags)
_lib.define(
    "add_sums(Tensor flat, Tensor[] keys, int[] starts, ScalarType dtype) -> Tensor", tags=_tags
)
copy_in = torch.ops.graphshard.copy_in.default
unpack = torch.ops.graphshard.unpack.default
add_sums = torch.ops.graphshard.add_sums.default


def _impl(name: str) -> Any:
    return torch.library.impl(_lib, name, "CompositeExplicitAutograd")


@_impl("copy_in")
def _copy_in(
    tensors: list[torch.Tensor],
    rows: list[int],
    dtypes: list[str],
    counts: list[int],
    wires: list[str],
    world: int,
) -> list[torch.Tensor]:
    buffers = _copy_in_fake(tensors, rows, dtypes, counts, wires, world)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    pieces = zip(tensors, rows, dtypes, strict=True)
    for buffer, count in zip(buffers, counts):
        start = 0
        for tensor, num_rows, name in itertools.islice(pieces, count):
            flat = _on_the_wire(tensor, getattr(torch, name), buffer.dtype)
            stop = start + _sent_by_rank(flat, tensor, num_rows)
            part = buffer.view(world, buffer.numel() // world)[:, start:stop]
            start = stop
            if not flat.numel():
                continue
            whole, rest = divmod(flat.numel(), part.shape[1])
            targets.append(part[:whole])
            sources.append(flat[: flat.numel() - rest].view(whole, -1))
            if whole < world:
                part[whole:].zero_()
                targets.append(part[whole, :rest])
                sources.append(flat[flat.numel() - rest :])
    if targets:
        foreach_copy_(targets, sources)
    return buffers


def _on_the_wire(tensor: torch.Tensor, dtype: torch.dtype, wire: torch.dtype) -> torch.Tensor:
    """``tensor`` in one dimension, as bytes where ``wire`` is not its ``dtype``; else cast later."""
    return tensor.reshape(-1) if wire == dtype else tensor.to(dtype).reshape(-1).view(torch.uint8)


def _sent_by_rank(flat: torch.Tensor, tensor: torch.Tensor, num_rows: int) -> int:
    """How many of the elements of ``flat``, padding included."""
    return flat.numel() // tensor.shape[0] * num_rows if num_rows else flat.numel()


@torch.library.register_fake("graphshard::copy_in", lib=_lib)
def _copy_in_fake(
    tensors: list[torch.Tensor],
    rows: list[int],
    dtypes: list[str],
    counts: list[int],
    wires: list[str],
    world: int,
) -> list[torch.Tensor]:
    buffers = []
    pieces = zip(tensors, rows, dtypes, strict=True)
    for count, name in zip(counts, wires, strict=True):
        wire = getattr(torch, name)
        num_bytes = sum(
            _sent_by_rank(tensor, tensor, num_rows) * getattr(torch, dtype).itemsize
            for tensor, num_rows, dtype in itertools.islice(pieces, count)
        )
        buffers.append(tensors[0].new_empty(world * num_bytes // wire.itemsize, dtype=wire))
    return buffers


@_impl("unpack")
def _unpack(flat: torch.Tensor, sizes: list[int], world: int) -> list[torch.Tensor]:
    return list(torch.ops.aten.split_with_sizes_copy.default(flat.view(world, -1), sizes, 1))


@torch.library.register_fake("graphshard::unpack", lib=_lib)
def _unpack_fake(flat: torch.Tensor, sizes: list[int], world: int) -> list[torch.Tensor]:
    return [flat.new_empty((world, size)) for size in sizes]


@_impl("add_sums")
def _add_sums(
    flat: torch.Tensor, keys: list[torch.Tensor], starts: list[int], dtype: torch.dtype
) -> torch.Tensor:
    total = flat.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for key, start in zip(keys, starts):
        if (of := take(key)) is not None:
            total.view(-1)[start : start + of.numel()].view(of.shape).add_(of.to(total))
    return total


@torch.library.register_fake("graphshard::add_sums", lib=_lib)
def _add_sums_fake(
    flat: torch.Tensor, keys: list[torch.Tensor], starts: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return flat.new_empty(flat.shape, dtype=dtype)
