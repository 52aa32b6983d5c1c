"""What travels for a bucket: copied in, launched, waited for, copied out; eager, or into a graph.

Tensors of one parcel share a buffer, rank by rank; several buffers travel coalesced:

    parcel of one, as it is    shard ─► all_gather_into_tensor ─► wait ─► full
    any other                  shards ─► copy_in ─► all_gather_into_tensor ─► wait ─► unpack ─► full, ..

``copy_in`` casts, pads and packs all of a bucket at once. Both ops are opaque to Inductor: the C++ of
a `cat` of a hundred tensors takes longer to compile than the rest of a graph, and slices of one buffer
differ in their offsets, so that equal layers would not share their kernels.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._torch.distributed import process_group
from ..kinds import TransferKind
from .bucket_copy import add_sums, copy_in, unpack
from .emitter import Call
from .float8_math import E4M3, as_dtype, cast, convert
from .float8_ops import own_rows
from .host_copy import to_device, to_host
from .nodes import value_of

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
EXCHANGE = _c10d.all_to_all_single.default
# What no backend refuses; other dtypes travel as bytes.
ON_THE_WIRE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}
    | {torch.int8, torch.int32, torch.int64}
)


class CollectiveInput(NamedTuple):
    """A tensor that travels.

    Attributes:
        source: a padded shard, or a full gradient: a tensor or a node of a graph.
        rows: of what comes out, the full parameter or the padded shard of a gradient; 0: replicated.
        dtype: as which it travels; a gathered one comes out so.
        result: as which a reduced one comes out, and what is scaled is cast to before.
        scales: of several; it is multiplied by that ``at`` its place, ``[1, 1]`` or ``[1, rows of all
            ranks' padded shards]``, before it is cast to ``dtype``.
        partial: key of a sum that is added to its reduced shard before that is averaged over replicas.
    """

    source: Any
    rows: int
    dtype: torch.dtype
    result: torch.dtype
    scales: Any = None
    at: int = 0
    partial: Any = None

    @property
    def value(self) -> torch.Tensor:
        return value_of(self.source)


Parcel = Sequence[CollectiveInput]


def wire_dtype(kind: TransferKind, parcel: Parcel) -> torch.dtype:
    """What a parcel's buffer holds: bytes, of what is gathered, where dtypes differ or no backend
    takes them. What a reduction adds up has one dtype."""
    dtypes = {piece.dtype for piece in parcel}
    as_bytes = kind == TransferKind.ALL_GATHER and (len(dtypes) > 1 or not dtypes <= ON_THE_WIRE)
    return torch.uint8 if as_bytes else parcel[0].dtype


def exchanges(group: str, dtype: torch.dtype) -> bool:
    """Whether ranks reduce to shards by an exchange of them, each averaging what it receives.

    gloo itself does an all-reduce of a copy (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), which
    sends twice as much and took 52 ms beside 20 for 40 MB on two ranks. It exchanges no complex numbers.
    """
    if dtype.is_complex:
        return False
    backends = dist.get_backend_config(process_group(group)).split(",")
    return all(backend.endswith(":gloo") for backend in backends)


def send(
    call: Call, kind: TransferKind, parcels: Sequence[Parcel], group: str, world: int
) -> list[Any]:
    """Copy in and launch: what to wait for, for each parcel."""
    parcels = [[_scaled(call, piece, group) for piece in parcel] for parcel in parcels]
    buffers = {i: _as_sent(call, kind, parcel) for i, parcel in enumerate(parcels)}
    copied = [i for i, parcel in enumerate(parcels) if _is_copied(kind, parcel, world)]
    if copied:
        pieces = [piece for i in copied for piece in parcels[i]]
        made = call(
            copy_in,
            [piece.source for piece in pieces],
            [_own_rows(kind, piece) for piece in pieces],
            [_name(piece.dtype) for piece in pieces],
            [len(parcels[i]) for i in copied],
            [_name(wire_dtype(kind, parcels[i])) for i in copied],
            world if kind == TransferKind.REDUCE_SCATTER else 1,
        )
        buffers |= {i: call(operator.getitem, made, k) for k, i in enumerate(copied)}
    sent = list(buffers.values())
    if len({value_of(buffer).dtype for buffer in sent}) > 1:
        # gloo casts all of them to the first one's dtype.
        sent = [_viewed_as(call, buffer, torch.uint8) for buffer in sent]
    return launch(call, kind, sent, group, world)


def _scaled(call: Call, piece: CollectiveInput, group: str) -> CollectiveInput:
    """With its scale applied, in one kernel: a tensor of its own of a byte for each element."""
    if piece.scales is None:
        return piece
    scale = call(operator.getitem, piece.scales, piece.at)
    if value_of(scale).numel() > 1:
        scale = call(own_rows, scale, group)
    scaled = cast(call, as_dtype(call, piece.source, piece.result), scale, piece.dtype, 1)
    return piece._replace(source=scaled, scales=None)


def _as_sent(call: Call, kind: TransferKind, parcel: Parcel) -> Any:
    """What travels where ``copy_in`` has nothing to do: Inductor packs fp8 where it scales and casts."""
    source = parcel[0].source
    if len(parcel) > 1 and _is_float8(parcel):
        flat = [call(_aten.view.default, piece.source, [-1]) for piece in parcel]
        source = call(_aten.cat.default, flat)
    return _viewed_as(call, source, wire_dtype(kind, parcel)) if _is_float8(parcel) else source


def _is_float8(parcel: Parcel) -> bool:
    return all(piece.value.dtype == E4M3 for piece in parcel)


def _is_copied(kind: TransferKind, parcel: Parcel, world: int) -> bool:
    """False where a tensor travels as it is, or was cast to fp8."""
    if _is_float8(parcel):
        return False
    (piece, *others), value = parcel, parcel[0].value
    padded = kind == TransferKind.REDUCE_SCATTER and value.shape[0] != piece.rows * world
    casts = wire_dtype(kind, parcel) != value.dtype
    return bool(others) or padded or casts or not value.is_contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_rows(kind: TransferKind, piece: CollectiveInput) -> int:
    """How many rows of each rank are sent; 0 of a tensor without rows."""
    if kind == TransferKind.REDUCE_SCATTER:
        return piece.rows
    return piece.value.shape[0] if piece.value.dim() else 0


def launch(call: Call, kind: TransferKind, wires: list[Any], group: str, world: int) -> list[Any]:
    """One collective for all ``wires``, coalesced where they are several: what to wait for."""
    if kind == TransferKind.REDUCE_SCATTER and exchanges(group, value_of(wires[0]).dtype):
        sizes = [[value_of(wire).shape[0] // world] * world for wire in wires]
        return [call(EXCHANGE, wire, size, size, group) for wire, size in zip(wires, sizes)]
    kind = TransferKind.ALL_REDUCE if kind == TransferKind.ALL_REDUCE_SHARDS else kind
    one, many, args = {
        TransferKind.ALL_GATHER: (
            _c10d.all_gather_into_tensor.default,
            _c10d.all_gather_into_tensor_coalesced.default,
            (world, group),
        ),
        TransferKind.REDUCE_SCATTER: (
            _c10d.reduce_scatter_tensor.default,
            _c10d.reduce_scatter_tensor_coalesced.default,
            ("avg", world, group),
        ),
        # gloo has no "avg" for all-reduce.
        TransferKind.ALL_REDUCE: (
            _c10d.all_reduce.default,
            _c10d.all_reduce_coalesced.default,
            ("sum", group),
        ),
        TransferKind.ALL_REDUCE_MAX: (
            _c10d.all_reduce.default,
            _c10d.all_reduce_coalesced.default,
            ("max", group),
        ),
    }[kind]
    if len(wires) == 1:
        return [call(one, wires[0], *args)]
    launched = call(many, wires, *args)
    return [call(operator.getitem, launched, i) for i in range(len(wires))]


def wait(call: Call, buffer: Any) -> Any:
    return call(_c10d.wait_tensor.default, buffer)


def begin_copy(call: Call, tensors: Sequence[Any], to: torch.device | str) -> list[Any]:
    """Launch copies to that device, or to that memory of the host: what to wait for, for each; for what
    the host reads twice, see ``graphshard.ops.host_copy``."""
    made = call(to_host if isinstance(to, str) else to_device, list(tensors), to)
    return [call(operator.getitem, made, i) for i in range(len(tensors))]


def copy(call: Call, tensors: Sequence[Any], to: torch.device | str) -> list[Any]:
    return [wait(call, wait(call, copied)) for copied in begin_copy(call, tensors, to)]


def send_on(
    call: Call, parcels: Sequence[Parcel], received: Sequence[Any], group: str, world: int
) -> list[Any]:
    """Launch what averages reduced shards over their replicas."""
    shards = [_with_partials(call, *of) for of in zip(parcels, received, strict=True)]
    shards = [
        # A sum may be too large for it.
        call(_aten.div.Scalar, shard, world) if value_of(shard).dtype == torch.float16 else shard
        for shard in shards
    ]
    return launch(call, TransferKind.ALL_REDUCE_SHARDS, shards, group, world)


def _with_partials(call: Call, parcel: Parcel, shards: Any) -> Any:
    """With the sums of earlier microbatches added, where there are any."""
    sizes = [_result_shape(TransferKind.REDUCE_SCATTER, piece).numel() for piece in parcel]
    starts = [0, *itertools.accumulate(sizes)]
    partials = [(p.partial, start) for p, start in zip(parcel, starts) if p.partial is not None]
    if not partials:
        return shards
    keys, starts = map(list, zip(*partials))
    return call(add_sums, shards, keys, starts, value_of(shards).dtype)


def receive(call: Call, kind: TransferKind, buffer: Any, group: str, world: int) -> Any:
    """Wait for what was launched: the buffer that a gather or a maximum filled, or one of means."""
    done = wait(call, buffer)
    if kind == TransferKind.ALL_REDUCE or (
        kind == TransferKind.ALL_REDUCE_SHARDS and value_of(buffer).dtype != torch.float16
    ):
        return call(_aten.div.Scalar, done, world)
    if kind == TransferKind.REDUCE_SCATTER and exchanges(group, value_of(buffer).dtype):
        return call(_aten.mean.dim, call(_aten.view.default, done, [world, -1]), [0])
    return done


def copy_out(call: Call, kind: TransferKind, parcel: Parcel, done: Any, world: int) -> list[Any]:
    """Of a received buffer: the full parameters, or this rank's shards of the means."""
    if kind == TransferKind.ALL_GATHER:
        done = _viewed_as(call, done, wire_dtype(kind, parcel))
        return _gathered(call, parcel, done, world)
    return _reduced(call, kind, parcel, done)


def _gathered(call: Call, parcel: Parcel, buffer: Any, world: int) -> list[Any]:
    """The full ``[rows, ...]`` of each padded shard ``[ceil(rows / world), ...]``."""
    wire = wire_dtype(TransferKind.ALL_GATHER, parcel)
    shapes = [_wire_shape(piece, wire, world) for piece in parcel]
    parts = [buffer]
    if len(parcel) > 1:
        sizes = [shape.numel() // world for shape in shapes]
        unpacked = call(unpack, buffer, sizes, world)
        parts = [call(operator.getitem, unpacked, i) for i in range(len(parcel))]
    full = []
    for part, piece, shape in zip(parts, parcel, shapes):
        out = _from_wire(call, _viewed(call, part, shape), piece.dtype, wire)
        padded = piece.value.shape[0] * world
        full.append(
            call(_aten.slice.Tensor, out, 0, 0, piece.rows) if padded != piece.rows else out
        )
    return full


def _wire_shape(piece: CollectiveInput, wire: torch.dtype, world: int) -> torch.Size:
    rows, *others = piece.value.shape
    size = piece.dtype.itemsize
    as_bytes = wire != piece.dtype and size > 1
    return torch.Size([world * rows, *others, *([size] if as_bytes else [])])


def _from_wire(call: Call, full: Any, dtype: torch.dtype, wire: torch.dtype) -> Any:
    if wire == dtype:
        return full
    if dtype is torch.bool:  # Inductor's C++ cannot view bytes as bool
        return call(convert, full, torch.bool)
    viewed = call(_aten.view.dtype, full, dtype)
    return viewed if dtype.itemsize == 1 else call(_aten.squeeze.dim, viewed, -1)


def _reduced(call: Call, kind: TransferKind, parcel: Parcel, buffer: Any) -> list[Any]:
    results = {piece.result for piece in parcel}
    if len(results) == 1:  # one kernel for all
        buffer = as_dtype(call, buffer, parcel[0].result)
    shapes = [_result_shape(kind, piece) for piece in parcel]
    parts, start = [], 0
    for piece, shape in zip(parcel, shapes):
        stop = start + shape.numel()
        alone = len(parcel) == 1
        part = buffer if alone else call(_aten.slice.Tensor, buffer, 0, start, stop)
        parts.append(as_dtype(call, _viewed(call, part, shape), piece.result))
        start = stop
    return parts


def _result_shape(kind: TransferKind, piece: CollectiveInput) -> torch.Size:
    shape = piece.value.shape
    return torch.Size([piece.rows, *shape[1:]]) if kind == TransferKind.REDUCE_SCATTER else shape


def _viewed(call: Call, buffer: Any, shape: torch.Size) -> Any:
    return (
        buffer if value_of(buffer).shape == shape else call(_aten.view.default, buffer, list(shape))
    )


def _viewed_as(call: Call, buffer: Any, dtype: torch.dtype) -> Any:
    return buffer if value_of(buffer).dtype == dtype else call(_aten.view.dtype, buffer, dtype)


def world_of(group: str) -> tuple[int, int]:
    """How many ranks a group has, and how far each is from the one before, at most."""
    ranks = dist.get_process_group_ranks(process_group(group))
    stride = max((after - before for before, after in pairwise(ranks)), default=1)
    return len(ranks), max(1, stride)
