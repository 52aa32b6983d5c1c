"""Small models that several test folders train.

Each model returns its loss for a batch, and its static method `batch` draws a batch from a
generator. No parameter has a number of rows that is divisible by 4, so on 4 ranks all parameters
are padded. On 2 ranks, parameters with an odd number of rows are padded.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Trainable(Protocol):
    """Model class that tests can train: its forward returns the loss, and it draws batches."""

    def __call__(self) -> nn.Module: ...

    def batch(self, rng: torch.Generator) -> Any:
        """Return a random batch, the argument of the model's forward."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.mid = nn.Linear(13, 11, bias=False)
        self.down = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mid(F.gelu(self.up(x))))
        return self.down(x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 7, generator=rng)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class GPT(nn.Module):
    """A GPT whose output layer is tied to its token embedding.

    One layer by default, since tests spend most of their time compiling; see `DeepGPT`.
    """

    VOCAB = 51

    def __init__(self, dim: int = 18, layers: int = 1, context: int = 33) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCAB, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=2) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch(rng: torch.Generator, rows: int = 3, length: int = 8) -> Tensor:
        return torch.randint(GPT.VOCAB, (rows, length), generator=rng)


class DeepGPT(GPT):
    def __init__(self, dim: int = 18) -> None:
        super().__init__(dim, layers=2)


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, whose running statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        # No biases: before a BatchNorm, the gradient of a bias is just rounding noise.
        self.conv1 = nn.Conv2d(3, 5, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 7, 3, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(7)
        self.head = nn.Linear(7, 9)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = batch
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x))).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)

    @staticmethod
    def batch(rng: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 3, 10, 10, generator=rng)
        return x, torch.randint(9, (6,), generator=rng)
