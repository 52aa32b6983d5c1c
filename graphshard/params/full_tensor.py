"""Gather full tensors on the first rank of a mesh, and scatter them from that rank.

Rows are sent as bytes, so that every backend supports every dtype. On a 2D mesh, only the first
replica gathers or scatters; after a scatter, it sends its shards to the other replicas. If tensor
parallelism has split a tensor, every rank receives all of it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .._torch.distributed import process_group
from .._torch.dtensor import local_tensor
from .._torch.tensors import is_traceable_wrapper_subclass
from .mesh import MeshGroups
from .param_spec import ParamSpec


def spec_of(dtensor: DTensor) -> ParamSpec | None:
    """Return a spec without tensor parallelism that matches ``dtensor``, or None if none does."""
    if dtensor.device_mesh.ndim > 2:
        return None
    last = dtensor.placements[-1]
    dim = last.dim if type(last) is Shard else None
    groups = MeshGroups(dtensor.device_mesh)
    spec = ParamSpec(dtensor.shape, groups, shard=dim is not None, dim=dim or 0)
    return spec if tuple(dtensor.placements) == spec.placements else None


def gather(dtensor: DTensor) -> torch.Tensor | None:
    """Gather ``dtensor`` in full on the host of the mesh's first rank; return None on other ranks.

    All ranks of the mesh must call this.
    """
    spec = spec_of(dtensor)
    is_first = int(dtensor.device_mesh.mesh.flatten()[0]) == dist.get_rank()
    if spec is None:
        full = dtensor.full_tensor().detach()
        return full.to("cpu") if is_first else None
    if spec.rows is None:
        return plain(local_tensor(dtensor)).to("cpu", copy=True) if is_first else None
    if not _in_first_replica(spec):
        return None
    own = spec.padded(plain(local_tensor(dtensor)).to(spec.groups.device))
    padded = own.new_empty(_all_padded_rows(spec)) if is_first else None
    parts = None if padded is None else _parts(padded, spec)
    dist.gather(as_bytes(own), parts, group=process_group(spec.groups.shards), group_dst=0)
    if padded is None:
        return None
    # Copy if padded, because a file would otherwise include the padding.
    rows = padded[: spec.rows].to("cpu", copy=len(padded) > spec.rows)
    return spec.in_place(rows).contiguous()


def receive(
    full: torch.Tensor | None, like: torch.Tensor, groups: MeshGroups, spec: ParamSpec | None
) -> torch.Tensor:
    """Receive a tensor from the first rank, as a DTensor or in full on the host.

    All ranks must call this.

    Args:
        full: tensor to send, on any device; None on all but the first rank.
        like: meta tensor with the shape and dtype of the full tensor.
        spec: spec of the DTensor to return, or None to return the full tensor on every rank.
    """
    if spec is not None and spec.rows is not None and groups.tp_mesh is spec.groups.tp_mesh is None:
        return spec.dtensor(_scatter(full, like.dtype, spec))
    received = torch.empty(like.shape, dtype=like.dtype, device=groups.device)
    if full is not None:
        received.copy_(full.detach())
    if received.numel():
        dist.broadcast(as_bytes(received), group=process_group(groups.all_ranks), group_src=0)
    return received.to("cpu") if spec is None else spec.dtensor(spec.padded_shard(received))


def _scatter(full: torch.Tensor | None, dtype: torch.dtype, spec: ParamSpec) -> torch.Tensor:
    groups = spec.groups
    shard = torch.empty(spec.padded_shape, dtype=dtype, device=groups.device)
    if _in_first_replica(spec):
        parts = None
        if full is not None:
            assert spec.rows is not None
            padded = shard.new_zeros(_all_padded_rows(spec))
            padded[: spec.rows].copy_(spec.rows_first(full.detach()))
            parts = _parts(padded, spec)
        dist.scatter(as_bytes(shard), parts, group=process_group(groups.shards), group_src=0)
    if groups.replicas is not None:
        dist.broadcast(as_bytes(shard), group=process_group(groups.replicas), group_src=0)
    return shard


def _in_first_replica(spec: ParamSpec) -> bool:
    return spec.groups.replicas is None or spec.mesh.get_local_rank(0) == 0


def _all_padded_rows(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of all ranks' padded shards concatenated: only the end is padding."""
    rows, *rest = spec.padded_shape
    return (rows * spec.groups.num_shards, *rest)


def _parts(padded: torch.Tensor, spec: ParamSpec) -> list[torch.Tensor]:
    return list(as_bytes(padded).chunk(spec.groups.num_shards))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` dequantized if it is a quantized subclass, otherwise detached."""
    # The states of torchao's low-bit optimizers are such subclasses; all have dequantize().
    return tensor.dequantize() if is_traceable_wrapper_subclass(tensor) else tensor.detach()


def without_expanded_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without expanded dims (stride 0), along which all elements share memory."""
    return tensor[tuple(slice(None) if stride else 0 for stride in tensor.stride())]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1D view of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)
