"""Handlers for torch calls that take a sharded parameter; ``shard_module`` registers them.

The calls are ``torch.autograd.grad``, ``backward(inputs=)``, ``p.data = x`` and those of
``GradScaler`` that take an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch.distributed import process_group
from .._torch.dtensor import local_tensor, replace_data
from .._torch.nn import outside_inference_mode
from ..errors import BackendError
from .pickling import has_shards
from .sharded_param import sharded_param_of

# --- inputs of torch.autograd.grad and backward(inputs=) -----------------------------------------
# Users pass the DTensor. It is a leaf of what is computed from it outside of forward, such as a
# penalty, but the graph of a forward has the shard and the accumulators' stand-ins as leaves.


def leaves_of(value: object, accumulates: bool) -> list[torch.Tensor]:
    """Return the other leaves that get gradients of ``value``, if it is a sharded parameter.

    Args:
        accumulates: whether gradients accumulate in ``.grad``, as in ``backward(inputs=)``; if not,
            they are returned, as by ``torch.autograd.grad``.

    Raises:
        BackendError: gradients are to be returned, but unreduced ones accumulate.
    """
    sharded_param = sharded_param_of(value)
    if sharded_param is None or not sharded_param.is_attached():
        return []
    if sharded_param.dtensor is not value:  # a copy
        return []
    sharded_param.sync_requires_grad()
    if accumulates:  # backward(), which returns no gradients
        return [sharded_param.shard, *sharded_param.stand_ins()]
    if sharded_param.model.accumulates:
        raise BackendError(
            f"torch.autograd.grad cannot return the gradient of {sharded_param.fqn!r} while "
            "unreduced gradients accumulate (no_sync, set_requires_gradient_sync, "
            "set_requires_all_reduce): call backward(), or call grad after they are reduced"
        )
    return [sharded_param.shard]


def gradient_of(
    param: torch.Tensor, grad: torch.Tensor | None, padded_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Add the gradient of a sharded parameter itself and the padded gradient of its shard."""
    sharded_param = sharded_param_of(param)
    assert sharded_param is not None
    sharded_param.model.raise_if_changed()
    if padded_grad is None:
        return grad
    if padded_grad.requires_grad:
        raise BackendError(
            f"parameter {sharded_param.fqn!r} is sharded and has no second-order gradients "
            "(create_graph=True): use an unsharded model"
        )
    # Clone: ``gradient`` may scale in place, and repeated inputs share one gradient.
    of_shard = sharded_param.gradient(padded_grad.clone())
    return of_shard if grad is None else of_shard + grad


def refuse_split_backward(weights: Iterable[torch.Tensor]) -> None:
    """Raise if a pipeline schedule would lose the gradients of sharded weights.

    It looks for the nodes of the DTensors in a graph that has those of the shards, and would run
    the backward of a compiled stage twice.

    Raises:
        BackendError: one of ``weights`` is sharded.
    """
    for sharded_param in filter(None, map(sharded_param_of, weights)):
        raise BackendError(
            f"parameter {sharded_param.fqn!r} is sharded, so it would get no gradient from this "
            "pipeline schedule, which computes gradients of a stage's inputs and weights "
            "separately, as ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble and "
            "ScheduleDualPipeV do: use a schedule with whole backwards, such as "
            "ScheduleInterleaved1F1B"
        )


# --- p.data = x: sharpness-aware optimizers, clamping and averaging swap values like this --------


@torch.no_grad()
@outside_inference_mode()
def assign_data(dtensor: DTensor, value: object) -> bool:
    """Assign this rank's part of ``value`` to a sharded parameter: ``p.data = value``.

    ``value`` is copied; a DTensor with other placements is redistributed, which is a collective.

    Returns:
        Whether ``value`` was assigned: False if it is not a tensor, or if ``dtensor`` is not
        sharded or no longer attached to its shard.

    Raises:
        BackendError: ``value`` has another shape, or is a DTensor on another mesh; or ``value`` is
            plain and ``dtensor`` not a parameter, but a gradient or a copy for example.
    """
    if not isinstance(value, torch.Tensor):
        return False
    sharded_param = sharded_param_of(dtensor)
    if sharded_param is None or not sharded_param.is_attached_to(dtensor):
        if not isinstance(value, DTensor) and has_shards(dtensor.device_mesh):
            raise BackendError(
                f"cannot assign a plain tensor of shape {tuple(value.shape)} to the data of a "
                f"DTensor of shape {tuple(dtensor.shape)} that has no shard in a model (yet): "
                "assign a DTensor, such as torch.distributed.tensor.distribute_tensor(value, "
                "old.device_mesh, old.placements)"
            )
        return False
    spec, dtype = sharded_param.spec, dtensor.dtype
    error = None
    if value.shape != spec.shape:
        error = f"the value has the shape {tuple(value.shape)} instead of {tuple(spec.shape)}"
    elif isinstance(value, DTensor) and value.device_mesh != spec.mesh:
        error = f"the value is on {value.device_mesh} instead of {spec.mesh}"
    if error is not None:
        raise BackendError(
            f"cannot assign to the data of parameter {spec.fqn!r}: {error}. Assign a full tensor "
            "that is equal on all ranks, or a DTensor on the parameter's mesh"
        )
    if isinstance(value, DTensor):
        local = local_tensor(value.redistribute(placements=spec.placements))
    else:
        local = value[spec.part].to(local_tensor(dtensor).device)
    # A new shard: the old values stay valid for tensors that ``p.data`` returned before, and for a
    # forward whose backward has yet to run.
    replace_data(dtensor, spec.dtensor(local.clone() if spec.rows is None else spec.padded(local)))
    sharded_param.attach(dtensor)
    if dtensor.dtype != dtype:
        sharded_param.refresh_accessors()
    return True


# --- scaler.step(optimizer), scaler.unscale_(optimizer) ------------------------------------------


def share_found_infs(optimizer: Optimizer, found_infs: Sequence[torch.Tensor]) -> None:
    """Set ``found_infs`` to their maximum over all ranks of the models that ``optimizer`` trains.

    All ranks must call this. Nothing changes for an optimizer without sharded parameters.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    groups = [param.spec.groups for param in filter(None, map(sharded_param_of, params))]
    for name, device in {one.all_ranks: one.device for one in groups}.items():
        # Some are on the host if gradients are offloaded.
        largest = torch.stack([found.to(device) for found in found_infs]).amax()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=process_group(name))
        for found in found_infs:
            found.copy_(largest)
