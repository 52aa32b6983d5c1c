"""The demo's trainings: the same GPT and AdamW under graphshard, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from ..dynamo_backend import Backend
from .demo_model import GPT, SIZES, Size

SEED = 0
LEARNING_RATE = 1e-3
RAMP_STEPS = 20
"""Number of warmup steps of the learning rate; without warmup the loss is unsteady at first."""


NUM_UNTIMED_STEPS = 10
"""Number of first steps left out of medians."""


@dataclass(frozen=True)
class Settings:
    """The validated arguments of the command, with defaults filled in; equal on all ranks.

    Attributes:
        device: "cpu" or "cuda".
        num_steps: number of steps of each training.
        compiler: ``compiler`` argument of ``backend``.
        plot: path of the chart, or None.
    """

    device: str
    num_ranks: int
    num_steps: int
    compiler: str
    plot: str | None = None

    @property
    def size(self) -> Size:
        """Sizes of the model and batch on this device."""
        return SIZES[self.device]

    @property
    def num_untimed(self) -> int:
        """Number of first steps left out of medians; at most half of all steps."""
        return min(NUM_UNTIMED_STEPS, self.num_steps // 2)


class HeldMemory(NamedTuple):
    """Memory of one rank's parameters, gradients and AdamW state; shards only, if sharded."""

    params_bytes: float
    grads_bytes: float
    optimizer_state_bytes: float


@dataclass(eq=False)
class Training:
    """One of the trainings that run side by side, with its measurements.

    Attributes:
        schedule: learning-rate schedule.
        losses: loss of each step, averaged over ranks.
        seconds: time of each step on the slowest rank.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Run one step of a usual training loop and return the loss.

        Gradients are kept until the next step, so :meth:`held_memory` can count them.
        """
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def held_memory(self) -> HeldMemory:
        """Return the memory of this rank's parameters, gradients and optimizer state."""
        params = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return HeldMemory(
            params_bytes=_storage_bytes(params),
            grads_bytes=_storage_bytes(param.grad for param in params),
            optimizer_state_bytes=_storage_bytes(states),
        )

    def largest_difference(self, other: Training) -> float:
        """Return the largest difference between the two losses of a step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def _storage_bytes(values: Iterable[object]) -> int:
    """Return the bytes of storage of all tensors in ``values``, counting each storage once.

    For a DTensor, only the local shard counts.
    """
    blocks: dict[int, int] = {}
    for value in values:
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, torch.Tensor):
            storage = local.detach().untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
    return sum(blocks.values())


def new_model(size: Size, device: torch.device) -> GPT:
    """Create the model; every call on every rank returns the same parameters."""
    torch.manual_seed(SEED)
    return GPT(size).to(device)


def new_training(name: str, model: nn.Module) -> Training:
    """Create a training of ``model`` with AdamW and learning-rate warmup."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ramp = LinearLR(optimizer, 1 / RAMP_STEPS, total_iters=RAMP_STEPS)
    return Training(name=name, model=model, optimizer=optimizer, schedule=ramp)


def with_graphshard(model: nn.Module, sharding: Backend) -> Training:
    """Create the training with graphshard; ``sharding`` compiles and shards the model."""
    compiled = torch.compile(model, backend=sharding)
    assert isinstance(compiled, nn.Module)
    return new_training("graphshard", compiled)


def with_ddp(model: nn.Module, device: torch.device) -> Training:
    """Create the training with eager DDP."""
    ids = None if device.index is None else [device.index]
    return new_training("DDP, eager", DistributedDataParallel(model, device_ids=ids))


def with_fsdp2(model: GPT, mesh: DeviceMesh) -> Training:
    """Create the training with eager FSDP2, one unit per block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return new_training("FSDP2, eager", model)


def gather(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Gather the values of all ranks, ``[ranks, values]``, on the CPU."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows).cpu()
