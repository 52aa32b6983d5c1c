"""Clip gradients by their total norm, even if parameters are on several meshes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .._torch.distributed import process_group
from .._torch.dtensor import values_on_rank
from .._torch.tensors import norms
from .sharded_param import sharded_param_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients in place by their total norm, and return that norm.

    Takes the arguments of ``torch.nn.utils.clip_grad_norm_``, which fails if gradients are on
    several meshes, such as when tensor parallelism has split only some parameters. All ranks that
    train the model must call this.

    Returns:
        The total norm before clipping, as a plain tensor. It is equal on all ranks if the gradients
        that are not DTensors are.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type = float(norm_type)  # may be "inf"
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: must be positive; use 2.0 or math.inf")
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    norms = [_whole_norm(params, norm_type, foreach) for params in by_mesh.values()]
    if not norms:
        return torch.tensor(0.0)
    # Offloaded parameters' gradients are on the host, and others may be on the device.
    on_device = [norm.to(norms[0].device) for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(on_device), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of the gradients is {norm.item()}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them anyway"
        )
    for params in by_mesh.values():
        clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def _whole_norm(params: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor:
    grads: list[Any] = [_without_partial(param.grad) for param in params if param.grad is not None]
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads)).to_real()
    known = sharded_param_of(params[0])
    local = known.spec if known is not None and known.spec.is_local else None
    # Ranks outside of the mesh of local parameters hold different ones.
    group = None if local is None else process_group(local.groups.all_ranks)
    if math.isinf(norm_type):
        return _largest(grads, dtype, group, foreach)
    norm = _norm_over_mesh(grads, norm_type, foreach)
    if local is not None:
        total = norm**norm_type / local.mesh.size()  # each rank of the mesh adds the same norm
        dist.all_reduce(total, group=group)
        norm = total ** (1 / norm_type)
    return norm.to(dtype)


def _without_partial(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in grad.placements]
    )


def _norm_over_mesh(grads: list[Any], norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Return the norm of gradients that share a mesh; if these are DTensors, at least in float32.

    ``get_total_norm`` of DTensors sums powers of norms in the dtype of the gradients, but in
    float16, the square of 256 is infinite. It also fails if the mesh has its axes in another order
    than the mesh that they are slices of.
    """
    if not isinstance(grads[0], DTensor):
        return get_total_norm(grads, norm_type, foreach=foreach)
    mesh, device = grads[0].device_mesh, grads[0].device
    alike: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        split = [not placement.is_replicate() for placement in grad.placements]
        alike.setdefault((grad.dtype, *split), []).append(values_on_rank(grad))
    total: Any = 0.0
    for (dtype, *split), local in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        if foreach is False:
            each: Sequence[torch.Tensor] = [
                torch.linalg.vector_norm(grad, norm_type, dtype=wide) for grad in local
            ]
        else:
            each = norms(local, norm_type, wide)
        power = torch.stack([norm.to(device) for norm in each]).pow(norm_type).sum()
        for axis in itertools.compress(range(mesh.ndim), split):
            dist.all_reduce(power, group=mesh.get_group(axis))
        total = total + power
    return total ** (1 / norm_type)


def _largest(
    grads: list[Any], dtype: torch.dtype, group: dist.ProcessGroup | None, foreach: bool | None
) -> torch.Tensor:
    """Return the infinity norm of gradients that share a mesh.

    Args:
        group: ranks to include, among them those of the mesh; None for only these.
    """
    local = [values_on_rank(grad) for grad in grads]
    norm = torch.zeros((), dtype=dtype, device=local[0].device)
    # Ranks without rows have empty gradients, whose infinity norm torch cannot compute.
    if filled := [grad for grad in local if grad.numel()]:
        norm.copy_(get_total_norm(filled, math.inf, foreach=foreach))
    groups = [] if group is None else [group]
    if group is None and isinstance(grads[0], DTensor):
        mesh = grads[0].device_mesh
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    # The maximum of a number and NaN may be either, depending on the order of ranks.
    is_nan = norm.isnan()
    largest = torch.stack([norm.masked_fill(is_nan, 0.0), is_nan.to(dtype)])
    for one in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=one)
    return largest[0].masked_fill(largest[1].bool(), math.nan)
