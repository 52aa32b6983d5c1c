"""Ranks agree on what to shard: one exchange before anything is changed, or one error for all.

Agreement on plans and calls, from the first compile on, is in ``graphshard.consensus``. Around
graph breaks ranks also agree on which gradients there are: ``eager_unshard._used_on_any_rank`` and
``ShardedModel._pending_on_any_rank``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .._torch.distributed import process_group
from ..errors import BackendError
from ..options.options import Options
from .find import PlainParam
from .mesh_groups import MeshGroups


class _Intent(NamedTuple):
    """A rank's message to the others before anything is sharded.

    Attributes:
        fault: the reason why it cannot shard; None: it can.
        descriptions: the options, and each parameter and buffer by FQN, as text to be compared.
    """

    fault: str | None
    descriptions: Mapping[str, str]


def raise_together(
    root: nn.Module,
    plain_params: Sequence[PlainParam],
    groups: MeshGroups,
    options: Options,
    *,
    fault: str | None,
) -> None:
    """Exchange what every rank is about to shard.

    Args:
        fault: the reason why this rank cannot; None: it can.

    Raises:
        BackendError: on all ranks, if one has a fault or is about to shard something else.
    """
    descriptions = {"arguments of graphshard": options.fingerprint()}
    if fault is None:
        descriptions |= {p.fqn: _describe(p.param) + (p.float8 or "") for p in plain_params}
        descriptions |= {name: _describe(buffer) for name, buffer in root.named_buffers()}
    intents: list[_Intent] = [_Intent(None, {})] * groups.mesh.size()
    intent = _Intent(fault, descriptions)
    dist.all_gather_object(intents, intent, group=process_group(groups.all_ranks))
    for rank, intent in enumerate(intents):
        if intent.fault is not None:
            raise BackendError(f"rank {rank} of the mesh: {intent.fault}")
    first = intents[0].descriptions
    for rank, intent in enumerate(intents):
        _raise_if_different(first, intent.descriptions, rank)


def _raise_if_different(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> None:
    """Compare the descriptions of the mesh's first rank with those of ``rank``."""
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            raise BackendError(
                f"{name!r} differs between ranks: {first.get(name, 'missing')} on rank 0 of "
                f"the mesh, {other.get(name, 'missing')} on rank {rank}"
            )


def _describe(tensor: torch.Tensor) -> str:
    """Return the facts of a parameter or buffer that have to be equal on all ranks."""
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.requires_grad:
        text += " requires_grad"
    return text + " with a gradient" if tensor.grad is not None else text
