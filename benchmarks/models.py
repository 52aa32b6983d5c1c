"""What is measured: a GPT, and a chain of linear layers of one size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """One pre-norm layer of the GPT; 12 parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

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
    """A GPT that returns its loss; 12 parameters for each layer and 5 more."""

    def __init__(self, *, dim: int, layers: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.vocab, self.context = vocab, context
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean cross entropy of predicting ``ids[:, 1:]``."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def batch(self, rows: int, device: torch.device) -> Tensor:
        """Random tokens, one more than the context in each row."""
        return torch.randint(self.vocab, (rows, self.context + 1), device=device)


class MLPBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class DeepMLP(nn.Module):
    """Blocks of two linear layers, all of one size: memory is that of the parameters."""

    def __init__(self, dim: int, linears: int) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ModuleList(MLPBlock(dim) for _ in range(linears // 2))

    @classmethod
    def of_bytes(cls, num_bytes: float, linears: int) -> DeepMLP:
        """The model of so many linear layers whose parameters have about ``num_bytes``."""
        return cls(round((num_bytes / linears / 4) ** 0.5 / 16) * 16, linears)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def parameter_bytes(model: nn.Module) -> int:
    """Of the unsharded parameters, also where they are sharded."""
    return sum(param.numel() * param.element_size() for param in model.parameters())
