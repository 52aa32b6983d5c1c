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
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ._torch import process_group
from .plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

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
MARKERS = (*UNSHARD, *REDUCE)
KINDS: dict[Any, str] = {
    unshard: ALL_GATHER,
    reduce_grad: REDUCE_SCATTER,
    all_reduce_grad: ALL_REDUCE,
}
"""The collective of every marker that communicates."""

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
EXCHANGE = _c10d.all_to_all_single.default
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


def _value(of: Any) -> torch.Tensor:
    """A tensor, or that of a node."""
    return of.meta["val"] if isinstance(of, fx.Node) else of


def exchanges(group: str) -> bool:
    """Whether ranks reduce to shards by an exchange of them, each averaging what it receives.

    gloo itself does an all-reduce of a copy (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), which
    sends twice as much and took 52 ms beside 20 for 40 MB on two ranks.
    """
    backends = dist.get_backend_config(process_group(group)).split(",")
    return all(backend.endswith(":gloo") for backend in backends)


def launch(call: Call, kind: str, wires: list[Any], group: str, world: int) -> list[Any]:
    """One collective for all ``wires``, coalesced where they are several: what to wait for."""
    if kind == REDUCE_SCATTER and exchanges(group):
        sizes = [[_value(wire).shape[0] // world] * world for wire in wires]
        return [call(EXCHANGE, wire, size, size, group) for wire, size in zip(wires, sizes)]
    one, many, args = {
        ALL_GATHER: (
            _c10d.all_gather_into_tensor.default,
            _c10d.all_gather_into_tensor_coalesced.default,
            (world, group),
        ),
        REDUCE_SCATTER: (
            _c10d.reduce_scatter_tensor.default,
            _c10d.reduce_scatter_tensor_coalesced.default,
            ("avg", world, group),
        ),
        # gloo has no "avg" for all-reduce.
        ALL_REDUCE: (
            _c10d.all_reduce.default,
            _c10d.all_reduce_coalesced.default,
            ("sum", group),
        ),
    }[kind]
    if len(wires) == 1:
        return [call(one, wires[0], *args)]
    launched = call(many, wires, *args)
    return [call(operator.getitem, launched, i) for i in range(len(wires))]


def wait(call: Call, buffer: Any) -> Any:
    return call(_c10d.wait_tensor.default, buffer)


def gather_input(call: Call, shards: Sequence[Any], metas: Sequence[torch.Tensor]) -> Any:
    """What travels of padded shards that share a buffer, or of a single one.

    ``metas`` tell shapes and dtypes of ``shards``, which are graph nodes in the lowering.
    """
    wires = [_to_wire(call, s, m.dtype, _wire_dtype(m, metas)) for s, m in zip(shards, metas)]
    return wires[0] if len(wires) == 1 else call(pack, wires, 1)


def gather_output(
    call: Call, buffer: Any, metas: Sequence[torch.Tensor], rows: Sequence[int], world: int
) -> list[Any]:
    """The full ``[rows, ...]`` of each padded shard ``[ceil(rows / world), ...]``, gathered."""
    shapes = [_wire_shape(meta, _wire_dtype(meta, metas)) for meta in metas]
    if len(metas) == 1:
        parts = [buffer]
    else:
        unpacked = call(unpack, buffer, [shape.numel() for shape in shapes], world)
        parts = [
            call(
                _aten.view.default,
                call(operator.getitem, unpacked, i),
                [world * shape[0], *shape[1:]],
            )
            for i, shape in enumerate(shapes)
        ]
    gathered = []
    for part, meta, num_rows in zip(parts, metas, rows):
        full = _from_wire(call, part, meta.dtype, _wire_dtype(meta, metas))
        cut = meta.shape[0] * world != num_rows
        gathered.append(call(_aten.slice.Tensor, full, 0, 0, num_rows) if cut else full)
    return gathered


def _wire_dtype(meta: torch.Tensor, together: Sequence[torch.Tensor]) -> torch.dtype:
    """What ``meta`` travels as: bytes where its dtype is refused, or shares a buffer with others."""
    shared = {other.dtype for other in together}
    return meta.dtype if len(shared) == 1 and meta.dtype in ON_THE_WIRE else torch.uint8


def _wire_shape(meta: torch.Tensor, wire: torch.dtype) -> torch.Size:
    if wire == meta.dtype or meta.dtype is torch.bool:
        return meta.shape
    return torch.Size([*meta.shape, meta.element_size()])


def _to_wire(call: Call, shard: Any, dtype: torch.dtype, wire: torch.dtype) -> Any:
    if wire == dtype:
        return shard
    if dtype is torch.bool:  # Inductor's C++ cannot view bytes as bool
        return call(_convert, shard, torch.uint8)
    return call(_aten.view.dtype, call(_aten.unsqueeze.default, shard, -1), torch.uint8)


def _from_wire(call: Call, full: Any, dtype: torch.dtype, wire: torch.dtype) -> Any:
    if wire == dtype:
        return full
    if dtype is torch.bool:
        return call(_convert, full, torch.bool)
    return call(_aten.squeeze.dim, call(_aten.view.dtype, full, dtype), -1)


def reduce_input(
    call: Call,
    grads: Sequence[Any],
    metas: Sequence[torch.Tensor],
    padded_rows: Sequence[int],
    world: int,
) -> Any:
    """What travels of full gradients that share a buffer, or of a single one."""
    if len(grads) == 1:
        grads = [_contiguous(call, grads[0], metas[0])]
    padded = [
        _padded(call, grad, meta, rows * world)
        for grad, meta, rows in zip(grads, metas, padded_rows)
    ]
    return padded[0] if len(padded) == 1 else call(pack, padded, world)


def reduce_output(
    call: Call,
    buffer: Any,
    metas: Sequence[torch.Tensor],
    padded_rows: Sequence[int],
    group: str,
    world: int,
) -> list[Any]:
    """This rank's padded shards of the mean gradients, out of a buffer that was reduced."""
    if exchanges(group):
        shape = _value(buffer).shape
        ranks = call(_aten.view.default, buffer, [world, shape[0] // world, *shape[1:]])
        buffer = call(_aten.mean.dim, ranks, [0])
    shapes = [torch.Size([rows, *meta.shape[1:]]) for meta, rows in zip(metas, padded_rows)]
    return _slices(call, buffer, shapes)


def all_reduce_input(call: Call, grads: Sequence[Any], metas: Sequence[torch.Tensor]) -> Any:
    return call(pack, grads, 1) if len(grads) > 1 else _contiguous(call, grads[0], metas[0])


def all_reduce_output(
    call: Call, buffer: Any, metas: Sequence[torch.Tensor], world: int
) -> list[Any]:
    """The mean gradients, out of a buffer that was summed."""
    mean = call(_aten.div.Scalar, buffer, world)
    return _slices(call, mean, [meta.shape for meta in metas])


def _contiguous(call: Call, grad: Any, meta: torch.Tensor) -> Any:
    if meta.is_contiguous():
        return grad
    return call(_aten.clone.default, grad, memory_format=torch.contiguous_format)


def _padded(call: Call, grad: Any, meta: torch.Tensor, rows: int) -> Any:
    """``grad`` with zero rows added up to ``rows``."""
    if meta.shape[0] == rows:
        return grad
    pad = [0, 0] * (meta.dim() - 1) + [0, rows - meta.shape[0]]
    return call(_aten.constant_pad_nd.default, grad, pad)


def _slices(call: Call, flat: Any, shapes: Sequence[torch.Size]) -> list[Any]:
    """Tensors of ``shapes`` that lie in ``flat`` one after the other; views."""
    if len(shapes) == 1:
        return [flat]
    parts, start = [], 0
    for shape in shapes:
        part = call(_aten.slice.Tensor, flat, 0, start, start + shape.numel())
        parts.append(call(_aten.reshape.default, part, list(shape)))
        start += shape.numel()
    return parts


def _impl(name: str, key: str) -> Any:
    return torch.library.impl(_lib, name, key)


@_impl("unshard", "CompositeExplicitAutograd")
def _unshard(shard: torch.Tensor, rows: int, group: str, reshard: bool) -> torch.Tensor:
    world = process_group(group).size()
    wire = gather_input(run, [shard], [shard])
    (buffer,) = launch(run, ALL_GATHER, [wire], group, world)
    return gather_output(run, wait(run, buffer), [shard], [rows], world)[0]


@_impl("reduce_grad", "CompositeExplicitAutograd")
def _reduce_grad(grad: torch.Tensor, padded_rows: int, group: str) -> torch.Tensor:
    world = process_group(group).size()
    wire = reduce_input(run, [grad], [grad], [padded_rows], world)
    (buffer,) = launch(run, REDUCE_SCATTER, [wire], group, world)
    return reduce_output(run, wait(run, buffer), [grad], [padded_rows], group, world)[0]


@_impl("replicate", "CompositeExplicitAutograd")
def _replicate(param: torch.Tensor, group: str) -> torch.Tensor:
    return param.clone()


@_impl("all_reduce_grad", "CompositeExplicitAutograd")
def _all_reduce_grad(grad: torch.Tensor, group: str) -> torch.Tensor:
    wire = all_reduce_input(run, [grad], [grad])
    (buffer,) = launch(run, ALL_REDUCE, [wire], group, 1)
    return all_reduce_output(run, wait(run, buffer), [grad], process_group(group).size())[0]


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
