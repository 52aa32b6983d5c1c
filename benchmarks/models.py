"""Models that the benchmarks train: a GPT, and a chain of linear layers for measuring memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphshard.tools.demo_model import Block


class GPT(nn.Module):
    """A GPT of the demo's blocks that returns its loss; 12 parameters per layer and 5 more."""

    def __init__(self, *, dim: int, layers: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.vocab, self.context = vocab, context
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    @classmethod
    def seeded(
        cls, device: torch.device, *, dim: int, layers: int, head_dim: int, vocab: int, context: int
    ) -> GPT:
        torch.manual_seed(0)
        heads = max(1, dim // head_dim)
        with device:
            return cls(dim=dim, layers=layers, heads=heads, vocab=vocab, context=context)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean next-token cross entropy; ``ids`` are ``[batch, up to context + 1]``."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def batch(self, rows: int, device: torch.device) -> Tensor:
        return torch.randint(self.vocab, (rows, self.context + 1), device=device)


class MLPBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class DeepMLP(nn.Module):
    """Residual blocks of equal linear layers; in small batches, activations take little memory."""

    def __init__(self, dim: int, linears: int) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ModuleList(MLPBlock(dim) for _ in range(linears // 2))

    @classmethod
    def of_bytes(cls, num_bytes: float, linears: int) -> DeepMLP:
        """Return a model with ``linears`` layers and about ``num_bytes`` of float32 parameters."""
        return cls(round((num_bytes / linears / 4) ** 0.5 / 16) * 16, linears)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def parameter_bytes(model: nn.Module) -> int:
    """Return the unsharded size of all parameters in bytes, whether or not they are sharded."""
    return sum(param.numel() * param.element_size() for param in model.parameters())
