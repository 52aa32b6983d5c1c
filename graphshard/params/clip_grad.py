"""Clip gradients by their total norm, even if parameters are on several meshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .._torch.distributed import process_group
from .._torch.dtensor import local_tensor
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


def _largest(grads: list[Any], foreach: bool | None) -> torch.Tensor:
    """Return the infinity norm of DTensor gradients that share a mesh, over all its ranks."""
    local = [local_tensor(grad) for grad in grads]
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in local)).to_real()
    norm = torch.zeros((), dtype=dtype, device=local[0].device)
    # Ranks without rows have empty gradients, whose infinity norm torch cannot compute.
    if filled := [grad for grad in local if grad.numel()]:
        norm.copy_(get_total_norm(filled, math.inf, foreach=foreach))
    mesh = grads[0].device_mesh
    for axis in range(mesh.ndim):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return norm


def _whole_norm(params: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor:
    grads = [param.grad for param in params if param.grad is not None]
    if norm_type == math.inf and isinstance(grads[0], DTensor):
        norm: Any = _largest(grads, foreach)
    else:
        norm = get_total_norm(grads, norm_type, foreach=foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    known = sharded_param_of(params[0])
    if known is None or not known.spec.is_local:
        return norm
    # Ranks outside of the mesh hold different parameters.
    group = process_group(known.spec.groups.all_ranks)
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    total = norm**norm_type / known.spec.mesh.size()  # each rank of the mesh adds the same norm
    dist.all_reduce(total, group=group)
    return total ** (1 / norm_type)
