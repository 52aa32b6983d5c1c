"""Parameters that change between forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graphshard
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_same,
    compile_sharded,
    draw,
    relative_error,
    sgd,
    whole,
)
from tests.ranks import on_ranks

ZERO3 = {"schedule": graphshard.SchedulePolicy(overlap=False)}
"""Options with which backward gathers every parameter that it needs."""


def _step(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    sgd(model).step()
    model.zero_grad()


def _adamw(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    model.zero_grad()


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.1, 0.1)


@torch.no_grad()
def _change_local(model: nn.Module) -> None:
    for param in model.parameters():
        (param.to_local() if isinstance(param, torch.distributed.tensor.DTensor) else param).mul_(2)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: p.detach() * 2 for name, p in model.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (_step, {}),
        (_adamw, {}),
        (_clamp, {}),
        (_change_local, {}),
        (_load, {}),
        (_step, {"offload_policy": CPUOffloadPolicy()}),
        (_step, {"overrides": {"*": {"shard": False}}}),
    ],
)
@on_ranks(2)
def test_change_between_forward_and_backward_raises(
    change: Callable[[nn.Module], None], options: dict[str, Any]
) -> None:
    twins = Twins(MLP(), **{**ZERO3, **options})
    twins.backward(draw(MLP.batch, 0))
    twins.zero_grad()
    x = draw(MLP.batch, 1)[dist.get_rank()]
    loss, reference_loss = twins.compiled(x), twins.reference(x)
    change(twins.model)
    change(twins.reference)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reference_loss.backward()
    with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation"):
        loss.backward()
    twins.zero_grad()
    twins.backward(draw(MLP.batch, 2))
    assert_same(twins.model, twins.reference)


@on_ranks(2)
def test_error_names_parameter_that_backward_needs() -> None:
    twins = Twins(MLP(), **ZERO3)
    loss = twins.compiled(torch.ones(5, 7))
    with torch.no_grad():
        twins.model.up.weight.zero_()  # backward does not need it: the input has no gradient
        twins.model.down.bias.zero_()
        twins.model.mid.weight.zero_()
    with pytest.raises(ValueError, match=r"'mid.weight' was modified .* backward would gather"):
        loss.backward()


@pytest.mark.parametrize("reshard_after_forward", [False, 2])
@on_ranks(4)
def test_kept_parameters_give_gradients_of_forward(reshard_after_forward: bool | int) -> None:
    kept = Twins(MLP(), **ZERO3, reshard_after_forward=reshard_after_forward)
    x = draw(MLP.batch, 1)[dist.get_rank()]
    kept.compiled(x).backward()
    expected = {name: whole(p.grad) for name, p in kept.model.named_parameters()}
    kept.model.zero_grad()
    loss = kept.compiled(x)
    _clamp(kept.model)
    loss.backward()
    for name, param in kept.model.named_parameters():
        assert torch.equal(whole(param.grad), expected[name]), name


@on_ranks(2)
def test_change_raises_under_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    twins = Twins(MLP(), mp_policy=policy, **ZERO3)
    loss = twins.compiled(torch.ones(5, 7))
    _clamp(twins.model)
    with pytest.raises(ValueError, match="modified by an inplace operation"):
        loss.backward()


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.eager, self.last = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).sin()
        torch._dynamo.graph_break()
        x = self._in_python(x)
        return torch.tanh(self.last(x)).square().mean()

    @torch.compiler.disable
    def _in_python(self, x: Tensor) -> Tensor:
        return torch.tanh(self.eager(x))


@pytest.mark.parametrize(
    ("name", "raises"), [("last.weight", True), ("eager.weight", False), ("first.weight", False)]
)
@on_ranks(2)
def test_change_raises_only_in_graphs_that_regather(name: str, raises: bool) -> None:
    twins = Twins(_Broken(), fullgraph=False, **ZERO3)
    twins.train(MLP.batch, steps=1)
    x = draw(MLP.batch, 1)[dist.get_rank()]
    loss = twins.compiled(x)
    with torch.no_grad():
        twins.model.get_parameter(name).mul_(2)
    if raises:
        with pytest.raises(ValueError, match=f"'{name}' was modified"):
            loss.backward()
        return
    loss.backward()
    grads = {n: whole(p.grad) for n, p in twins.model.named_parameters()}
    losses = [twins.reference(batch) for batch in draw(MLP.batch, 1)]
    torch.stack(losses).mean().backward()
    for n, param in twins.reference.named_parameters():
        assert relative_error(grads[n], param.grad) < 1e-5, n


@on_ranks(2)
def test_changes_before_forward_and_after_backward_are_allowed() -> None:
    twins = Twins(MLP(), **ZERO3)
    first, second = draw(MLP.batch, 0), draw(MLP.batch, 1)
    rank = dist.get_rank()
    for _ in range(2):
        with torch.no_grad():
            for model in (twins.model, twins.reference):
                for param in model.parameters():
                    param.mul_(1.01)  # before forward
        # Two microbatches in pipeline order, with two backwards of the first.
        losses = [twins.compiled(batches[rank]) for batches in (first, second)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        for batches, times in ((first, 2), (second, 1)):
            reference = torch.stack([twins.reference(batch) for batch in batches]).mean()
            (reference * times).backward()
        twins.check()
        twins.step()
    assert_same(twins.model, twins.reference)


class Keeping(MLP):
    """Model whose first forward stores a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = getattr(self, "kept", None) or [self.up.weight]
        return super().forward(x) + self.kept[0].square().sum()


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_parameter_kept_by_first_forward_raises(compiled: bool) -> None:
    twins = Twins(Keeping(), **ZERO3)
    if not compiled:
        twins.compiled = graphshard.shard(twins.model, twins.mesh)
    twins.backward(draw(MLP.batch, 0))
    _clamp(twins.model)
    with pytest.raises(ValueError, match=r"up.weight' (as an earlier forward read|was modified)"):
        twins.compiled(draw(MLP.batch, 1)[dist.get_rank()]).backward()


@on_ranks(2)
def test_output_returned_by_later_call_stays_stale() -> None:
    twins = Twins(MLP(), **ZERO3)
    model = twins.model

    def step(x: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
        return earlier, model(x)

    compiled = torch.compile(step, backend=twins.backend, fullgraph=True)
    x = draw(MLP.batch, 0)[dist.get_rank()]
    _, earlier = compiled(x, torch.zeros((), requires_grad=True))
    _, earlier = compiled(x, earlier)
    stale, _ = compiled(x, earlier)
    _clamp(model)
    _, fresh = compiled(x, stale)
    fresh.backward()
    with pytest.raises(ValueError, match=r".weight' was modified"):
        stale.backward()


def _returns_views(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    loss = model(x)
    return loss.view(1, 1).t(), loss.view(1, 1, 1).transpose(0, 1)


def _writes_to_input(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    loss = model(x.detach().clone())
    return (x.mul_(2).add_(loss).mean(),)


@pytest.mark.parametrize("function", [_returns_views, _writes_to_input])
@on_ranks(2)
def test_changes_are_detected_with_any_outputs(
    function: Callable[[nn.Module, Tensor], tuple[Tensor, ...]],
) -> None:
    twins = Twins(MLP(), function=lambda model: functools.partial(function, model), **ZERO3)
    batch = draw(MLP.batch, 0)[dist.get_rank()].requires_grad_()
    for change in (_clamp, lambda model: model.down.requires_grad_(False)):
        loss, *_ = twins.compiled(batch * 1)
        change(twins.model)
        if twins.model.down.weight.requires_grad:
            with pytest.raises(ValueError, match=r".weight' was modified"):
                loss.sum().backward()
    loss.sum().backward()
    assert twins.model.mid.weight.grad is not None
    assert twins.model.down.weight.grad is None


# Sharding between forward and backward.


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        frozen = nn.LayerNorm(5).requires_grad_(False)
        self.encoder = nn.Sequential(nn.Linear(7, 5), frozen, nn.Tanh(), nn.Linear(5, 7))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 7, generator=rng)


def _of_a_part(model: nn.Module, x: Tensor) -> Tensor:
    return model.encoder(x).square().mean()


def _of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())


def _of_sums(model: nn.Module, x: Tensor) -> Tensor:
    return sum(p.sum() for p in model.head.parameters())  # saves nothing for backward


def _of_an_input(model: nn.Module, x: Tensor) -> Tensor:
    return model.encoder[1](x[:, :5].clone().requires_grad_()).square().mean()


@pytest.mark.parametrize(
    ("before", "steps"),
    [(_of_a_part, 2), (_of_parameters, 1), (_of_sums, 1), (_of_an_input, 1)],
)
@on_ranks(2)
def test_autograd_graph_built_before_sharding_gives_gradients(
    before: Callable[[nn.Module, Tensor], Tensor], steps: int
) -> None:
    twins = Twins(_Encoder())
    for model in (twins.model, twins.reference):
        model.head.weight.register_hook(lambda grad: grad * 3)

    def loss(model: Any, x: Tensor) -> Tensor:
        plain = twins.model if model is twins.compiled else twins.reference
        return before(plain, x) + model(x)

    for step in range(steps):
        twins.backward(draw(_Encoder.batch, step), loss)
        twins.check()
        twins.step()


@on_ranks(2)
def test_autograd_graph_survives_refusal_to_shard() -> None:
    torch.manual_seed(dist.get_rank())
    model = _Encoder()
    loss = _of_a_part(model, torch.ones(5, 7))
    with pytest.raises(ValueError, match="differs from the first rank's"):
        compile_sharded(model)(torch.ones(5, 7))
    loss.backward()
    assert type(model.head.weight) is nn.Parameter
