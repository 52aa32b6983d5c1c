"""Clip gradients by their total norm, even if parameters are on several meshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
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
    grads: list[Any] = [param.grad for param in params if param.grad is not None]
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


def _norm_over_mesh(grads: list[Any], norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Return the norm of gradients that share a mesh; if these are DTensors, at least in float32.

    Between ranks, ``get_total_norm`` sums powers of norms in the dtype of the gradients. In
    float16, the square of 256 is infinite.
    """
    if not isinstance(grads[0], DTensor):
        return get_total_norm(grads, norm_type, foreach=foreach)
    narrow = {torch.float16, torch.bfloat16}
    if narrow.isdisjoint(grad.dtype for grad in grads):
        norm: Any = get_total_norm(grads, norm_type, foreach=foreach)
        return norm.full_tensor()
    each: Sequence[torch.Tensor]
    if foreach is not False and narrow.issuperset(grad.dtype for grad in grads):
        each = norms(grads, norm_type, torch.float32)
    else:
        each = [
            torch.linalg.vector_norm(
                grad, norm_type, dtype=torch.float32 if grad.dtype in narrow else None
            )
            for grad in grads
        ]
    norm = torch.stack([norm.to(grads[0].device) for norm in each])
    return torch.linalg.vector_norm(norm, norm_type).full_tensor()


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
