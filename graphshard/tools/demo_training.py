"""The demo's training runs: the same GPT and AdamW under graphshard, DDP and FSDP2, compiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

from .._torch.modelled_wire import gather_ahead
from ..dynamo_backend import Backend
from .demo_model import SIZES, new_model

LEARNING_RATE = 1e-3
WARMUP_STEPS = 20  # learning rate warmup, without which the loss is unstable at first
UNTIMED_STEPS = 5  # first steps excluded from medians; at most half of all steps


@dataclass(frozen=True)
class Settings:
    """The validated arguments of the command, equal on all ranks."""

    device: str
    num_ranks: int
    num_steps: int
    compiler: str
    html: str | None = None
    dump: str | None = None

    @property
    def num_untimed(self) -> int:
        return min(UNTIMED_STEPS, self.num_steps // 2)

    @property
    def timed(self) -> slice:
        """Range of the steps whose times give the speed without the modelled wire."""
        return slice(self.num_untimed, self.num_steps)

    @property
    def num_wire_steps(self) -> int:
        """Number of further steps, on the modelled wire; 0 on GPUs or with one rank."""
        has_wire = self.device == "cpu" and self.num_ranks > 1
        return max(3, self.num_steps // 3) if has_wire else 0

    @property
    def wired(self) -> slice:
        """Range of the modelled wire's steps whose times give the speed: all but the first."""
        return slice(self.num_steps + 1, None)

    def rate(self, seconds: Sequence[float]) -> float:
        """Return the median bytes of text per second of all ranks together."""
        size = SIZES[self.device]
        return self.num_ranks * size.batch * size.context / statistics.median(seconds)


@dataclass(eq=False)
class Training:
    """A training run with its measurements."""

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)  # per step, averaged over ranks
    seconds: list[float] = field(default_factory=list)  # per step, on the slowest rank
    # Bytes of parameters, gradients and AdamW state, each on the rank with the most of that kind.
    held_bytes: Sequence[float] = ()

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.schedule = LinearLR(self.optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)

    def step(self, batch: torch.Tensor) -> None:
        dist.barrier()  # start at the same time on all ranks
        _synchronize(batch.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()  # not at the end of a step: ``count_memory`` counts gradients
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        _synchronize(batch.device)
        measured = [loss.item(), time.perf_counter() - start]
        losses, seconds = _gather(measured, batch.device).unbind(dim=1)
        self.losses.append(losses.mean().item())
        self.seconds.append(seconds.max().item())

    def count_memory(self, device: torch.device) -> None:
        params = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kinds = (params, [param.grad for param in params], states)
        held = _gather([_storage_bytes(tensors) for tensors in kinds], device)
        self.held_bytes = held.max(dim=0).values.tolist()

    def difference(self, other: Training) -> float:
        """Return the largest difference from ``other``'s loss in any step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Gather the values of all ranks, ``[ranks, values]``, on the CPU."""
    local = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local)
    return torch.stack(rows).cpu()


def _storage_bytes(values: Iterable[object]) -> int:
    """Return the bytes of the storages of all tensors or DTensors' shards, each counted once."""
    sizes: dict[int, int] = {}
    for value in values:
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, torch.Tensor):
            storage = local.detach().untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def new_trainings(
    settings: Settings, mesh: DeviceMesh, device: torch.device, sharding: Backend
) -> list[Training]:
    """Return the runs of graphshard, compiled DDP, and FSDP2 with a compiled unit per block."""
    # All runs on all ranks start from the same parameters.
    models = [new_model(SIZES[settings.device], device) for _ in range(3)]
    compiled = torch.compile(models[0], backend=sharding)
    assert isinstance(compiled, nn.Module)
    ids = None if device.index is None else [device.index]
    replicated = torch.compile(
        DistributedDataParallel(models[1], device_ids=ids), backend=settings.compiler
    )
    assert isinstance(replicated, nn.Module)
    # FSDP2 at its best: compile the blocks, and prefetch each during the previous one.
    for block in models[2].blocks:
        block.compile(backend=settings.compiler)
    sharded = [fully_shard(block, mesh=mesh) for block in models[2].blocks]
    fully_shard(models[2], mesh=mesh)
    for unit, after in pairwise(sharded):
        unit.set_modules_to_forward_prefetch([after])
    if device.type == "cpu":
        gather_ahead(models[2])
    return [
        Training("graphshard", compiled),
        Training("DDP, compiled", replicated),
        Training("FSDP2, compiled blocks", models[2]),
    ]
