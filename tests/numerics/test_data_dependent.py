"""Eager parts whose parameter reads depend on a rank's data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from tests.models import Trainable
from tests.numerics.compare import Twins, world_mesh
from tests.ranks import on_ranks

DIM, EXPERTS = 6, 4


class Experts(nn.Module):
    """Stacked experts with one expert per token, as in transformers' eager MoE layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / 3)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in index.unique().tolist():
            chosen = index == expert
            out[chosen] = torch.tanh(x[chosen] @ self.up[expert]) @ self.down[expert]
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.experts = Experts()
        self.last = nn.Linear(DIM, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, index = batch
        return self.last(self.experts(self.first(x), index)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tokens and an expert for each; some batches use only some of the experts."""
        high = int(torch.randint(1, EXPERTS + 1, (), generator=rng))
        return torch.randn(5, DIM, generator=rng), torch.randint(high, (5,), generator=rng)


class EitherWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(DIM, 5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in x:  # graph break in a loop: Dynamo skips the frame
            torch._dynamo.graph_break()
        weight = self.a if x[0, 0].item() > 0 else self.b
        return (x @ weight).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(2, DIM, generator=rng)


class ReadsOfAChild(Mixture):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, index = batch
        x = self.first(x)
        for expert in index.unique().tolist():
            x = torch.where((index == expert)[:, None], x @ self.experts.up[expert], x)
        return self.last(x).square().mean()


@torch.compiler.disable
def _weight_or_bias(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight if x[0, 0].item() > 0 else x + layer.bias


class CarriedWeight(EitherWeight):
    """Eager code reads a layer one of whose parameters a graph has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        x = torch.tanh(x @ weight)
        return (_weight_or_bias(self.layer, x) @ weight @ self.a).square().mean()


@pytest.mark.parametrize("kind", [Mixture, EitherWeight, ReadsOfAChild, CarriedWeight])
@on_ranks(2)
def test_model_with_data_dependent_parameter_reads_trains(kind: Trainable) -> None:
    Twins(kind(), fullgraph=False).train(kind.batch, 6)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.frozen = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight)
        with torch.no_grad():
            assert self.weight is self.seen[-1] and self.weight.requires_grad
        assert self.weight is self.seen[-1]
        assert not self.frozen.requires_grad
        return F.linear(x, self.weight) + self.frozen


@on_ranks(2)
def test_parameter_is_gathered_once_per_call() -> None:
    model = _Counted()
    graphshard.shard(model, world_mesh())
    model(torch.ones(2, DIM)).sum().backward()
    model(torch.ones(2, DIM))
    first, second = model.seen
    assert first is not second
    assert first.shape == (DIM, DIM)
