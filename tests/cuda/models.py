"""Models for simulated GPUs, each with a batch."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.llama import LLAMA3, Llama, LlamaSizes
from graphshard.tools.demo_model import Block

Made = tuple[nn.Module, tuple[Tensor, ...]]


class GPT(nn.Module):
    recompute = False

    def __init__(self, *, layers: int = 4, dim: int = 2048, vocab: int = 32000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=16) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens.flatten())


class LoRALinear(nn.Linear):
    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, of.bias is not None)
        self.requires_grad_(False)
        self.lora_a = nn.Linear(of.in_features, 8, bias=False)
        self.lora_b = nn.Linear(8, of.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_b(self.lora_a(x))


def add_lora(model: nn.Module) -> None:
    for parent in list(model.get_submodule("blocks").modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child))


def recompute_blocks(model: nn.Module) -> None:
    assert isinstance(model, GPT | Llama)
    model.recompute = True


class ConvNet(nn.Module):
    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        sizes = [3, *[channels] * 4]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(*pair, 3, padding=1, bias=False) for pair in pairwise(sizes)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in self.convolutions)
        self.head = nn.Linear(channels, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3))).square().mean()


class MoE(nn.Module):
    def __init__(self, *, layers: int = 2, dim: int = 1024, experts: int = 4) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(dim, experts, bias=False) for _ in range(layers))
        scale = dim**-0.5
        self.up = nn.ParameterList(
            nn.Parameter(torch.randn(experts, dim, 2 * dim) * scale) for _ in range(layers)
        )
        self.down = nn.ParameterList(
            nn.Parameter(torch.randn(experts, 2 * dim, dim) * scale) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, up, down in zip(self.routers, self.up, self.down, strict=True):
            weight, chosen = router(x).softmax(-1).max(-1)
            every = F.silu(x @ up) @ down  # [experts, tokens, dim]
            own = every.gather(0, chosen[None, :, None].expand(1, *x.shape))[0]
            x = x + weight[:, None] * own
        return x.float().square().mean()


class Routed(nn.Module):
    """Mixture of experts whose ranks exchange equal numbers of tokens.

    Attributes:
        ep: group over which ``split_experts`` has split the experts.
    """

    ep: dist.ProcessGroup

    def __init__(self, *, layers: int = 2, dim: int = 1024, experts: int = 8) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(dim, experts, bias=False) for _ in range(layers))
        shapes = (experts, dim, 2 * dim), (experts, 2 * dim, dim)
        self.up, self.down = (
            nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(layers))
            for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        for router, up, down in zip(self.routers, self.up, self.down, strict=True):
            weight, chosen = router(x).softmax(-1).max(-1)
            order = chosen.argsort()
            sent = all_to_all_single_autograd(x[order], None, None, self.ep)
            y = F.silu(sent @ up.to_local()[0]) @ down.to_local()[0]
            received = all_to_all_single_autograd(y, None, None, self.ep)
            x = x + weight[:, None] * received[order.argsort()]
        return x.float().square().mean()


def split_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the experts of a ``Routed`` over ``mesh``, which must have one rank per expert."""
    assert isinstance(model, Routed)
    model.ep = mesh.get_group()
    for params in (model.up, model.down):
        for i, param in enumerate(params):
            params[i] = nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))


def gpt() -> Made:
    return GPT(), (_tokens(1024),)


def llama(layers: int = 3) -> Made:
    sizes = LlamaSizes(2048, layers, 16, 4, 5632, recompute=False, vocab=32000)
    return Llama(sizes), (_tokens(1024), _tokens(1024))


def small_gpt() -> Made:
    return GPT(layers=2), (_tokens(1024),)


def small_llama() -> Made:
    return llama(layers=2)


def llama_8b() -> Made:
    return _layer_of("8B")


def llama_70b() -> Made:
    return _layer_of("70B")


def _layer_of(name: str) -> Made:
    sizes = dataclasses.replace(LLAMA3[name], layers=1, recompute=False)
    return Llama(sizes), (_tokens(1024), _tokens(1024))


def convnet() -> Made:
    return ConvNet(), (torch.randn(8, 3, 32, 32),)


def wide_convnet() -> Made:
    """Return a convnet wide enough for Inductor to choose the channels-last layout."""
    return ConvNet(128), (torch.randn(8, 3, 32, 32),)


def moe() -> Made:
    return MoE(), (torch.randn(2048, 1024),)


def routed() -> Made:
    return Routed(), (torch.randn(2048, 1024),)


def _tokens(length: int) -> Tensor:
    return torch.zeros((2, length), dtype=torch.int64)
