"""Gather shards to a full tensor on the first rank of a mesh, or scatter one from that rank.

Rows travel as bytes, which every backend can send, and straight to or from their place in the full
tensor, unless they are padded. On a 2D mesh only the first replica gathers and scatters; the others
then receive their shards from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from .._torch.distributed import process_group
from .._torch.dtensor import local_tensor
from .._torch.tensors import is_traceable_wrapper_subclass
from ..ops.groups import rows_of_rank
from .mesh import MeshGroups
from .param_spec import ParamSpec


def spec_of(dtensor: DTensor) -> ParamSpec | None:
    """Return the spec of ``dtensor``; None if it is split other than by rows over shards."""
    sharded = dtensor.placements[-1] == Shard(0)
    spec = ParamSpec(dtensor.shape, MeshGroups(dtensor.device_mesh), shard=sharded)
    return spec if tuple(dtensor.placements) == spec.placements else None


def gather(dtensor: DTensor) -> torch.Tensor | None:
    """Return a full copy on the first rank of the mesh; the result on other ranks is undefined."""
    spec = spec_of(dtensor)
    if spec is None:
        return dtensor.full_tensor().detach()
    if spec.rows is None:
        return plain(local_tensor(dtensor)).clone()
    if not _in_first_replica(spec):
        return None
    own = spec.padded(plain(local_tensor(dtensor)).to(spec.groups.device))
    group = process_group(spec.groups.shards)
    if spec.groups.shard_index != 0:
        dist.gather(_bytes(own), group=group, group_dst=0)
        return None
    full = own.new_empty(spec.shape)
    parts = _parts(full, spec)
    dist.gather(_bytes(own), [_bytes(part.padded) for part in parts], group=group, group_dst=0)
    for part in parts:
        if part.padded is not part.rows:
            part.rows.copy_(part.padded[: part.rows.shape[0]])
    return full


def scatter(full: torch.Tensor | None, dtype: torch.dtype, spec: ParamSpec) -> DTensor:
    """Scatter a full tensor from the first rank; return its DTensor on the mesh's device.

    Args:
        full: tensor of ``spec.shape`` on the first rank, on any device; None on the others.
        dtype: dtype of the tensor.
    """
    groups = spec.groups
    shard = torch.empty(spec.padded_shape, dtype=dtype, device=groups.device)
    if spec.rows is None:
        return spec.dtensor(broadcast(full, shard, groups))
    if _in_first_replica(spec):
        parts = None
        if full is not None:
            full = full.detach().to(groups.device).contiguous()
            parts = [_bytes(part.padded) for part in _parts(full, spec)]
        dist.scatter(_bytes(shard), parts, group=process_group(groups.shards), group_src=0)
    if groups.replicas is not None:
        dist.broadcast(_bytes(shard), group=process_group(groups.replicas), group_src=0)
    return spec.dtensor(shard)


def broadcast(full: torch.Tensor | None, buffer: torch.Tensor, groups: MeshGroups) -> torch.Tensor:
    """Broadcast the first rank's ``full`` into ``buffer``, and return that."""
    if full is not None:
        buffer.copy_(full.detach())
    if buffer.numel():
        dist.broadcast(_bytes(buffer), group=process_group(groups.all_ranks), group_src=0)
    return buffer


def _in_first_replica(spec: ParamSpec) -> bool:
    return spec.groups.replicas is None or spec.mesh.get_local_rank(0) == 0


class _Part(NamedTuple):
    """A rank's rows of a full tensor, and the padded tensor that is sent or received for them.

    Both are the same view of the full tensor if there is no padding.
    """

    rows: torch.Tensor
    padded: torch.Tensor


def _parts(full: torch.Tensor, spec: ParamSpec) -> list[_Part]:
    """Return the parts of ``full``, one for each rank."""
    assert spec.rows is not None
    size, parts = spec.groups.num_shards, []
    for rank in range(size):
        rows = full[rows_of_rank(spec.rows, size, rank)]
        is_whole = rows.shape == spec.padded_shape
        parts.append(_Part(rows, rows if is_whole else spec.padded(rows)))
    return parts


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, and dequantized if it is a quantized subclass.

    The states of torchao's 8-bit optimizers are such subclasses; all have ``dequantize()``.
    """
    return tensor.dequantize() if is_traceable_wrapper_subclass(tensor) else tensor.detach()


def without_expanded_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` with one element of each expanded (stride 0) dim.

    The elements of such a dim share memory.
    """
    return tensor[tuple(slice(None) if stride else 0 for stride in tensor.stride())]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1D view of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)
