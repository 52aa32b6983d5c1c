"""The marker ops: what a sharded parameter and its gradient are in every graph before lowering.

A parameter enters the graph as its padded local shard. ``unshard`` makes the full parameter of it
and autograd turns the full gradient back into a shard by ``reduce_grad``, averaged over the group:

    forward    shard ─► unshard ─► linear          backward   grad ─► reduce_grad ─► shard's gradient

What is not split (a scalar, or what is to be replicated) has ``replicate`` and ``all_reduce_grad``. A
parameter travels and is used as ``dtype``; its gradient travels as ``reduce_dtype``, and comes out in
the dtype of the shard (None: nothing is cast). ``float8`` is the recipe of fp8 by which linears are to
use it, "" for none; where there are ``scales``, its own ``at`` its place, its fp8 values travel.
``max_over_ranks`` makes largest values of one rank those of all; ``own_part`` is a padded shard of a full
parameter, for backward to gather from few ranks.

Where the ``host`` keeps shards (in which memory, "": the device does), they are copied to a ``device`` to be
gathered, and reduced ones back. ``stow`` and ``fetch`` do so with activations between forward and backward.

Groups have names. ``regather`` is the one from which backward gathers: that of forward (ZeRO-3), part
of it (ZeRO++'s hpZ), or "": the full parameter is kept (ZeRO-2). ``replicas`` are the ranks that have the
same shard (HSDP), over which reduced shards are averaged once more; "": there are no others.

Gradients add up over microbatches in stand-ins, ``unsynced`` as large as the parameter, or ``partial`` as
large as its shard. A stand-in, which requires a gradient, gets it in place of the shard: not reduced, or
not over the replicas. A key in its place is that of a sum to be added before the reduction, or between its
two halves: see ``graphshard.params.grad_accumulation``.

The ops are opaque to Dynamo, AOTAutograd and Inductor's joint passes; ``graphshard.passes`` lowers
them to functional collectives. In eager parts of a model they run for real, by the same lowering.

[Note: padded shards] Rows are split as ``torch.chunk`` splits them: ``ceil(rows / world)`` to each
rank, the last ranks with fewer or none. The tensor that enters the graph is padded to
``ceil(rows / world)`` rows on every rank, so that all ranks trace one and the same graph. Gathered
rows past ``rows`` are padding, cut off by a view; the padding of a gradient is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._torch.distributed import process_group
from .._torch.tensors import argument_names, fake_mode_of
from ..kinds import TransferKind
from . import collectives
from .collectives import CollectiveInput
from .emitter import run
from .float8_math import E4M3

_lib = torch.library.Library("graphshard", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_casts = "ScalarType? dtype, ScalarType? reduce_dtype"
_result = "ScalarType? reduce_dtype, ScalarType? result"
_lib.define(
    f"unshard(Tensor shard, int rows, str group, str regather, str replicas, {_casts}, str float8,"
    " Tensor[]? scales, int at, Device? device, str host, Tensor? unsynced, Tensor? partial) -> Tensor",
    tags=_tags,
)
_lib.define(
    f"reduce_grad(Tensor grad, int rows, str group, str replicas, Tensor? partial, {_result}, str host)"
    " -> Tensor",
    tags=_tags,
)
_lib.define(f"replicate(Tensor param, str group, {_casts}, Tensor? unsynced) -> Tensor", tags=_tags)
_lib.define(f"all_reduce_grad(Tensor grad, str group, {_result}) -> Tensor", tags=_tags)
_lib.define("max_over_ranks(Tensor amax, str group) -> Tensor", tags=_tags)
_lib.define("own_part(Tensor full, str group) -> Tensor", tags=_tags)
_lib.define("stow(Tensor value, str host) -> Tensor", tags=_tags)
_lib.define("fetch(Tensor stowed, Device device) -> Tensor", tags=_tags)

unshard = torch.ops.graphshard.unshard.default
reduce_grad = torch.ops.graphshard.reduce_grad.default
replicate = torch.ops.graphshard.replicate.default
all_reduce_grad = torch.ops.graphshard.all_reduce_grad.default
max_over_ranks = torch.ops.graphshard.max_over_ranks.default
secondary_shard = torch.ops.graphshard.own_part.default
offload_activation = torch.ops.graphshard.stow.default
reload_activation = torch.ops.graphshard.fetch.default
UNSHARD = (unshard, replicate)
REDUCE = (reduce_grad, all_reduce_grad)
OF_PARAMS = (*UNSHARD, *REDUCE)
MARKERS = (*OF_PARAMS, max_over_ranks, offload_activation, reload_activation)
KIND_OF_MARKER: dict[Any, TransferKind] = {
    unshard: TransferKind.ALL_GATHER,
    reduce_grad: TransferKind.REDUCE_SCATTER,
    all_reduce_grad: TransferKind.ALL_REDUCE,
    max_over_ranks: TransferKind.ALL_REDUCE_MAX,
    offload_activation: TransferKind.COPY_TO_HOST,
    reload_activation: TransferKind.COPY_TO_DEVICE,
}
"""What every marker does for which something travels."""

_Dtype = torch.dtype | None
_Tensor = torch.Tensor | None


def arguments(marker: fx.Node) -> dict[str, Any]:
    """Of a marker in a graph, by name."""
    return dict(zip(argument_names(marker.target), marker.args, strict=True))


def change(marker: fx.Node, **changed: Any) -> None:
    """Give a marker in a graph other arguments, in place."""
    given = arguments(marker)
    assert given.keys() >= changed.keys()
    marker.args = tuple({**given, **changed}.values())
    values = fx.map_arg(marker.args, lambda n: n.meta["val"])
    op: Any = marker.target
    with fake_mode_of(values):
        marker.meta["val"] = op(*values)
    marker.meta.pop("tensor_meta", None)


def used_dtype(param: torch.Tensor, dtype: _Dtype) -> torch.dtype:
    """The dtype in which a graph sees a parameter: only floating ones are cast, as by FSDP2."""
    return dtype if dtype is not None and param.is_floating_point() else param.dtype


def sent_dtype(grad: torch.Tensor, kind: TransferKind, reduce_dtype: _Dtype) -> torch.dtype:
    """The dtype in which a gradient is reduced."""
    dtype = used_dtype(grad, reduce_dtype)
    # Some backends can only add all-reduced values up, and float16 overflows early.
    return torch.float32 if kind == TransferKind.ALL_REDUCE and dtype == torch.float16 else dtype


def _run(
    kind: TransferKind, piece: CollectiveInput, group: str, replicas: str = ""
) -> torch.Tensor:
    world = process_group(group).size()
    (buffer,) = collectives.send(run, kind, [[piece]], group, world)
    done = collectives.receive(run, kind, buffer, group, world)
    if replicas:
        num = process_group(replicas).size()
        (buffer,) = collectives.send_on(run, [[piece]], [done], replicas, num)
        done = collectives.receive(run, TransferKind.ALL_REDUCE_SHARDS, buffer, replicas, num)
    (result,) = collectives.copy_out(run, kind, [piece], done, world)
    return result


def _impl(name: str) -> Any:
    return torch.library.impl(_lib, name, "CompositeExplicitAutograd")


@_impl("unshard")
def _unshard(
    shard: torch.Tensor,
    rows: int,
    group: str,
    regather: str,
    replicas: str,
    dtype: _Dtype,
    reduce_dtype: _Dtype,
    float8: str,
    scales: list[torch.Tensor] | None,
    at: int,
    device: torch.device | None,
    host: str,
    unsynced: _Tensor,
    partial: _Tensor,
) -> torch.Tensor:
    used = used_dtype(shard, dtype)
    travels = used if scales is None else E4M3
    if device is not None:
        (shard,) = collectives.copy(run, [shard], device)
    return _run(
        TransferKind.ALL_GATHER, CollectiveInput(shard, rows, travels, used, scales, at), group
    )


@_impl("reduce_grad")
def _reduce_grad(
    grad: torch.Tensor,
    rows: int,
    group: str,
    replicas: str,
    partial: _Tensor,
    reduce_dtype: _Dtype,
    result: _Dtype,
    host: str,
) -> torch.Tensor:
    dtype = sent_dtype(grad, TransferKind.REDUCE_SCATTER, reduce_dtype)
    piece = CollectiveInput(grad, rows, dtype, result or grad.dtype, partial=partial)
    reduced = _run(TransferKind.REDUCE_SCATTER, piece, group, replicas)
    return collectives.copy(run, [reduced], host)[0] if host else reduced


@_impl("replicate")
def _replicate(
    param: torch.Tensor, group: str, dtype: _Dtype, reduce_dtype: _Dtype, unsynced: _Tensor
) -> torch.Tensor:
    return param.to(used_dtype(param, dtype), copy=True)


@_impl("all_reduce_grad")
def _all_reduce_grad(
    grad: torch.Tensor, group: str, reduce_dtype: _Dtype, result: _Dtype
) -> torch.Tensor:
    dtype = sent_dtype(grad, TransferKind.ALL_REDUCE, reduce_dtype)
    piece = CollectiveInput(grad, 0, dtype, result or grad.dtype)
    return _run(TransferKind.ALL_REDUCE, piece, group)


@_impl("max_over_ranks")
def _max_over_ranks(amax: torch.Tensor, group: str) -> torch.Tensor:
    return _run(
        TransferKind.ALL_REDUCE_MAX, CollectiveInput(amax, 0, amax.dtype, amax.dtype), group
    )


@_impl("own_part")
def _own_part(full: torch.Tensor, group: str) -> torch.Tensor:
    part = _own_part_fake(full, group)
    own = full[process_group(group).rank() * part.shape[0] :][: part.shape[0]]
    part[: own.shape[0]] = own
    part[own.shape[0] :].zero_()
    return part


@_impl("stow")
def _stow(value: torch.Tensor, host: str) -> torch.Tensor:
    return collectives.copy(run, [value], host)[0]


@_impl("fetch")
def _fetch(stowed: torch.Tensor, device: torch.device) -> torch.Tensor:
    return collectives.copy(run, [stowed], device)[0]


@torch.library.register_fake("graphshard::stow", lib=_lib)
def _stow_fake(value: torch.Tensor, host: str) -> torch.Tensor:
    return torch.empty_like(value, device="cpu")


@torch.library.register_fake("graphshard::fetch", lib=_lib)
def _fetch_fake(stowed: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(stowed, device=device)


@torch.library.register_fake("graphshard::own_part", lib=_lib)
def _own_part_fake(full: torch.Tensor, group: str) -> torch.Tensor:
    rows = -(-full.shape[0] // process_group(group).size())
    return full.new_empty((rows, *full.shape[1:]))


@torch.library.register_fake("graphshard::unshard", lib=_lib)
def _unshard_fake(
    shard: torch.Tensor,
    rows: int,
    group: str,
    regather: str,
    replicas: str,
    dtype: _Dtype,
    reduce_dtype: _Dtype,
    float8: str,
    scales: list[torch.Tensor] | None,
    at: int,
    device: torch.device | None,
    host: str,
    unsynced: _Tensor,
    partial: _Tensor,
) -> torch.Tensor:
    used = used_dtype(shard, dtype) if scales is None else E4M3
    return shard.new_empty((rows, *shard.shape[1:]), dtype=used, device=device)


@torch.library.register_fake("graphshard::reduce_grad", lib=_lib)
def _reduce_grad_fake(
    grad: torch.Tensor,
    rows: int,
    group: str,
    replicas: str,
    partial: _Tensor,
    reduce_dtype: _Dtype,
    result: _Dtype,
    host: str,
) -> torch.Tensor:
    device = "cpu" if host else grad.device
    return grad.new_empty((rows, *grad.shape[1:]), dtype=result or grad.dtype, device=device)


@torch.library.register_fake("graphshard::replicate", lib=_lib)
def _replicate_fake(
    param: torch.Tensor, group: str, dtype: _Dtype, reduce_dtype: _Dtype, unsynced: _Tensor
) -> torch.Tensor:
    return param.new_empty(param.shape, dtype=used_dtype(param, dtype))


@torch.library.register_fake("graphshard::all_reduce_grad", lib=_lib)
def _all_reduce_grad_fake(
    grad: torch.Tensor, group: str, reduce_dtype: _Dtype, result: _Dtype
) -> torch.Tensor:
    return grad.new_empty(grad.shape, dtype=result or grad.dtype)


@torch.library.register_fake("graphshard::max_over_ranks", lib=_lib)
def _max_over_ranks_fake(amax: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(amax)


def _requires_grad(tensor: _Tensor) -> bool:
    return tensor is not None and tensor.requires_grad


def _is_stand_in(tensor: _Tensor) -> bool:
    return tensor is not None and tensor.requires_grad


def _summed(ctx: Any, grad: torch.Tensor, key: _Tensor) -> torch.Tensor:
    """With the sum of that key added, in the dtype in which it is reduced."""
    dtype = used_dtype(grad, ctx.reduce_dtype)
    return grad if key is None else torch.ops.graphshard.add_sums(grad, [key], [0], dtype)


def _save_unshard(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    shard, _, ctx.group, _, ctx.replicas, _, ctx.reduce_dtype = inputs[:7]
    ctx.host, unsynced, partial = inputs[-3:]
    ctx.padded_rows, ctx.result = shard.shape[0], shard.dtype
    ctx.unreduced, ctx.to_partial = _is_stand_in(unsynced), _is_stand_in(partial)
    ctx.save_for_backward(None if ctx.unreduced else unsynced, None if ctx.to_partial else partial)


def _unshard_backward(ctx: Any, grad: torch.Tensor) -> tuple[_Tensor, ...]:
    if ctx.unreduced:
        return *[None] * 12, grad.to(used_dtype(grad, ctx.reduce_dtype)), None
    key, partial = ctx.saved_tensors
    grad = _summed(ctx, grad, key)
    replicas, result, host = ctx.replicas, ctx.result, ctx.host
    if ctx.to_partial:
        replicas, result, host = "", used_dtype(grad, ctx.reduce_dtype), ""
    back = torch.ops.graphshard.reduce_grad(
        grad, ctx.padded_rows, ctx.group, replicas, partial, ctx.reduce_dtype, result, host
    )
    return (*[None] * 13, back) if ctx.to_partial else (back, *[None] * 13)


def _save_replicate(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    param, ctx.group, _, ctx.reduce_dtype, unsynced = inputs
    ctx.result = param.dtype
    ctx.unreduced = _is_stand_in(unsynced)
    ctx.save_for_backward(None if ctx.unreduced else unsynced)


def _replicate_backward(ctx: Any, grad: torch.Tensor) -> tuple[_Tensor, ...]:
    if ctx.unreduced:
        return *[None] * 4, grad.to(used_dtype(grad, ctx.reduce_dtype))
    grad = _summed(ctx, grad, *ctx.saved_tensors)
    back = torch.ops.graphshard.all_reduce_grad(grad, ctx.group, ctx.reduce_dtype, ctx.result)
    return back, *[None] * 4


torch.library.register_autograd(
    "graphshard::unshard", _unshard_backward, setup_context=_save_unshard, lib=_lib
)
torch.library.register_autograd(
    "graphshard::replicate", _replicate_backward, setup_context=_save_replicate, lib=_lib
)
