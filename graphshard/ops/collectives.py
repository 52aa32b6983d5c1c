"""Copy-in, launch, wait and copy-out of a bucket's collective, eagerly or in a graph.

A bucket is a set of tensors that are sent together, in one or more buffers. A packed buffer holds
several tensors, rank by rank. Several buffers are sent in one coalesced collective, or in one
all-to-all each. For example, with one buffer:

    one tensor, sent as is   shard ─► all_gather_into_tensor ─► wait ─► full
    several tensors          shards ─► copy_in ─► all_gather_into_tensor ─► wait ─► copy_out ─► ..

``copy_in`` casts, pads and packs the tensors of all buffers of a bucket at once. It is not used for
a tensor sent as is, nor for fp8 weights, which Inductor's kernels pack.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ..kinds import TransferKind
from .bucket_copy import add_accumulated, copy_in, copy_out
from .float8_math import E4M3, as_dtype, cast, convert
from .float8_ops import own_rows
from .groups import averages
from .host_copy import copy_to_device, copy_to_host
from .library import dtype_name
from .mx_math import packed, packed_shape
from .nodes import Call, Value, Values, run, value_of

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
EXCHANGE = _c10d.all_to_all_single.default
# Dtypes that every backend accepts; tensors of other dtypes are gathered as bytes.
PORTABLE_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}
    | {torch.int8, torch.int32, torch.int64}
)


class CollectiveInput(NamedTuple):
    """A tensor that a collective sends.

    Attributes:
        source: padded shard, full gradient, or largest absolute values.
        rows: number of rows of a full parameter or of a gradient's padded shard; 0 for all-reduces.
        wire_dtype: dtype of the sent data, and of a gathered result.
        result_dtype: dtype of a reduced result; for an fp8 weight, dtype to which the source is
            cast before scaling.
        scales: scales of several tensors, each ``[1, 1]`` or ``[1, rows of all ranks' padded
            shards]``, applied to sources before the cast to ``wire_dtype``; None without scaling.
        scale_index: position of this tensor's scale in ``scales``.
        block_dim: dimension of the blocks in which the source is cast to mxfp8 and packed into
            uint8, or None.
        partial: key of an accumulator whose total is added to the reduced shard before the average
            over replicas, or None.
        summed_in: dtype in which each rank sums the rows that it receives in an all-to-all; None
            for other collectives.
    """

    source: Value
    rows: int
    wire_dtype: torch.dtype
    result_dtype: torch.dtype
    scales: Values | None = None
    scale_index: int = 0
    block_dim: int | None = None
    partial: Value | None = None
    summed_in: torch.dtype | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return value_of(self.source)

    @property
    def shape(self) -> torch.Size:
        """Shape of the sent data, in elements of ``wire_dtype``."""
        shape = self.tensor.shape
        return shape if self.block_dim is None else packed_shape(shape)


BufferInputs: TypeAlias = Sequence[CollectiveInput]  # transfers that share one buffer


def buffer_dtype(kind: TransferKind, inputs: BufferInputs) -> torch.dtype:
    """Return the dtype of a buffer: the wire dtype of its tensors, or uint8 if sent as bytes."""
    dtypes = {sent.wire_dtype for sent in inputs}
    # Only gathered tensors may differ in dtype. Dtypes that a backend may refuse become bytes.
    as_bytes = kind == TransferKind.ALL_GATHER and (
        len(dtypes) > 1 or not dtypes <= PORTABLE_DTYPES
    )
    return torch.uint8 if as_bytes else inputs[0].wire_dtype


def launch_bucket(
    call: Call, kind: TransferKind, buffers: Sequence[BufferInputs], group: str, world: int
) -> list[Any]:
    """Fill the buffers of a bucket and launch its collectives; return one result per buffer.

    The results must be waited for (``wait_buffer``). If buffers differ in dtype, all are sent as
    uint8.
    """
    buffers = [[_cast_to_fp8(call, sent, group) for sent in inputs] for inputs in buffers]
    ready = {i: _packed_without_copy_in(call, kind, inputs) for i, inputs in enumerate(buffers)}
    # ``copy_in`` does not pack fp8 weights: Inductor's kernels do. It packs mxfp8 weights, because
    # Inductor would split the one kernel of each cast in two.
    copied = [
        i
        for i, inputs in enumerate(buffers)
        if not _gathers_float8(kind, inputs)
        and (len(inputs) > 1 or needs_own_copy(kind, inputs[0], world))
    ]
    if copied:
        all_inputs = [sent for i in copied for sent in buffers[i]]
        results = call(
            copy_in,
            [sent.source for sent in all_inputs],
            [_rows_per_rank(kind, sent) for sent in all_inputs],
            [dtype_name(sent.wire_dtype) for sent in all_inputs],
            [len(buffers[i]) for i in copied],
            [dtype_name(buffer_dtype(kind, buffers[i])) for i in copied],
            world if kind == TransferKind.REDUCE_SCATTER else 1,
        )
        ready |= {i: call(operator.getitem, results, k) for k, i in enumerate(copied)}
    to_send = list(ready.values())
    if len({value_of(buffer).dtype for buffer in to_send}) > 1:
        # gloo would cast all buffers to the first one's dtype.
        to_send = [_viewed_as(call, buffer, torch.uint8) for buffer in to_send]
    exchanges = buffers[0][0].summed_in is not None
    return launch_collective(call, kind, to_send, group, world, exchanges=exchanges)


def _cast_to_fp8(call: Call, sent: CollectiveInput, group: str) -> CollectiveInput:
    if sent.scales is None and sent.block_dim is None:
        return sent
    wide = as_dtype(call, sent.source, sent.result_dtype)
    if sent.block_dim is not None:
        return sent._replace(source=packed(call, wide, sent.block_dim), block_dim=None)
    scale = call(operator.getitem, sent.scales, sent.scale_index)
    if value_of(scale).numel() > 1:
        scale = call(own_rows, scale, group)
    return sent._replace(source=cast(call, wide, scale, sent.wire_dtype, 1), scales=None)


def _packed_without_copy_in(call: Call, kind: TransferKind, inputs: BufferInputs) -> Any:
    source = inputs[0].source
    if not _gathers_float8(kind, inputs):
        return source
    if len(inputs) > 1:
        flat = [call(_aten.view.default, sent.source, [-1]) for sent in inputs]
        source = call(_aten.cat.default, flat)
    return _viewed_as(call, source, buffer_dtype(kind, inputs))


def _gathers_float8(kind: TransferKind, inputs: BufferInputs) -> bool:
    return kind == TransferKind.ALL_GATHER and all(
        sent.tensor.dtype == sent.wire_dtype == E4M3 for sent in inputs
    )


def needs_own_copy(kind: TransferKind, sent: CollectiveInput, world: int) -> bool:
    """Return whether a tensor alone in its buffer must be cast, padded or made contiguous."""
    tensor = sent.tensor
    padded = kind == TransferKind.REDUCE_SCATTER and tensor.shape[0] != sent.rows * world
    casts = buffer_dtype(kind, [sent]) != tensor.dtype
    return padded or casts or not tensor.is_contiguous()


def _rows_per_rank(kind: TransferKind, sent: CollectiveInput) -> int:
    """Return the number of rows that a rank receives (reduce-scatter) or sends; 0 for scalars."""
    if kind == TransferKind.REDUCE_SCATTER:
        return sent.rows
    return sent.tensor.shape[0] if sent.tensor.dim() else 0


def launch_collective(
    call: Call,
    kind: TransferKind,
    buffers: Sequence[Value],
    group: str,
    world: int,
    *,
    exchanges: bool = False,
) -> list[Any]:
    """Launch a collective for several buffers; return the results to wait for, one per buffer.

    Args:
        exchanges: whether to launch an all-to-all for each buffer instead of a reduction;
            ``wait_buffer`` then averages the rows.
    """
    if exchanges:
        # All-to-alls cannot be coalesced.
        sizes = [[value_of(buffer).shape[0] // world] * world for buffer in buffers]
        return [call(EXCHANGE, buffer, size, size, group) for buffer, size in zip(buffers, sizes)]
    kind = TransferKind.ALL_REDUCE if kind == TransferKind.ALL_REDUCE_SHARDS else kind
    mean = "avg" if kind == TransferKind.ALL_REDUCE and averages(group, buffers[0]) else "sum"
    name, args = {
        TransferKind.ALL_GATHER: ("all_gather_into_tensor", (world, group)),
        TransferKind.REDUCE_SCATTER: ("reduce_scatter_tensor", ("avg", world, group)),
        TransferKind.ALL_REDUCE: ("all_reduce", (mean, group)),
        TransferKind.ALL_REDUCE_MAX: ("all_reduce", ("max", group)),
    }[kind]
    # NCCL has no complex numbers. Only functions for one tensor reduce them as pairs of real ones.
    is_complex = kind != TransferKind.ALL_GATHER and value_of(buffers[0]).is_complex()
    if len(buffers) == 1 or is_complex:
        return [call(getattr(_c10d, name).default, buffer, *args) for buffer in buffers]
    launched = call(getattr(_c10d, f"{name}_coalesced").default, list(buffers), *args)
    return [call(operator.getitem, launched, i) for i in range(len(buffers))]


def wait_tensor(call: Call, launched: Value) -> Any:
    """Wait for one launched result."""
    return call(_c10d.wait_tensor.default, launched)


def launch_host_copies(
    call: Call, tensors: Sequence[Value], target: torch.device | str, *, host_reads: bool
) -> list[Any]:
    """Launch copies to ``target``; return the results to wait for, one per tensor.

    Args:
        target: device, or kind of host memory (``graphshard.ops.host_copy``).
        host_reads: whether the host reads the copies, which then need a second wait each; ignored
            for copies to a device.
    """
    if isinstance(target, str):
        copies = call(copy_to_host, list(tensors), target, host_reads)
    else:
        copies = call(copy_to_device, list(tensors), target)
    return [call(operator.getitem, copies, i) for i in range(len(tensors))]


def copy_and_wait(tensor: torch.Tensor, target: torch.device | str) -> torch.Tensor:
    """Copy a tensor to a device or to a kind of host memory, eagerly, and wait for the copy.

    The current stream waits for a copy to a device; the host waits for a copy to host memory.
    """
    (copy,) = launch_host_copies(run, [tensor], target, host_reads=isinstance(target, str))
    return wait_tensor(run, wait_tensor(run, copy))


def launch_replica_reduce(
    call: Call, buffers: Sequence[BufferInputs], reduced: Sequence[Value], group: str, world: int
) -> list[Any]:
    """Add totals of earlier microbatches to reduced shards, and launch the mean over replicas.

    Return the results to wait for, one per buffer.
    """
    shards = [_with_partials(call, *pair) for pair in zip(buffers, reduced, strict=True)]
    shards = [
        call(_aten.div.Scalar, shard, world) if _divides_first(group, shard) else shard
        for shard in shards
    ]
    # Without an additional dimension, Inductor would treat the wait for this all-reduce as the wait
    # for the reduce-scatter, and keep the reduce-scatter's input alive until then
    # (``_WaitKernel.get_volatile_reads`` in torch/_inductor/ir.py).
    views = [_viewed(call, shard, torch.Size([1, *value_of(shard).shape])) for shard in shards]
    return launch_collective(call, TransferKind.ALL_REDUCE_SHARDS, views, group, world)


def _divides_first(group: str, shard: Value) -> bool:
    """Return whether to divide shards before they are summed: a float16 sum may overflow."""
    return value_of(shard).dtype == torch.float16 and not averages(group, shard)


def _with_partials(call: Call, inputs: BufferInputs, shards: Value) -> Any:
    """Add the totals of earlier microbatches, if any, to a buffer of reduced shards."""
    sizes = [_reduced_shape(TransferKind.REDUCE_SCATTER, sent).numel() for sent in inputs]
    starts = [0, *itertools.accumulate(sizes)]
    partials = [(s.partial, start) for s, start in zip(inputs, starts) if s.partial is not None]
    if not partials:
        return shards
    keys, starts = map(list, zip(*partials))
    return call(add_accumulated, shards, keys, starts, value_of(shards).dtype)


def wait_buffer(
    call: Call,
    kind: TransferKind,
    buffer: Value,
    group: str,
    world: int,
    summed_in: torch.dtype | None = None,
) -> Any:
    """Wait for one buffer of a launched bucket, and turn sums into means."""
    done = wait_tensor(call, buffer)
    if kind == TransferKind.ALL_REDUCE_SHARDS:
        done = _viewed(call, done, value_of(done).shape[1:])
        if _divides_first(group, buffer):
            return done
    if kind in (TransferKind.ALL_REDUCE, TransferKind.ALL_REDUCE_SHARDS):
        return done if averages(group, buffer) else call(_aten.div.Scalar, done, world)
    if summed_in is not None:
        rows = call(_aten.view.default, done, [world, -1])
        cast = {} if value_of(rows).dtype == summed_in else {"dtype": summed_in}
        return call(_aten.mean.dim, rows, [0], **cast)
    return done


def results_in_buffer(
    call: Call, kind: TransferKind, inputs: BufferInputs, buffer: Value, world: int
) -> list[Any]:
    """Return the gathered or reduced tensors in a buffer that ``wait_buffer`` returned."""
    if kind == TransferKind.ALL_GATHER:
        return _gathered(call, inputs, _viewed_as(call, buffer, buffer_dtype(kind, inputs)), world)
    return _reduced(call, kind, inputs, buffer)


def _gathered(call: Call, inputs: BufferInputs, buffer: Value, world: int) -> list[Any]:
    """Return the full tensor ``[rows, ...]`` of each padded shard ``[ceil(rows / world), ...]``."""
    dtype = buffer_dtype(TransferKind.ALL_GATHER, inputs)
    shapes = [_gathered_shape(sent, dtype, world) for sent in inputs]
    parts = [buffer]
    if len(inputs) > 1:
        sizes = [shape.numel() // world for shape in shapes]
        copies = call(copy_out, buffer, sizes, world)
        parts = [call(operator.getitem, copies, i) for i in range(len(inputs))]
    results = []
    for part, sent, shape in zip(parts, inputs, shapes):
        full = _unpacked(call, _viewed(call, part, shape), sent.wire_dtype, dtype)
        if sent.tensor.shape[0] * world != sent.rows:  # cut off the padding
            full = call(_aten.slice.Tensor, full, 0, 0, sent.rows)
        results.append(full)
    return results


def _gathered_shape(sent: CollectiveInput, buffer: torch.dtype, world: int) -> torch.Size:
    """Return the shape of a gathered tensor with its padding, ``[world * padded rows, ...]``.

    If elements of several bytes are sent as uint8, the last dimension holds an element's bytes.
    """
    rows, *others = sent.shape
    size = sent.wire_dtype.itemsize
    as_bytes = buffer != sent.wire_dtype and size > 1
    return torch.Size([world * rows, *others, *([size] if as_bytes else [])])


def _unpacked(call: Call, full: Value, dtype: torch.dtype, buffer: torch.dtype) -> Any:
    if buffer == dtype:
        return full
    if dtype is torch.bool:  # Inductor's C++ cannot view bytes as bool
        return call(convert, full, torch.bool)
    viewed = call(_aten.view.dtype, full, dtype)
    return viewed if dtype.itemsize == 1 else call(_aten.squeeze.dim, viewed, -1)


def _reduced(call: Call, kind: TransferKind, inputs: BufferInputs, buffer: Value) -> list[Any]:
    if len({sent.result_dtype for sent in inputs}) == 1:  # one kernel casts all
        buffer = as_dtype(call, buffer, inputs[0].result_dtype)
    results, start = [], 0
    for sent in inputs:
        shape = _reduced_shape(kind, sent)
        stop = start + shape.numel()
        alone = len(inputs) == 1
        part = buffer if alone else call(_aten.slice.Tensor, buffer, 0, start, stop)
        results.append(as_dtype(call, _viewed(call, part, shape), sent.result_dtype))
        start = stop
    return results


def _reduced_shape(kind: TransferKind, sent: CollectiveInput) -> torch.Size:
    scatters = kind in (TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE_SHARDS)
    shape = sent.tensor.shape
    return torch.Size([sent.rows, *shape[1:]]) if scatters else shape


def _viewed(call: Call, buffer: Value, shape: torch.Size) -> Any:
    if value_of(buffer).shape == shape:
        return buffer
    return call(_aten.view.default, buffer, list(shape))


def _viewed_as(call: Call, buffer: Value, dtype: torch.dtype) -> Any:
    return buffer if value_of(buffer).dtype == dtype else call(_aten.view.dtype, buffer, dtype)
