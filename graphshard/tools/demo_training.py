"""The demo's trainings: the same GPT and AdamW under graphshard, DDP and FSDP2."""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

from ..dynamo_backend import Backend

VOCAB = 256  # every byte is a token
TEXT_BYTES = 4_000_000
WARMUP_STEPS = 20  # of the learning rate; without them the loss is unsteady at first
UNTIMED_STEPS = 10  # first steps left out of medians; at most half of all steps


class Size(NamedTuple):
    """Sizes of the model and its training; ``batch`` is that of one rank."""

    layers: int
    heads: int
    dim: int
    context: int
    batch: int
    steps: int


# On a CPU, the whole demo has to finish within a few minutes.
SIZES = {
    "cpu": Size(layers=4, heads=4, dim=256, context=128, batch=8, steps=60),
    "cuda": Size(layers=12, heads=12, dim=768, context=512, batch=8, steps=200),
}


@dataclass(frozen=True)
class Settings:
    """The validated arguments of the command; equal on all ranks."""

    device: str
    num_ranks: int
    num_steps: int
    compiler: str
    plot: str | None = None

    @property
    def num_untimed(self) -> int:
        return min(UNTIMED_STEPS, self.num_steps // 2)

    def rate(self, seconds: Sequence[float]) -> float:
        """Return the tokens/s of all ranks, as the median over steps."""
        size = SIZES[self.device]
        return self.num_ranks * size.batch * size.context / statistics.median(seconds)


class Block(nn.Module):
    """A pre-norm layer of a GPT: the unit that FSDP2 shards."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, length, dim]`` to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT that returns its loss; the output layer shares the embedding's weight."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, size.dim)
        self.position = nn.Embedding(size.context, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCAB, bias=False)
        for name, param in self.named_parameters():  # as in GPT-2
            residual = name.endswith(("out.weight", "down.weight"))
            if param.dim() == 2:
                std = 0.02 / math.sqrt(2 * size.layers) if residual else 0.02
                nn.init.normal_(param, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(param)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of predicting ``tokens[:, 1:]``, in nats per byte."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def load_text() -> torch.Tensor:
    """Return the first bytes of the standard library's modules, sorted by name.

    Raises:
        RuntimeError: this Python installation has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if len(text) < 100_000:
        raise RuntimeError(
            f"{folder} holds only {len(text)} bytes of *.py: the demo trains on the sources of "
            "Python's standard library, which this installation leaves out"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES]


def batches(text: torch.Tensor, size: Size, seed: int) -> Iterator[torch.Tensor]:
    """Yield random batches of ``text``, ``[batch, context + 1]``, endlessly."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=rng)
        rows = [text[start : start + size.context + 1] for start in starts.tolist()]
        yield torch.stack(rows).long()


@dataclass(eq=False)
class Training:
    """One of the trainings that run in turn, with its measurements.

    Attributes:
        losses: loss of each step, averaged over ranks.
        seconds: time of each step on the slowest rank.
        held_bytes: largest memory of a rank's parameters, gradients and AdamW state, in bytes.
    """

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_bytes: Sequence[float] = ()

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = LinearLR(self.optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)

    def step(self, batch: torch.Tensor) -> None:
        """Train one step, started on all ranks at the same time, and record it.

        Gradients are kept until the next step, so :meth:`count_memory` can count them.
        """
        dist.barrier()
        _synchronize(batch.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
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
        """Set ``held_bytes``."""
        params = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kinds = (params, [param.grad for param in params], states)
        held = _gather([_storage_bytes(tensors) for tensors in kinds], device)
        self.held_bytes = held.max(dim=0).values.tolist()

    def difference(self, other: Training) -> float:
        """Return the largest difference between the two losses of a step."""
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
    """Return the bytes of all tensors (shards of DTensors), counting each storage once."""
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
    """Return the three trainings: of graphshard, eager DDP, and eager FSDP2 with a unit per block.

    All of them, on all ranks, start from the same parameters.
    """
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(GPT(SIZES[settings.device]).to(device))
    compiled = torch.compile(models[0], backend=sharding)
    assert isinstance(compiled, nn.Module)
    ids = None if device.index is None else [device.index]
    for module in (*models[2].blocks, models[2]):
        fully_shard(module, mesh=mesh)
    return [
        Training("graphshard", compiled),
        Training("DDP, eager", DistributedDataParallel(models[1], device_ids=ids)),
        Training("FSDP2, eager", models[2]),
    ]
