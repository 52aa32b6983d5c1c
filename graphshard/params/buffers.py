"""Make buffers equal on all ranks: each rank updates its own, such as BatchNorm's statistics.

buffers ─► one packed tensor of bytes ─► broadcast from the mesh's first rank ─► buffers
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from .._torch.distributed import process_group
from .._torch.nn import uncompiled
from .eager_calls import agreed_exchange
from .full_state_dict import mesh_groups_of
from .full_tensor import without_expanded_dims


def sync_buffers(model: nn.Module) -> None:
    """Copy the buffers of the mesh's first rank to all ranks, in one broadcast.

    As under FSDP2, the forwards of each rank update only that rank's buffers. DDP broadcasts them
    at the start of a forward, unless the previous forward ran without gradients or in ``no_sync``.
    Called at the same points, this makes them bitwise equal to DDP's. Called only before an
    evaluation, or before every rank saves, it still yields the buffers that DDP evaluates with and
    its first rank saves, because the first rank's buffers do not depend on broadcasts. A
    :func:`full_state_dict` has the first rank's buffers without it.

    All ranks of the mesh have to call it. It leaves a model that is not sharded yet unchanged,
    since sharding makes buffers equal (``sync_module_states``).

    Raises:
        ValueError: ``model`` is not a module.
        BackendError: other ranks do something else, or have different buffers.
    """
    root = uncompiled(model)
    if not isinstance(root, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module that is trained")
    groups = mesh_groups_of(root)
    named = sorted(root.named_buffers())
    facts = [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in named]
    buffers = [without_expanded_dims(buffer.detach()) for _, buffer in named if buffer.numel()]
    if groups is None or not buffers:
        return
    text = "\n".join(["a broadcast of buffers", *facts])
    plan_id = hashlib.sha256(text.encode()).hexdigest()
    with agreed_exchange(groups, plan_id, text), torch.no_grad():
        packed = torch.cat([_bytes(buffer).to(groups.device) for buffer in buffers])
        dist.broadcast(packed, group=process_group(groups.all_ranks), group_src=0)
        for buffer, part in zip(buffers, packed.split([b.nbytes for b in buffers])):
            # Clone for alignment: a part may start at any byte.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)
