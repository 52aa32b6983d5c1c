"""Makes buffers equal on all ranks, such as BatchNorm's statistics, which are each rank's own.

buffers ─► one packed tensor of bytes ─► broadcast of the mesh's first rank ─► buffers
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
from .full_tensor import without_repeats


def sync_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of the mesh's first rank, by one broadcast.

    As under FSDP2, each rank's forwards write its own buffers. DDP broadcasts them at the start of
    a forward, unless the forward before was without gradients or in ``no_sync``: a call of this
    there makes them equal to DDP's bit by bit. One before an evaluation, or before a save by each
    rank, gives what DDP evaluates with and what its first rank saves, because the first rank's
    buffers are its own in any case. A :func:`full_state_dict` has these without it.

    All ranks of the mesh have to call it. A model that is not sharded yet is left as it is, since
    sharding makes buffers equal (``sync_module_states``).

    Raises:
        ValueError: ``model`` is no module.
        BackendError: ranks do something else, or have other buffers.
    """
    root = uncompiled(model)
    if not isinstance(root, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module that is trained")
    groups = mesh_groups_of(root)
    named = sorted(root.named_buffers())
    facts = [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in named]
    buffers = [without_repeats(buffer.detach()) for _, buffer in named if buffer.numel()]
    if groups is None or not buffers:
        return
    text = "\n".join(["a broadcast of buffers", *facts])
    plan_id = hashlib.sha256(text.encode()).hexdigest()
    with agreed_exchange(groups, plan_id, text), torch.no_grad():
        packed = torch.cat([_bytes(buffer).to(groups.device) for buffer in buffers])
        dist.broadcast(packed, group=process_group(groups.all_ranks), group_src=0)
        for buffer, part in zip(buffers, packed.split([b.nbytes for b in buffers])):
            # A copy, which begins where any dtype may.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)
