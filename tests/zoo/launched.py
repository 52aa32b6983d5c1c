"""What `torchrun` tells a process, for frameworks that ask for nothing else; and their singletons,
which outlive a test in ranks that stay alive."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from .models import causal_batch


def as_by_torchrun() -> None:
    """Set the environment of this rank, and forget what Accelerate knows of an earlier test."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of one length, the same on every rank; frameworks share them out."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = causal_batch(torch.Generator().manual_seed(index), rows=1)
        return {name: value[0] for name, value in batch.items()}
