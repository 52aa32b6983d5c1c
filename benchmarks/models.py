"""A chain of linear layers for the memory benchmark, and the parameter bytes of any model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MLPBlock(nn.Module):
    """Two ``dim`` x ``dim`` linear layers with a residual connection around them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, dim]`` to the same shape."""
        return x + self.down(torch.relu(self.up(x)))


class DeepMLP(nn.Module):
    """A chain of linear layers of one size, whose memory is almost only parameters."""

    def __init__(self, dim: int, linears: int) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ModuleList(MLPBlock(dim) for _ in range(linears // 2))

    @classmethod
    def of_bytes(cls, num_bytes: float, linears: int) -> DeepMLP:
        """Return a model with ``linears`` layers and about ``num_bytes`` of float32 parameters."""
        return cls(round((num_bytes / linears / 4) ** 0.5 / 16) * 16, linears)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss of ``x``, ``[rows, dim]``."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def parameter_bytes(model: nn.Module) -> int:
    """Return the unsharded bytes of all parameters, whether or not they are sharded."""
    return sum(param.numel() * param.element_size() for param in model.parameters())
