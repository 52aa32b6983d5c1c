"""Models with regions (repeated layers compiled once) match an unsharded copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard import SchedulePolicy
from tests import ranks
from tests.models import GPT
from tests.numerics.compare import Twins, assert_close, assert_rounded, generator, sgd, world_mesh
from tests.ranks import on_ranks

LAYERS = 5


class Deep(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    @staticmethod
    def batch(rng: torch.Generator, rows: int = 6) -> Tensor:
        return torch.randn(rows, 8, generator=rng)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WithDropout(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(super().forward(x), 0.5)


class Mixed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.inner = nn.BatchNorm1d(8), Plain()

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(super().forward(self.mean(x)), 0.5)
        return checkpoint(self.inner, x, use_reentrant=False)


def _shares(backend: graphshard.Backend) -> None:
    for plan in backend.plans:
        assert plan.regions.num_calls > plan.regions.num_compiled_regions > 0, plan.regions


@on_ranks(2)
def test_regions_match_unsharded_copy() -> None:
    model, schedule = GPT(layers=LAYERS), SchedulePolicy(regions=True)
    twins = Twins(model, schedule=schedule)
    twins.train(GPT.batch, steps=2)
    _shares(twins.backend)


@on_ranks(2)
def test_regions_with_dynamic_shapes_match_unsharded_copy() -> None:
    model = Deep(Plain)
    twins = Twins(model, compiler="inductor", schedule=SchedulePolicy(regions=True), dynamic=True)
    for rows in (5, 9):
        twins.backward([Deep.batch(generator(rows, rank), rows) for rank in range(2)])
        twins.check()
        twins.zero_grad()
    _shares(twins.backend)


def _steps(model: nn.Module, compiler: str, regions: bool, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    schedule = SchedulePolicy(regions=regions)
    backend = graphshard.backend(world_mesh(), compiler=compiler, schedule=schedule, **options)
    compiled, optimizer, found = torch.compile(model, backend=backend), sgd(model), []
    for step in range(2):
        loss = compiled(model.batch(generator(step, dist.get_rank())))  # type: ignore[operator]
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    if regions:
        _shares(backend)
    return [*found, *model.buffers()]


def _with_and_without(
    make: Callable[[], nn.Module], compiler: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = make()
    ours = _steps(copy.deepcopy(model), compiler, True, options)
    # Inductor and ATen draw different random numbers, and round differently.
    other = "aot_eager" if "mp_policy" in options else compiler
    without = _steps(copy.deepcopy(model), other, False, options)
    assert len(ours) == len(without)
    if compiler == "aot_eager":
        assert all(map(torch.equal, ours, without))
    elif "mp_policy" in options:
        exact = _steps(model, "aot_eager", False, {})
        named = ({str(i): t for i, t in enumerate(all_of)} for all_of in (ours, without, exact))
        assert_rounded("losses and gradients", *named)
    else:
        flat = [torch.cat([t.flatten() for t in all_of]) for all_of in (ours, without)]
        assert_close("losses, gradients and buffers", *flat, tolerance=1e-6)


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
CASES = [
    pytest.param(partial(Deep, WithDropout), {}, id="dropout"),
    pytest.param(partial(Deep, Plain), BF16, id="bf16", marks=pytest.mark.low_precision),
]


@pytest.mark.parametrize(("make", "options"), CASES)
def test_regions_keep_values_under_inductor(make: Any, options: Any) -> None:
    ranks.run(2, _with_and_without, make, "inductor", options)


def test_regions_are_bitwise_equal_under_aot_eager() -> None:
    ranks.run(2, _with_and_without, partial(Deep, Mixed), "aot_eager", {})
