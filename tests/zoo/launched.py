"""Helpers for tests of frameworks: `torchrun`'s environment, a model, data, and checkpoint checks.

Frameworks read the environment set by `torchrun` and keep singletons, which outlive a test because
rank processes stay alive.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import PreTrainedModel

from .models import causal_batch, llama


class Kept(NamedTuple):
    """Results of the bitwise checks of saving and resuming on one rank.

    Attributes:
        saved: whether a plain model loads the saved weights.
        resumed: whether a run resumed from a checkpoint ends like an uninterrupted one.
    """

    saved: bool
    resumed: bool


def small_llama() -> PreTrainedModel:
    """Return a Llama of one layer; with two, compilation would take 50 % longer."""
    return llama(num_hidden_layers=1)


def scalars(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend(event.value for event in events.Scalars(tag))
    return found


def same(values: dict[str, Tensor], model: nn.Module | dict[str, Tensor]) -> bool:
    others = model if isinstance(model, dict) else dict(model.named_parameters())
    return values.keys() <= others.keys() and all(
        torch.equal(v, others[n]) for n, v in values.items()
    )


def updates(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    before = dict(small_llama().named_parameters())
    return {name: value - before[name].detach() for name, value in weights.items()}


def as_by_torchrun() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of equal length, the same on all ranks; frameworks distribute them."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = causal_batch(torch.Generator().manual_seed(index), rows=1)
        return {name: value[0] for name, value in batch.items()}


def call(module: str, function: str, *args: Any, steps: int | None = None) -> Any:
    """Call a training loop of a test module in this folder; ``steps`` replaces its STEPS."""
    loops: Any = importlib.import_module(f"tests.zoo.{module}")
    if steps is None:
        return getattr(loops, function)(*args)
    with mock.patch.object(loops, "STEPS", steps):
        return getattr(loops, function)(*args)
