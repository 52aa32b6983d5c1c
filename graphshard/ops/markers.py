"""The marker ops, which represent sharded parameters and their gradients until graphs are lowered.

A parameter enters the graph as its padded local shard, which ``unshard`` gathers. In backward,
``reduce_grad`` turns the full gradient into a shard, averaged over the group:

    forward    shard ─► unshard ─► linear         backward   grad ─► reduce_grad ─► shard's grad

A parameter that is not split (a scalar, or one to be replicated) uses ``replicate`` and
``all_reduce_grad``. ``max_over_ranks`` reduces the largest absolute values, from which fp8 scales
are computed. ``secondary_shard`` returns a padded shard of a full parameter, from which backward
gathers within a few ranks (hpZ); it is not lowered. ``offload_activation`` and
``reload_activation`` copy activations. ``marker_specs`` defines the arguments of all markers except
``secondary_shard``.

The ops are opaque to Dynamo, AOTAutograd and Inductor's joint passes; ``graphshard.passes`` lowers
them to functional collectives, host copies and casts. In eager parts of a model, the ops run
directly, by the same functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from .._torch.distributed import process_group
from .._torch.tensors import OpOverload, fake_mode_of
from ..kinds import TransferKind
from . import collectives
from .accumulators import PARTIAL
from .bucket_copy import add_accumulated
from .collectives import CollectiveInput
from .groups import padded_rows, rows_of_rank
from .library import define, differentiate, fake, implement
from .marker_specs import (
    AllReduceGradSpec,
    MarkerSpec,
    MaxOverRanksSpec,
    OffloadSpec,
    ReduceGradSpec,
    ReloadSpec,
    ReplicateSpec,
    UnshardSpec,
    used_dtype,
)
from .nodes import Value, run, value_of

unshard = define(UnshardSpec.schema())
reduce_grad = define(ReduceGradSpec.schema())
replicate = define(ReplicateSpec.schema())
all_reduce_grad = define(AllReduceGradSpec.schema())
max_over_ranks = define(MaxOverRanksSpec.schema())
offload_activation = define(OffloadSpec.schema())
reload_activation = define(ReloadSpec.schema())
secondary_shard = define("secondary_shard(Tensor full, str group) -> Tensor")

UNSHARD_MARKERS = (unshard, replicate)
REDUCE_MARKERS = (reduce_grad, all_reduce_grad)
PARAM_MARKERS = (*UNSHARD_MARKERS, *REDUCE_MARKERS)
SPECS: dict[OpOverload, type[MarkerSpec]] = {
    cls.op(): cls
    for cls in (
        UnshardSpec,
        ReduceGradSpec,
        ReplicateSpec,
        AllReduceGradSpec,
        MaxOverRanksSpec,
        OffloadSpec,
        ReloadSpec,
    )
}

_Spec = TypeVar("_Spec", bound=MarkerSpec)


def is_marker(node: fx.Node) -> bool:
    """Return whether ``node`` calls a marker op."""
    return node.target in SPECS


def read(node: fx.Node) -> MarkerSpec:
    """Return the spec of a marker in a graph."""
    return SPECS[node.target].of_node(node)  # type: ignore[index]  # targets are ops or names


def change(node: fx.Node, **fields: object) -> None:
    """Change arguments of a marker in a graph, in place, and recompute its fake value."""
    spec = dataclasses.replace(read(node), **fields)
    node.args = spec.arguments()
    values = fx.map_arg(node.args, lambda n: n.meta["val"])
    with fake_mode_of(values):
        node.meta["val"] = spec.op()(*values)
    node.meta.pop("tensor_meta", None)


def _implement(cls: type[_Spec]) -> Callable[[Callable[[_Spec], torch.Tensor]], object]:
    """Register the decorated function, which takes a spec, as the kernel of the spec's op."""
    return lambda function: implement(cls.op())(lambda *args: function(cls(*args)))


def _fake(cls: type[_Spec]) -> Callable[[Callable[[_Spec], torch.Tensor]], object]:
    return lambda function: fake(cls.op())(lambda *args: function(cls(*args)))


def _communicate(
    kind: TransferKind, sent: CollectiveInput, group: str, replica_group: str | None = None
) -> torch.Tensor:
    world = process_group(group).size()
    (buffer,) = collectives.launch_bucket(run, kind, [[sent]], group, world)
    done = collectives.wait_buffer(run, kind, buffer, group, world, sent.summed_in)
    if replica_group is not None:
        num_replicas = process_group(replica_group).size()
        (buffer,) = collectives.launch_replica_reduce(
            run, [[sent]], [done], replica_group, num_replicas
        )
        done = collectives.wait_buffer(
            run, TransferKind.ALL_REDUCE_SHARDS, buffer, replica_group, num_replicas
        )
    (result,) = collectives.results_in_buffer(run, kind, [sent], done, world)
    return result


# [Note: padded shards] Rows are split as by ``torch.chunk``: ``ceil(rows / world)`` per rank,
# fewer or none on the last ranks. The tensor that enters the graph is padded to
# ``ceil(rows / world)`` rows on every rank, so all ranks trace the same graph. Gathered rows past
# ``rows`` are padding, which a view cuts off. The padding of a gradient is zero.


@_implement(UnshardSpec)
def _unshard(spec: UnshardSpec) -> torch.Tensor:
    sent = spec.collective_input()
    if spec.device is not None:
        sent = sent._replace(source=collectives.copy_and_wait(value_of(spec.shard), spec.device))
    return _communicate(TransferKind.ALL_GATHER, sent, spec.group)


@_fake(UnshardSpec)
def _unshard_fake(spec: UnshardSpec) -> torch.Tensor:
    sent = spec.collective_input()
    shape = (spec.rows, *sent.shape[1:])
    return sent.tensor.new_empty(shape, dtype=sent.wire_dtype, device=spec.device)


@_implement(ReduceGradSpec)
def _reduce_grad(spec: ReduceGradSpec) -> torch.Tensor:
    sent = spec.collective_input()
    reduced = _communicate(TransferKind.REDUCE_SCATTER, sent, spec.group, spec.replica_group)
    host_memory = spec.host_memory
    return reduced if host_memory is None else collectives.copy_and_wait(reduced, host_memory)


@_fake(ReduceGradSpec)
def _reduce_grad_fake(spec: ReduceGradSpec) -> torch.Tensor:
    grad = value_of(spec.grad)
    return grad.new_empty(
        (spec.padded_rows, *grad.shape[1:]),
        dtype=spec.result_dtype or grad.dtype,
        device=grad.device if spec.host_memory is None else "cpu",
    )


@_implement(ReplicateSpec)
def _replicate(spec: ReplicateSpec) -> torch.Tensor:
    param = value_of(spec.param)
    return param.to(used_dtype(param, spec.dtype), copy=True)


@_fake(ReplicateSpec)
def _replicate_fake(spec: ReplicateSpec) -> torch.Tensor:
    param = value_of(spec.param)
    return param.new_empty(param.shape, dtype=used_dtype(param, spec.dtype))


@_implement(AllReduceGradSpec)
def _all_reduce_grad(spec: AllReduceGradSpec) -> torch.Tensor:
    return _communicate(TransferKind.ALL_REDUCE, spec.collective_input(), spec.group)


@_fake(AllReduceGradSpec)
def _all_reduce_grad_fake(spec: AllReduceGradSpec) -> torch.Tensor:
    grad = value_of(spec.grad)
    return grad.new_empty(grad.shape, dtype=spec.result_dtype or grad.dtype)


@_implement(MaxOverRanksSpec)
def _max_over_ranks(spec: MaxOverRanksSpec) -> torch.Tensor:
    return _communicate(TransferKind.ALL_REDUCE_MAX, spec.collective_input(), spec.group)


implement(offload_activation)(collectives.copy_and_wait)
implement(reload_activation)(collectives.copy_and_wait)
fake(max_over_ranks)(lambda amax, group: torch.empty_like(amax))
fake(offload_activation)(lambda tensor, host_memory: torch.empty_like(tensor, device="cpu"))
fake(reload_activation)(lambda tensor, device: torch.empty_like(tensor, device=device))


@implement(secondary_shard)
def _secondary_shard(full: torch.Tensor, group: str) -> torch.Tensor:
    shard = _secondary_shard_fake(full, group)
    process = process_group(group)
    own = full[rows_of_rank(full.shape[0], process.size(), process.rank())]
    shard[: own.shape[0]] = own
    shard[own.shape[0] :].zero_()
    return shard


@fake(secondary_shard)
def _secondary_shard_fake(full: torch.Tensor, group: str) -> torch.Tensor:
    rows = padded_rows(full.shape[0], process_group(group).size())
    return full.new_empty((rows, *full.shape[1:]))


# Gradients of microbatches add up in accumulators (``graphshard.params.sharded_param``). A marker
# takes an accumulator in one of two forms:
#
# - Its stand-in, which requires a gradient. Instead of the shard, the stand-in gets the gradient,
#   before the reduction (``unsynced``) or before the average over replicas (``partial``).
# - Its key. The marker's backward adds the total to the gradient, before the reduction
#   (``unsynced``) or between reduce-scatter and the average over replicas (``partial``).


def _is_stand_in(accumulator: Value | None) -> bool:
    return accumulator is not None and value_of(accumulator).requires_grad


def _save(
    cls: type[UnshardSpec | ReplicateSpec], ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor
) -> None:
    param, spec = inputs[0], cls(*inputs)
    accumulators = spec.unsynced, getattr(spec, PARTIAL, None)
    # Backward must not keep tensors through the spec.
    names = zip(cls.argument_names(), inputs)
    nothing: dict[str, Any] = {n: None for n, v in names if isinstance(v, (torch.Tensor, list))}
    ctx.spec = dataclasses.replace(spec, **nothing)
    ctx.padded_shape, ctx.param_dtype = param.shape, param.dtype
    ctx.to_unsynced, ctx.to_partial = map(_is_stand_in, accumulators)
    ctx.save_for_backward(*(None if _is_stand_in(a) else a for a in accumulators))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    spec, dtype = ctx.spec, used_dtype(grad, ctx.spec.reduce_dtype)
    if ctx.to_unsynced:
        return spec.gradients(unsynced=grad.to(dtype))
    unsynced, partial = ctx.saved_tensors
    if unsynced is not None:
        grad = add_accumulated(grad, [unsynced], [0], dtype)
    if ctx.to_partial:
        return spec.gradients(partial=spec.partial_reduction(grad, ctx.padded_shape).call(run))
    reduction = spec.reduction(grad, ctx.padded_shape, ctx.param_dtype, partial)
    return spec.gradients(**{spec.argument_names()[0]: reduction.call(run)})


for _cls in (UnshardSpec, ReplicateSpec):
    differentiate(_cls.op(), functools.partial(_save, _cls), _backward)
