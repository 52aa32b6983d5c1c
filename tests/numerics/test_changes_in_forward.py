"""A forward that changes or replaces its parameters raises instead of computing wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import graphshard
from tests import ranks
from tests.numerics.compare import Twins, world_mesh
from tests.ranks import on_ranks


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any], None], breaks: bool) -> None:
        super().__init__()
        self.part = nn.Linear(7, 5)
        self.change, self.breaks = change, breaks

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        y = self.part(x).square().mean()
        self.change(self.part)
        return y + self.part.weight.mean()


def _clamp(part: Any) -> None:
    with torch.no_grad():
        part.weight.clamp_(-0.1, 0.1)


def _zero_row(part: Any) -> None:
    with torch.no_grad():
        part.weight[1].zero_()


def _copy(part: Any) -> None:
    with torch.no_grad():
        part.bias.copy_(part.bias * 2)


def _renorm(part: Any) -> None:
    part.weight.detach().renorm_(2, 0, 0.1)


def _scale_data(part: Any) -> None:
    part.weight.data.mul_(0.5)


def _assign_data(part: Any) -> None:
    part.weight.data = part.weight.data * 0.5


def _foreach(part: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([part.weight], 0.5)


def _foreach_of_views(part: Any) -> None:
    torch._foreach_zero_(part.weight.detach().unbind())


@torch.library.custom_op("graphshard_tests::halve", mutates_args={"values"})
def _halve(values: list[Tensor]) -> None:
    for value in values:
        value.mul_(0.5)


def _custom_op(part: Any) -> None:
    with torch.no_grad():
        _halve([part.weight])


TRACED = [_clamp, _zero_row, _copy, _renorm, _scale_data, _foreach, _foreach_of_views, _custom_op]


@pytest.mark.parametrize("change", TRACED)
def test_forward_that_changes_parameter_raises(change: Callable[[Any], None]) -> None:
    ranks.run(2, _refuse, Changing, change, False)


@pytest.mark.parametrize("change", [_clamp, _zero_row, _copy, _renorm, _assign_data])
@on_ranks(2)
def test_eager_part_that_changes_parameter_raises(change: Callable[[Any], None]) -> None:
    """Expect the error at the next read of a parameter, or in backward if no read follows."""
    name = "part.bias" if change is _copy else "part.weight"
    match = f"forward changes parameter '{name}' in place"
    for last in (False, True):
        model = Changing(torch.compiler.disable(change), breaks=True)
        if last:
            model.forward = lambda x, model=model: _change_last(model, x)
        graphshard.shard(model, world_mesh())
        with pytest.raises(RuntimeError, match=match):
            model(torch.ones(3, 7)).backward()


class AssignsData(Changing):
    def forward(self, x: Tensor) -> Tensor:
        self.part.weight.data = self.part.weight.data * 0.5
        return self.part(x).square().mean()


class SetsRequiresGrad(Changing):
    def forward(self, x: Tensor) -> Tensor:
        self.part.weight.requires_grad_()
        return self.part(x).square().mean()


class RegistersUntraceableHook(Changing):
    def forward(self, x: Tensor) -> Tensor:
        self.part.weight.register_hook(torch.compiler.disable(lambda grad: grad))
        return self.part(x).square().mean()


@pytest.mark.parametrize("kind", [AssignsData, SetsRequiresGrad, RegistersUntraceableHook])
@on_ranks(2)
def test_forward_that_sets_attribute_of_its_parameter_raises(kind: type[Changing]) -> None:
    model = kind(_clamp, False)
    model.part.weight.requires_grad_(kind is not SetsRequiresGrad)
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    with pytest.raises(RuntimeError, match=r"sets requires_grad or data of .*'part.weight'"):
        torch.compile(model, backend=backend)(torch.ones(3, 7))


class Averaging(nn.Module):
    """Set a second layer to the average of the first and zero, as MoCo updates its averages."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.average = nn.Linear(7, 5), nn.Linear(7, 5).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for param, average in zip(self.part.parameters(), self.average.parameters()):
            average.data = param.data * 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        self.update()
        return (y - self.average(x)).square().mean()


@on_ranks(2)
def test_data_may_be_assigned_in_loop_that_dynamo_skips() -> None:
    Twins(Averaging(), fullgraph=False).train(Copying.batch, steps=2)


class Sorting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight, _ = torch.sort(self.weight)  # TorchScript's sort of a list works in place
        return F.linear(x, weight, self.bias).square().mean()


@on_ranks(2)
def test_forward_may_sort_its_parameter() -> None:
    Twins(Sorting(7, 5)).train(Copying.batch, steps=1)


def _refuse(kind: Callable[..., nn.Module], *args: Any) -> None:
    model = kind(*args)
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    compiled = torch.compile(model, backend=backend)
    name = "part.bias" if _copy in args else "part.weight"
    with pytest.raises(RuntimeError, match=f"forward changes parameter '{name}' in place"):
        compiled(torch.ones(3, 7))


def _change_last(model: Changing, x: Tensor) -> Tensor:
    y = model.part(x).square().mean()
    model.change(model.part)
    return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Changing(_clamp, breaks=False)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Embedding(9, 5, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.long()).square().mean()


@pytest.mark.parametrize("kind", [Checkpointed, MaxNorm])
@on_ranks(2)
def test_checkpointed_change_and_max_norm_raise(kind: type[nn.Module]) -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    with pytest.raises(RuntimeError, match=r"changes parameter '.*part.weight' in place"):
        torch.compile(kind(), backend=backend)(torch.ones(3, 7))


class Copying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.clone()
        weight[0] = 0.0
        return (F.linear(x, weight) + (self.linear.bias * 2).clamp_(-0.1, 0.1)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(3, 7, generator=rng)


class Clamped(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(-0.1, 0.1)


REPARAMETRIZED: dict[str, Callable[[nn.Linear], object]] = {
    "parametrize": lambda part: parametrize.register_parametrization(part, "weight", Clamped()),
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "prune": lambda part: prune.random_unstructured(part, "weight", amount=0.3),
}


class Reparametrized(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        REPARAMETRIZED[how](self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_forward_may_change_copies_of_parameters() -> None:
    ranks.run(2, _train, Copying)


@pytest.mark.parametrize("how", REPARAMETRIZED)
def test_reparametrized_weights_train(how: str) -> None:
    ranks.run(2, _train, Reparametrized, how)


def _train(kind: Callable[..., nn.Module], *args: Any) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind(*args).eval())  # in training, spectral_norm updates its vectors
    Twins(*models).train(Copying.batch)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        given = {"weight": torch.eye(5, 7) * self.scale, "bias": torch.zeros(5)}
        y: Tensor = torch.func.functional_call(self.inner, given, (x,))
        return y.square().mean()


@on_ranks(2)
def test_functional_call_in_forward_needs_ignored_params() -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    with pytest.raises(RuntimeError, match=r"functional_call cannot replace .*'inner.weight'"):
        torch.compile(Functional(), backend=backend)(torch.ones(3, 7))
    model = Functional()
    backend = graphshard.backend(
        world_mesh(), compiler="aot_eager", ignored_params=set(model.inner.parameters())
    )
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        assert compiled(torch.ones(3, 7)) == 1.0


class EagerlyFunctional(Functional):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _within(x: Tensor) -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    torch.compile(nn.Sequential(EagerlyFunctional()), backend=backend)(x)


def _around(x: Tensor) -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    compiled = torch.compile(nn.Linear(7, 5), backend=backend)
    compiled(x)
    torch.func.functional_call(compiled, {"bias": nn.Parameter(torch.zeros(5))}, (x,))


def _around_an_eager_one(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(7, 5))
    graphshard.shard(model, world_mesh())
    torch.func.functional_call(model, {"0.bias": torch.zeros(5)}, (x,))


@pytest.mark.parametrize("call", [_within, _around, _around_an_eager_one])
@on_ranks(2)
def test_error_of_eager_functional_call_names_call(call: Callable[[Tensor], None]) -> None:
    with pytest.raises(RuntimeError, match=r"replaced .*functional_call.*ignored_params"):
        call(torch.ones(3, 7))
