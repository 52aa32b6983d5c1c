"""The demo's model and data: a byte-level GPT and the sources of Python's standard library.

The model has no code for sharding: graphshard, DDP and FSDP2 train the same module.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256  # every byte is a token
TEXT_BYTES = 4_000_000


class Size(NamedTuple):
    """Sizes of the model and its training run."""

    layers: int
    heads: int
    dim: int
    context: int
    batch: int  # per rank
    steps: int


# On a CPU, the whole demo has to finish within a few minutes.
SIZES = {
    "cpu": Size(layers=4, heads=4, dim=256, context=128, batch=8, steps=20),
    "cuda": Size(layers=12, heads=12, dim=768, context=512, batch=8, steps=200),
}


class Block(nn.Module):
    """A pre-norm layer of a GPT: the unit that FSDP2 shards."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # ``[batch, length, dim]`` to ``[batch, length, 3, heads, dim / heads]``.
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT that returns its loss."""

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
        self.head.weight = self.embedding.weight  # shared, as in GPT-2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of predicting ``tokens[:, 1:]``, in nats per byte."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def load_text() -> torch.Tensor:
    """Return up to ``TEXT_BYTES`` bytes of the standard library's top-level modules, as uint8.

    Raises:
        RuntimeError: the modules have fewer than 100,000 bytes, as in a Python without sources.
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
            "Python's standard library; run it with a Python that includes them"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES]


def batches(text: torch.Tensor, size: Size, seed: int) -> Iterator[torch.Tensor]:
    """Yield random batches of ``text``, ``[batch, context + 1]``, endlessly."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=rng)
        rows = [text[start : start + size.context + 1] for start in starts.tolist()]
        yield torch.stack(rows).long()


def new_model(size: Size, device: torch.device) -> GPT:
    """Seed torch, and create the model: every call on every rank gets the same parameters."""
    torch.manual_seed(0)
    return GPT(size).to(device)
