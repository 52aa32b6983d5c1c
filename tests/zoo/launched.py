"""What tests of frameworks share: what `torchrun` tells a process, for frameworks that ask for
nothing else; their singletons, which outlive a test in ranks that stay alive; a model, its data,
and what is found of checkpoints."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel

from .models import causal_batch, llama


class Kept(NamedTuple):
    """What of a training is kept, bitwise.

    Attributes:
        saved: what is saved is loaded by a plain model, on this rank.
        resumed: a training that goes on from it ends as one that was not interrupted.
    """

    saved: bool
    resumed: bool


def small_llama() -> PreTrainedModel:
    """Return a Llama of one layer: of two a test takes half as long again to compile."""
    return llama(num_hidden_layers=1)


def same(values: dict[str, Tensor], model: nn.Module | dict[str, Tensor]) -> bool:
    """Return whether ``values`` are bitwise those of a plain model, or of another dictionary."""
    others = model if isinstance(model, dict) else dict(model.named_parameters())
    return values.keys() <= others.keys() and all(
        torch.equal(v, others[n]) for n, v in values.items()
    )


def updates(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return by how much training changed each weight of the small Llama, from seed 0."""
    torch.manual_seed(0)
    before = dict(small_llama().named_parameters())
    return {name: value - before[name].detach() for name, value in weights.items()}


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


def call(module: str, function: str, *args: Any, steps: int | None = None) -> Any:
    """Call a loop of a test in this folder, with so many steps in place of its STEPS."""
    loops: Any = importlib.import_module(f"tests.zoo.{module}")
    if steps is None:
        return getattr(loops, function)(*args)
    before, loops.STEPS = loops.STEPS, steps
    try:
        return getattr(loops, function)(*args)
    finally:
        loops.STEPS = before
