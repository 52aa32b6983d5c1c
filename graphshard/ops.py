"""The marker ops: what a sharded parameter and its gradient are in every graph before lowering.

A parameter enters the graph as its padded local shard. ``unshard`` makes the full parameter of it
and autograd turns the full gradient back into a shard by ``reduce_grad``, averaged over the group:

    forward    shard ─► unshard ─► linear          backward   grad ─► reduce_grad ─► shard's gradient

A parameter without rows to split (a scalar) is replicated: ``replicate`` and ``all_reduce_grad``.
The ops are opaque to Dynamo, AOTAutograd and Inductor's joint passes; ``graphshard.passes`` lowers
them to functional collectives. ``reshard`` says whether the full parameter is given up after forward
and gathered again in backward (ZeRO-3), or kept (ZeRO-2). In eager parts of a model they run for real, by the same lowering.

[Note: padded shards] Rows are split as ``torch.chunk`` splits them: ``ceil(rows / world)`` to each
rank, the last ranks with fewer or none. The tensor that enters the graph is padded to
``ceil(rows / world)`` rows on every rank, so that all ranks trace one and the same graph. Gathered
rows past ``rows`` are padding, cut off by a view; the padding of a gradient is zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ._torch import group_size

_lib = torch.library.Library("graphshard", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_lib.define("unshard(Tensor shard, int rows, str group, bool reshard) -> Tensor", tags=_tags)
_lib.define("reduce_grad(Tensor grad, int padded_rows, str group) -> Tensor", tags=_tags)
_lib.define("replicate(Tensor param, str group) -> Tensor", tags=_tags)
_lib.define("all_reduce_grad(Tensor grad, str group) -> Tensor", tags=_tags)
_lib.define("pack(Tensor[] tensors, int world) -> Tensor", tags=_tags)
_lib.define("unpack(Tensor flat, int[] sizes, int world) -> Tensor[]", tags=_tags)

unshard = torch.ops.graphshard.unshard.default
reduce_grad = torch.ops.graphshard.reduce_grad.default
replicate = torch.ops.graphshard.replicate.default
all_reduce_grad = torch.ops.graphshard.all_reduce_grad.default
# One buffer of the parts of several tensors, rank by rank, and back. Opaque to Inductor: the C++ of a
# `cat` of a hundred tensors takes longer to compile than the rest of a graph, and slices of one
# buffer differ in their offsets, so that equal layers would not share their kernels.
pack = torch.ops.graphshard.pack.default
unpack = torch.ops.graphshard.unpack.default
UNSHARD = (unshard, replicate)
REDUCE = (reduce_grad, all_reduce_grad)

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
# What no backend refuses; other dtypes travel as bytes.
ON_THE_WIRE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}
    | {torch.int8, torch.int32, torch.int64}
)

Call = Callable[..., Any]
"""``call(op, *args)``: runs ``op`` (eager) or inserts it into a graph (lowering)."""


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def all_gather_rows(
    call: Call, shard: Any, meta: torch.Tensor, rows: int, group: str, world: int
) -> Any:
    """Padded shards ``[ceil(rows / world), ...]`` of ``world`` ranks to the full ``[rows, ...]``.

    ``meta`` tells shape and dtype of ``shard``, which is a graph node in the lowering.
    """
    wire, back = _to_wire(call, shard, meta.dtype)
    full = call(_c10d.all_gather_into_tensor.default, wire, world, group)
    full = back(call(_c10d.wait_tensor.default, full))
    padding = meta.shape[0] * world - rows
    return call(_aten.slice.Tensor, full, 0, 0, rows) if padding else full


def _to_wire(call: Call, shard: Any, dtype: torch.dtype) -> tuple[Any, Callable[[Any], Any]]:
    """``shard`` in a dtype that every backend gathers, and the way back."""
    if dtype in ON_THE_WIRE:
        return shard, lambda full: full
    if dtype is torch.bool:  # Inductor's C++ cannot view bytes as bool
        wire = call(_convert, shard, torch.uint8)
        return wire, lambda full: call(_convert, full, torch.bool)
    wire = call(_aten.view.dtype, call(_aten.unsqueeze.default, shard, -1), torch.uint8)
    return wire, lambda full: call(_aten.squeeze.dim, call(_aten.view.dtype, full, dtype), -1)


def reduce_scatter_rows(
    call: Call, grad: Any, meta: torch.Tensor, padded_rows: int, group: str, world: int
) -> Any:
    """The mean over ``world`` ranks of the full ``[rows, ...]``: this rank's padded shard of it."""
    if not meta.is_contiguous():
        grad = call(_aten.clone.default, grad, memory_format=torch.contiguous_format)
    grad = _padded(call, grad, meta, padded_rows * world)
    shard = call(_c10d.reduce_scatter_tensor.default, grad, "avg", world, group)
    return call(_c10d.wait_tensor.default, shard)


def _padded(call: Call, grad: Any, meta: torch.Tensor, rows: int) -> Any:
    """``grad`` with zero rows added up to ``rows``."""
    if meta.shape[0] == rows:
        return grad
    pad = [0, 0] * (meta.dim() - 1) + [0, rows - meta.shape[0]]
    return call(_aten.constant_pad_nd.default, grad, pad)


def all_gather_packed(
    call: Call,
    shards: list[Any],
    metas: list[torch.Tensor],
    rows: list[int],
    group: str,
    world: int,
) -> list[Any]:
    """Several ``all_gather_rows`` in one buffer; all of one dtype."""
    full = call(_c10d.all_gather_into_tensor.default, call(pack, shards, 1), world, group)
    full = call(_c10d.wait_tensor.default, full)
    parts = call(unpack, full, [meta.numel() for meta in metas], world)
    gathered = []
    for i, (meta, num_rows) in enumerate(zip(metas, rows)):
        padded = [world * meta.shape[0], *meta.shape[1:]]
        whole = call(_aten.view.default, call(operator.getitem, parts, i), padded)
        cut = padded[0] != num_rows
        gathered.append(call(_aten.slice.Tensor, whole, 0, 0, num_rows) if cut else whole)
    return gathered


def reduce_scatter_packed(
    call: Call, grads: list[Any], metas: list[torch.Tensor], rows: list[int], group: str, world: int
) -> list[Any]:
    """Several ``reduce_scatter_rows`` in one buffer; ``rows`` are padded rows of a shard."""
    padded = [
        _padded(call, grad, meta, num_rows * world)
        for grad, meta, num_rows in zip(grads, metas, rows)
    ]
    packed = call(pack, padded, world)
    reduced = call(_c10d.reduce_scatter_tensor.default, packed, "avg", world, group)
    reduced = call(_c10d.wait_tensor.default, reduced)
    shards, start = [], 0
    for meta, num_rows in zip(metas, rows):
        shape = torch.Size([num_rows, *meta.shape[1:]])
        part = call(_aten.slice.Tensor, reduced, 0, start, start + shape.numel())
        shards.append(call(_aten.reshape.default, part, list(shape)))
        start += shape.numel()
    return shards


def all_reduce_mean(call: Call, grad: Any, meta: torch.Tensor, group: str, world: int) -> Any:
    # gloo has no "avg" for all-reduce.
    if not meta.is_contiguous():
        grad = call(_aten.clone.default, grad, memory_format=torch.contiguous_format)
    total = call(_c10d.all_reduce.default, grad, "sum", group)
    return call(_aten.div.Scalar, call(_c10d.wait_tensor.default, total), world)


def _impl(name: str, key: str) -> Any:
    return torch.library.impl(_lib, name, key)


@_impl("unshard", "CompositeExplicitAutograd")
def _unshard(shard: torch.Tensor, rows: int, group: str, reshard: bool) -> torch.Tensor:
    return all_gather_rows(run, shard, shard, rows, group, group_size(group))


@_impl("reduce_grad", "CompositeExplicitAutograd")
def _reduce_grad(grad: torch.Tensor, padded_rows: int, group: str) -> torch.Tensor:
    return reduce_scatter_rows(run, grad, grad, padded_rows, group, group_size(group))


@_impl("replicate", "CompositeExplicitAutograd")
def _replicate(param: torch.Tensor, group: str) -> torch.Tensor:
    return param.clone()


@_impl("all_reduce_grad", "CompositeExplicitAutograd")
def _all_reduce_grad(grad: torch.Tensor, group: str) -> torch.Tensor:
    return all_reduce_mean(run, grad, grad, group, group_size(group))


@_impl("pack", "CompositeExplicitAutograd")
def _pack(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    return torch.cat([tensor.reshape(world, -1) for tensor in tensors], 1).view(-1)


@torch.library.register_fake("graphshard::pack", lib=_lib)
def _pack_fake(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


@_impl("unpack", "CompositeExplicitAutograd")
def _unpack(flat: torch.Tensor, sizes: list[int], world: int) -> list[torch.Tensor]:
    return list(_aten.split_with_sizes_copy.default(flat.view(world, -1), sizes, 1))


@torch.library.register_fake("graphshard::unpack", lib=_lib)
def _unpack_fake(flat: torch.Tensor, sizes: list[int], world: int) -> list[torch.Tensor]:
    return [flat.new_empty((world, size)) for size in sizes]


@torch.library.register_fake("graphshard::unshard", lib=_lib)
def _unshard_fake(shard: torch.Tensor, rows: int, group: str, reshard: bool) -> torch.Tensor:
    return shard.new_empty((rows, *shard.shape[1:]))


@torch.library.register_fake("graphshard::reduce_grad", lib=_lib)
def _reduce_grad_fake(grad: torch.Tensor, padded_rows: int, group: str) -> torch.Tensor:
    return grad.new_empty((padded_rows, *grad.shape[1:]))


@torch.library.register_fake("graphshard::replicate", lib=_lib)
def _replicate_fake(param: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(param, memory_format=torch.contiguous_format)


@torch.library.register_fake("graphshard::all_reduce_grad", lib=_lib)
def _all_reduce_grad_fake(grad: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save_unshard(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    shard, _, ctx.group, _ = inputs
    ctx.padded_rows = shard.shape[0]


def _unshard_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return torch.ops.graphshard.reduce_grad(grad, ctx.padded_rows, ctx.group), None, None, None


def _save_replicate(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group = inputs


def _replicate_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.graphshard.all_reduce_grad(grad, ctx.group), None


torch.library.register_autograd(
    "graphshard::unshard", _unshard_backward, setup_context=_save_unshard, lib=_lib
)
torch.library.register_autograd(
    "graphshard::replicate", _replicate_backward, setup_context=_save_replicate, lib=_lib
)
