"""``torch.autograd.grad(loss, params)`` and ``loss.backward(inputs=params)``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from tests.models import MLP
from tests.numerics.compare import Twins, assert_close, draw, sgd, step_all, world_mesh
from tests.ranks import on_ranks


class _Unused(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class _InPython(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        x = self._in_python(x)
        return self.down(x).square().mean()

    @torch.compiler.disable
    def _in_python(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mid(x))


def _losses(twins: Twins, step: int = 0) -> tuple[Tensor, Tensor]:
    batches = draw(MLP.batch, step)
    loss = twins.compiled(batches[dist.get_rank()])
    return loss, torch.stack([twins.reference(batch) for batch in batches]).mean()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (_Unused, {}),
        (_InPython, {"fullgraph": False}),
        (MLP, {"overrides": {"mid.*": {"shard": False}}}),
    ],
)
@on_ranks(2)
def test_autograd_grad_of_parameters_is_sharded(kind: Any, options: dict[str, Any]) -> None:
    twins = Twins(kind(), **options)
    for step in range(2):
        loss, reference_loss = _losses(twins, step)
        ours = torch.autograd.grad(loss, [*twins.model.parameters()], allow_unused=True)
        theirs = torch.autograd.grad(
            reference_loss, [*twins.reference.parameters()], allow_unused=True
        )
        for (name, param), grad, expected in zip(twins.model.named_parameters(), ours, theirs):
            assert_close(name, grad, expected)
            assert param.grad is None
            if grad is not None:
                assert isinstance(grad, DTensor) and grad.placements == param.placements
        loss, reference_loss = _losses(twins, step)
        loss.backward()
        reference_loss.backward()
        for (name, param), other in zip(
            twins.model.named_parameters(), twins.reference.parameters(), strict=True
        ):
            assert_close(name, param.grad, other.grad)
        twins.zero_grad()


@on_ranks(2)
def test_autograd_grad_averages_parameter_but_not_input() -> None:
    twins = Twins(MLP())
    batches = [batch.requires_grad_() for batch in draw(MLP.batch, 0)]
    x = batches[dist.get_rank()]
    loss = twins.compiled(x)
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    again, of_weight = torch.autograd.grad(loss, (x, twins.model.mid.weight))
    assert torch.equal(of_x, again)
    (expected,) = torch.autograd.grad(twins.reference(x), x)
    assert_close("x", of_x, expected)
    mean = torch.stack([twins.reference(batch) for batch in batches]).mean()
    (expected,) = torch.autograd.grad(mean, twins.reference.mid.weight)
    assert_close("mid.weight", of_weight, expected)


@on_ranks(2)
def test_autograd_grad_of_unused_parameter_raises() -> None:
    twins = Twins(_Unused())
    loss, _ = _losses(twins)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, [*twins.model.parameters()])


@pytest.mark.parametrize(("kind", "fullgraph"), [(MLP, True), (_InPython, False)])
@on_ranks(2)
def test_backward_inputs_limit_gradients_to_given_parameters(kind: Any, fullgraph: bool) -> None:
    twins, seen = Twins(kind(), fullgraph=fullgraph), []
    _losses(twins)[0].backward()
    twins.zero_grad()
    for model in (twins.model, twins.reference):
        model.mid.weight.register_hook(lambda grad: grad * 3)
        model.up.bias.register_post_accumulate_grad_hook(seen.append)
    for _ in range(2):
        for model, loss in zip((twins.model, twins.reference), _losses(twins)):
            loss.backward(inputs=[model.mid.weight, model.up.bias])
        twins.check()
    assert len(seen) == 4 and twins.model.up.weight.grad is None
    twins.zero_grad()
    twins.train(MLP.batch)


@on_ranks(2)
def test_backward_inputs_accumulate_and_autograd_grad_raises() -> None:
    twins = Twins(MLP())
    optimizers = [sgd(model) for model in (twins.model, twins.reference)]
    for _ in range(2):
        with graphshard.no_sync(twins.model):
            loss, reference_loss = _losses(twins, 0)
        with pytest.raises(ValueError, match=r"'up.weight' .*no_sync"):
            torch.autograd.grad(loss, [*twins.model.parameters()], retain_graph=True)
        loss.backward(inputs=[*twins.model.parameters()])
        reference_loss.backward()
        loss, reference_loss = _losses(twins, 1)
        with pytest.raises(ValueError, match=r"'up.weight' .*no_sync"):
            torch.autograd.grad(loss, [*twins.model.parameters()], retain_graph=True)
        loss.backward(inputs=[*twins.model.parameters()])
        reference_loss.backward()
        twins.check()
        step_all(*optimizers)


def _penalty(params: list[nn.Parameter]) -> Any:
    total: Any = 0.1 * torch.stack([param.square().sum() for param in params]).sum()
    return total.full_tensor() if isinstance(total, DTensor) else total


@pytest.mark.parametrize("alone", [False, True])
@on_ranks(2)
def test_gradients_include_uses_of_dtensors(alone: bool) -> None:
    twins = Twins(MLP())
    for call in (torch.autograd.grad, torch.autograd.backward):
        grads = []
        for model, loss in zip((twins.model, twins.reference), _losses(twins)):
            params = [*model.parameters()]
            total = _penalty(params) + (0 if alone else loss)
            grads.append(call(total, inputs=params))
        if call is torch.autograd.grad:
            for (name, _), *pair in zip(twins.model.named_parameters(), *grads, strict=True):
                assert_close(name, *pair)
    twins.check()


@on_ranks(2)
def test_copied_parameters_have_gradients_of_their_own() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    copied = [copy.deepcopy(param) for param in model.parameters()]
    for param, grad in zip(copied, torch.autograd.grad(_penalty(copied), copied)):
        assert_close("copy", grad, 0.2 * param.detach())


@on_ranks(2)
def test_second_order_gradients_raise() -> None:
    twins = Twins(MLP())
    loss, _ = _losses(twins)
    with pytest.raises((ValueError, RuntimeError), match="econd-order gradients"):
        torch.autograd.grad(loss, [*twins.model.parameters()], create_graph=True)
