"""Copy parameters and buffers of the first rank to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.distributed import process_group
from .._torch.dtensor import values_on_rank
from .full_tensor import as_bytes, without_expanded_dims
from .mesh import MeshGroups, agreed_exchange
from .trained_module import mesh_groups_of, uncompiled_module


def broadcast_from_first_rank(tensor: torch.Tensor, groups: MeshGroups) -> None:
    """Broadcast ``tensor``, in place, from the first of the ranks that must have equal values.

    These are all ranks of the model or, if ``tensor`` is a DTensor or has its own mesh in
    ``overrides``, the ranks of ``groups.mesh``. All of them must call this.
    """
    is_part = isinstance(tensor, DTensor) or groups.default is not None
    group = process_group(groups.data_ranks if is_part else groups.all_ranks)
    tensor = values_on_rank(tensor)
    if tensor.numel() == 0:
        return
    tensor = without_expanded_dims(tensor)
    values = tensor.detach().to(groups.device).contiguous()
    dist.broadcast(as_bytes(values), group=group, group_src=0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


# --- buffers: each rank updates its own, such as the statistics of BatchNorm ---------------------


def sync_buffers(model: nn.Module) -> None:
    """Copy the buffers of the mesh's first rank to all ranks.

    Takes one broadcast for plain buffers and one for DTensors, such as tensor parallelism creates:
    each rank gets those from the first rank with its coordinate along the tensor-parallel axis.

    As under FSDP2, the forwards of each rank update only that rank's buffers. DDP broadcasts them
    at the start of a forward, unless the previous forward ran without gradients or in ``no_sync``.
    Called at the same points, this makes them bitwise equal to DDP's. Called only before an
    evaluation or a save, it still yields the buffers that DDP evaluates with or saves, because the
    first rank's buffers do not depend on broadcasts. No call is needed before
    :func:`full_state_dict`.

    All ranks of the mesh must call this. A model that is not sharded yet is left unchanged, since
    sharding makes buffers equal (``sync_module_states``).

    Raises:
        ValueError: ``model`` is not a module.
        BackendError: ranks do not all call this, or their buffers differ in name, shape or dtype.
    """
    root = uncompiled_module(model)
    groups = mesh_groups_of(root)
    named = sorted(root.named_buffers())
    facts = [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in named]
    if groups is None or not any(buffer.numel() for _, buffer in named):
        return
    text = "\n".join(["a broadcast of buffers", *facts])
    with agreed_exchange(groups, text), torch.no_grad():
        for group, is_split in ((groups.all_ranks, False), (groups.data_ranks, True)):
            buffers = [b.detach() for _, b in named if isinstance(b, DTensor) == is_split]
            _broadcast_packed(list(map(values_on_rank, buffers)), groups.device, group)


def _broadcast_packed(tensors: Sequence[torch.Tensor], device: torch.device, group: str) -> None:
    tensors = [without_expanded_dims(tensor) for tensor in tensors if tensor.numel()]
    if not tensors:
        return
    packed = torch.cat([as_bytes(tensor.contiguous()).to(device) for tensor in tensors])
    dist.broadcast(packed, group=process_group(group), group_src=0)
    for tensor, part in zip(tensors, packed.split([t.nbytes for t in tensors])):
        # Clone for alignment: a part may start at any byte.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
