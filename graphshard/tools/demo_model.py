"""What the demo trains, and on what: a byte-level GPT and the sources of Python's standard library.

Nothing here knows of shards or ranks: the same module runs under graphshard, DDP and FSDP2.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256  # every byte is a token
TEXT_BYTES = 4_000_000


@dataclass(frozen=True)
class Size:
    """How big the model and a rank's batch are, and how many steps are trained by default."""

    layers: int
    heads: int
    dim: int
    context: int
    batch: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens that one rank trains on in one step."""
        return self.batch * self.context


# On CPUs a few minutes for everything is the limit.
SIZES = {
    "cpu": Size(layers=4, heads=4, dim=256, context=128, batch=8, steps=60),
    "cuda": Size(layers=12, heads=12, dim=768, context=512, batch=8, steps=200),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.dim, 3 * size.dim)
        self.out = nn.Linear(size.dim, size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """One pre-norm layer of the GPT: the unit that the FSDP2 run shards."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.dim)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.dim)
        self.up = nn.Linear(size.dim, 4 * size.dim)
        self.down = nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes whose output layer is its token embedding; returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, size.dim)
        self.position = nn.Embedding(size.context, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCAB, bias=False)
        for name, param in self.named_parameters():
            _init(name, param, size.layers)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of predicting ``tokens[:, 1:]``, in nats per byte."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _init(name: str, param: nn.Parameter, layers: int) -> None:
    """As GPT-2: normal weights, smaller where they add to the residual stream."""
    if name.endswith(("out.weight", "down.weight")):
        nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers))
    elif param.dim() == 2:
        nn.init.normal_(param, std=0.02)
    elif name.endswith("bias"):
        nn.init.zeros_(param)


def load_text(num_bytes: int = TEXT_BYTES) -> torch.Tensor:
    """The first ``num_bytes`` of the standard library's modules, by name, as a tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    if len(text) < 100_000:
        raise RuntimeError(
            f"{folder} holds only {len(text)} bytes of *.py: the demo trains on the sources of "
            "Python's standard library, which this installation leaves out"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:num_bytes]


def batches(text: torch.Tensor, size: Size, seed: int) -> Iterator[torch.Tensor]:
    """Random stretches of ``text`` without end, each one token longer than the context."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=rng)
        rows = [text[start : start + size.context + 1] for start in starts.tolist()]
        yield torch.stack(rows).long()
