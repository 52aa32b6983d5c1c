"""``p.data = x`` on sharded parameters and other DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import graphshard
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_close,
    assert_same,
    draw,
    generator,
    num_graphs,
    sgd,
    world_mesh,
)
from tests.ranks import on_ranks

Change = Callable[[nn.Module], None]


def _clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clamp(-0.1, 0.1)


def _in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.9)
        param.data.clamp_(-0.2, 0.2)
        param.data.copy_(param.data + 0.01)


def _whole(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        param.data = torch.rand(param.shape, generator=generator(number))


def _replicated(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        full = torch.rand(param.shape, generator=generator(number))
        if isinstance(param, DTensor):
            full = distribute_tensor(full, param.device_mesh, [Replicate()])
        param.data = full


def _swap(model: nn.Module) -> None:
    own = [param.data for param in model.parameters()]
    for param in model.parameters():
        param.data = torch.zeros_like(param.data)
    assert all(float(value.abs().sum().detach()) > 0 for value in own)
    for param, value in zip(model.parameters(), own):
        param.data = value


def _double(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.double()
        param.data = param.data.float()


@pytest.mark.parametrize("change", [_clamp, _in_place, _whole, _replicated, _swap, _double])
@on_ranks(2)
def test_data_assigned_between_steps_is_trained_on(change: Change) -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=2)
    graphs = num_graphs()
    for seen in (True, False):
        change(twins.model)
        change(twins.reference)
        if seen:
            assert_same(twins.model, twins.reference)
        twins.train(MLP.batch, steps=2)
    assert num_graphs() == graphs


def _keep_dtype(model: nn.Module) -> None:
    model.to(torch.float32)


@pytest.mark.parametrize("change", [_clamp, _whole, _double, _keep_dtype])
@on_ranks(2)
def test_model_changed_in_inference_mode_is_trained_on(change: Change) -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    for seen in (False, True):  # whether a forward runs in inference mode
        with torch.inference_mode():
            change(twins.model)
            if seen:
                twins.compiled(draw(MLP.batch, 0)[0])
        with torch.no_grad():
            change(twins.reference)
        twins.train(MLP.batch, steps=2)


@on_ranks(2)
def test_optimizer_steps_from_assigned_data() -> None:
    twins = Twins(MLP())
    optimizers = [sgd(model) for model in (twins.model, twins.reference)]
    twins.backward(draw(MLP.batch, 0))
    for model, optimizer in zip((twins.model, twins.reference), optimizers):
        _whole(model)
        optimizer.step()
    twins.check()
    twins.zero_grad()
    twins.train(MLP.batch)


@on_ranks(2)
def test_data_assigned_before_backward_keeps_gradients_of_forward() -> None:
    twins = Twins(MLP())
    x = draw(MLP.batch, 0)
    rank = torch.distributed.get_rank()
    losses = [twins.compiled(x[rank]), *map(twins.reference, x)]
    _whole(twins.model)
    _whole(twins.reference)
    losses[0].backward()
    torch.stack(losses[1:]).mean().backward()
    twins.check()


@on_ranks(2)
def test_sharpness_aware_step_matches_unsharded_copy() -> None:
    twins = Twins(MLP())
    optimizers = [sgd(model) for model in (twins.model, twins.reference)]
    for step in range(3):
        batches, saved = draw(MLP.batch, step), []
        twins.backward(batches)
        for model in (twins.model, twins.reference):
            saved.append([param.data.clone() for param in model.parameters()])
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(param.grad, alpha=0.1)
        twins.zero_grad()
        twins.backward(batches)
        for model, values, optimizer in zip(
            (twins.model, twins.reference), saved, optimizers, strict=True
        ):
            for param, value in zip(model.parameters(), values, strict=True):
                param.data = value
            optimizer.step()
        twins.check()
        twins.zero_grad()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale).square().mean()


@pytest.mark.parametrize("options", [{}, {"overrides": {"first.*": {"shard": False}}}])
@on_ranks(2)
def test_data_assigned_to_tied_and_replicated_parameters_is_used(options: dict[str, Any]) -> None:
    twins = Twins(_Tied(), **options)
    twins.backward(draw(MLP.batch, 0))
    _whole(twins.model)
    _whole(twins.reference)
    twins.zero_grad()
    twins.backward(draw(MLP.batch, 1))
    assert_same(twins.model, twins.reference)


@on_ranks(2)
def test_data_assigned_to_eager_model_is_used() -> None:
    model = MLP()
    reference = MLP()
    reference.load_state_dict(model.state_dict())
    graphshard.shard(model, world_mesh())
    for m in (model, reference):
        _whole(m)
    x = torch.ones(5, 7)
    assert_close("loss", model(x), reference(x))


@on_ranks(2)
def test_data_assigned_with_another_dtype_is_trained_on() -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    for model in (twins.model, twins.reference):
        for param in model.parameters():
            param.data = param.data.double()
    twins.train(lambda rng: MLP.batch(rng).double(), steps=2)
    assert all(param.dtype == torch.float64 for param in twins.model.parameters())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.ones(7, 7), r"'up.weight'.*\(7, 7\).*\(13, 7\)"),
        (torch.ones(13, 7, dtype=torch.int64), "floating point"),
        (1.0, "float"),
    ],
)
@on_ranks(2)
def test_assigned_data_that_does_not_fit_is_refused(value: Any, match: str) -> None:
    model = graphshard.shard(MLP(), world_mesh())
    before = model.state_dict()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
        model.up.weight.data = value
    for name, kept in model.state_dict().items():
        assert_close(name, kept, before[name])
    model(torch.ones(5, 7))


Tensors = dict[str, Any]


def _of_grads(model: nn.Module, _: torch.optim.Optimizer) -> Tensors:
    return {name: param.grad for name, param in model.named_parameters()}


def _of_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    state = optimizer.state
    return {n: state[p]["momentum_buffer"] for n, p in model.named_parameters()}


def _of_deepcopies(model: nn.Module, _: torch.optim.Optimizer) -> Tensors:
    return {name: copy.deepcopy(param) for name, param in model.named_parameters()}


def _of_clones(model: nn.Module, _: torch.optim.Optimizer) -> Tensors:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("of", [_of_grads, _of_momentum, _of_deepcopies, _of_clones])
@on_ranks(2)
def test_data_assigned_to_other_dtensors_is_not_lost(of: Callable[..., Tensors]) -> None:
    twins = Twins(MLP())
    models = twins.model, twins.reference
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    for step in range(2):
        twins.backward(draw(MLP.batch, step))
        seen = []
        for model, optimizer in zip(models, optimizers):
            if of is _of_grads or step:
                tensors = of(model, optimizer)
                for tensor in tensors.values():
                    tensor.data = tensor.data * 0.5
                    tensor.data *= 0.5
                seen.append(tensors)
            optimizer.step()
        for ours, theirs in zip(seen[::2], seen[1::2]):
            for name in ours:
                assert_close(name, ours[name], theirs[name])
        twins.check()
        twins.zero_grad()


@on_ranks(2)
def test_dtensor_shares_memory_with_assigned_data() -> None:
    mesh = init_device_mesh("cpu", (2,))
    graphshard.shard(MLP(), world_mesh())
    one, other = (distribute_tensor(torch.full((4,), v), mesh) for v in (1.0, 2.0))
    assert one.data.placements == one.placements
    one.data = other
    other.mul_(3)
    assert_close("shared", one.full_tensor(), torch.full((4,), 6.0))
    one.data = distribute_tensor(torch.ones(3, 2, dtype=torch.float64), mesh, [Replicate()])
    assert one.placements == (Replicate(),)
    assert_close("another layout", one, torch.ones(3, 2, dtype=torch.float64))


@on_ranks(2)
def test_plain_data_assigned_to_gradient_is_refused() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    model(torch.ones(5, 7)).sum().backward()
    grad = model.up.weight.grad
    before = grad.full_tensor()
    with pytest.raises(ValueError, match=r"plain tensor of shape \(13, 7\).*distribute_tensor"):
        grad.data = torch.ones(13, 7)
    assert_close("gradient", grad, before)
