"""Layers that AOTAutograd traces as one train bitwise like layers that it traces one by one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests.ranks import on_ranks

DIM, LAYERS = 8, 5


class Layer(nn.Module):
    """Attention and an MLP with dropout; ``kind`` changes what the layer does."""

    def __init__(self, kind: str = "", scale: float = 1.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.BatchNorm1d(DIM) if kind == "buffers" else nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.router = nn.Linear(DIM, 2) if kind == "experts" else None
        self.scale, self.kind = scale, kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = F.scaled_dot_product_attention(self.q(y)[None], self.k(y)[None], self.v(y)[None])
        if self.kind == "writes":
            return mixed[0].add_(x)
        if self.kind == "literals":  # AOTAutograd stores them as attributes of the layer's graph
            return x + mixed[0] * torch.tensor(0.5)
        hidden = F.silu(self.up(x + mixed[0]))
        if self.router is not None:
            weight, choice = torch.topk(self.router(y).softmax(-1), 1)
            hidden = hidden.unflatten(1, (2, DIM)) * torch.zeros(len(x), 2, 1).scatter(
                1, choice[..., None], weight[..., None]
            )
            hidden = hidden.flatten(1)
        return x + self.scale * F.dropout(self.down(hidden), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(DIM, DIM), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _frozen() -> list[Layer]:
    layers = [Layer() for _ in range(LAYERS)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return layers


def _of_kind(kind: str) -> list[Layer]:
    return [Layer(kind) for _ in range(LAYERS)]


CASES: dict[str, tuple[Callable[[], list[Layer]], int]] = {
    "dropout": (lambda: _of_kind(""), LAYERS),
    "experts": (lambda: _of_kind("experts"), LAYERS),
    "frozen": (_frozen, LAYERS - 2),
    "tied": (lambda: [Layer()] * LAYERS, LAYERS - 1),
    "constants": (lambda: [Layer(scale=1 / (i + 1)) for i in range(LAYERS)], 0),
    "buffers": (lambda: _of_kind("buffers"), 0),
    "writes": (lambda: _of_kind("writes"), 0),
    "literals": (lambda: _of_kind("literals"), 0),
}
"""Layers of a model, and how many of them share a trace."""


def _train(model: Model, backend: Any) -> list[Tensor]:
    compiled, losses = torch.compile(model, backend=backend), []
    for seed in range(2):
        torch.manual_seed(seed)
        loss = compiled(torch.randn(4, DIM))
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("case", CASES)
@on_ranks(1)
def test_equal_layers_share_a_trace(case: str) -> None:
    torch.manual_seed(0)
    make, num_shared = CASES[case]
    model = Model(make())
    reference = copy.deepcopy(model)
    backend = graphshard.backend(init_device_mesh("cpu", (1,)), compiler="aot_eager")
    losses = _train(model, backend)
    found = re.search(r"AOTAutograd traced (\d+) layers as one", backend.summary())
    assert int(found[1] if found else 0) == num_shared
    assert all(map(torch.equal, losses, _train(reference, "aot_eager")))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad.full_tensor(), theirs.grad)
    assert all(map(torch.equal, model.buffers(), reference.buffers()))
