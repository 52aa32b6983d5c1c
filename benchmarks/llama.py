"""Llama-3 (arXiv 2407.21783) in its published sizes, and plans of its graphs, traced without ranks.

The model has grouped-query attention, rotary positions, SwiGLU, RMSNorm and an untied head; its
weights are arbitrary. ``trace`` compiles a training step with fake tensors and a fake process
group. ``TrainableLlama`` is the same model, ready to be trained.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard._torch.distributed import fake_ranks
from graphshard._torch.tensors import new_fake_mode
from graphshard.planning.plan import Plan

WORLD = 8
TOKENS = 8192
DEVICE = "H100"


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama.

    Attributes:
        hidden: width of the SwiGLU.
        recompute: whether backward recomputes each block from its input, the only activation saved.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    recompute: bool
    vocab: int = 128256

    @classmethod
    def of(cls, dim: int, layers: int, hidden: int, vocab: int) -> LlamaSizes:
        """Return sizes with 128 dims per head and 4 query heads per key/value head, as in 8B."""
        heads = max(1, dim // 128)
        return cls(dim, layers, heads, max(1, heads // 4), hidden, recompute=False, vocab=vocab)


LLAMA3 = {
    "8B": LlamaSizes(4096, 32, 32, 8, 14336, recompute=False),
    "70B": LlamaSizes(8192, 80, 64, 8, 28672, recompute=True),
    "405B": LlamaSizes(16384, 126, 128, 8, 53248, recompute=True),
}
"""Table 3 of the paper. With 8192 tokens on a GPU, only 8B has room to save its activations."""
ROTARY_BASE = 500000.0


class LlamaBlock(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        kv = sizes.kv_heads * self.head_dim
        self.norm1 = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.q = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.k = nn.Linear(sizes.dim, kv, bias=False)
        self.v = nn.Linear(sizes.dim, kv, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.norm2 = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.gate = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864); the two halves of ``x`` form the pairs."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Llama(nn.Module):
    """A Llama that returns its loss; 9 parameters per layer and 3 more."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.recompute = sizes.recompute
        self.head_dim = sizes.dim // sizes.heads
        self.tokens = nn.Embedding(sizes.vocab, sizes.dim)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy; ``ids`` and ``targets`` are ``[batch, length]``."""
        x = self.tokens(ids)
        cos, sin = self.angles(ids.shape[1], x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.loss(self.head(self.norm(x)), targets)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def angles(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the rotary angles, each ``[length, head_dim / 2]``."""
        half = torch.arange(0, self.head_dim, 2, device=like.device) / self.head_dim
        angle = torch.outer(
            torch.arange(length, device=like.device), (-half * math.log(ROTARY_BASE)).exp()
        )
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def parallelize(model: Llama, tp: DeviceMesh) -> None:
    """Apply tensor and sequence parallelism, in place; logits are gathered.

    Args:
        tp: 1D mesh; its size divides the numbers of heads, ``hidden``, ``vocab`` and the length of
            sequences.
    """
    whole, sequence = Replicate(), Shard(1)
    gather = PrepareModuleOutput(output_layouts=sequence, desired_output_layouts=whole)
    for block in model.blocks:
        plan = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
        plan |= dict.fromkeys(("out", "down"), RowwiseParallel(output_layouts=sequence))
        plan |= dict.fromkeys(("norm1", "norm2"), SequenceParallel())
        parallelize_module(block, tp, plan)
        parallelize_module(block, tp, {"norm1": gather, "norm2": gather})
    plan = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
    }
    parallelize_module(model, tp, plan)


# --- training ------------------------------------------------------------------------------------


class TrainableLlama(Llama):
    """A Llama for real training: angles are buffers, and the loss is computed in float32.

    Args:
        length: length of the sequences, in tokens.
    """

    def __init__(self, sizes: LlamaSizes, length: int) -> None:
        super().__init__(sizes)
        for name in ("cos", "sin"):
            angles = torch.empty(length, self.head_dim // 2, dtype=torch.bfloat16)
            self.register_buffer(name, angles, persistent=False)

    @torch.no_grad()
    def initialize(self) -> None:
        generator = torch.Generator(self.cos.device).manual_seed(0)
        for name, param in self.named_parameters():
            values = param.to_local() if isinstance(param, DTensor) else param
            if "norm" in name:
                values.fill_(1.0)
            else:
                values.normal_(0.0, 0.02, generator=generator)
        for buffer, angles in zip((self.cos, self.sin), super().angles(len(self.cos), self.cos)):
            buffer.copy_(angles)

    def angles(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return Llama.loss(logits.float(), targets)


def as_torchtitan(model: TrainableLlama, mesh: DeviceMesh, **options: Any) -> TrainableLlama:
    """Shard and compile ``model`` as torchtitan does (torchtitan/models/llama3/parallelize.py).

    ``options`` are arguments of ``fully_shard``.
    """
    for block in model.blocks:
        block.compile(fullgraph=True)
    model.loss = torch.compile(model.loss)
    for part in (model.tokens, *model.blocks):
        fully_shard(part, mesh=mesh, **options)
    last = [model.norm, model.head]  # backward uses them first
    fully_shard(last, mesh=mesh, reshard_after_forward=False, **options)
    return fully_shard(model, mesh=mesh, **options)


# --- tracing -------------------------------------------------------------------------------------


def trace(sizes: LlamaSizes, world: int = WORLD, tokens: int = TOKENS) -> list[Plan]:
    """Return the plans of forward and backward in bfloat16; each rank has one sequence."""
    policy = graphshard.SchedulePolicy(hardware=DEVICE, overlap=False)  # keeps nothing unsharded
    fake = new_fake_mode()  # accepts the RNG state, which is a real tensor
    with fake_ranks(world):
        mesh = init_device_mesh("cpu", (world,))
        with _bfloat16(), fake:
            model = Llama(sizes)
            backend = graphshard.backend(
                mesh, compiler="aot_eager", schedule=policy, sync_module_states=False
            )
            ids = torch.zeros((1, tokens), dtype=torch.int64)
            torch.compile(model, backend=backend, fullgraph=True)(ids, ids).backward()
            torch.compiler.reset()
    return backend.plans


@contextlib.contextmanager
def _bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
