from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import graphshard
from tests import ranks
from tests.models import MLP
from tests.numerics.compare import Twins, assert_close, draw, sgd, world_mesh
from tests.ranks import on_ranks

Build = Callable[[nn.Module], Optimizer]


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def _adamw_by_tensor(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)


def _grouped(model: nn.Module) -> Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": rest, "weight_decay": 0.0, "lr": 0.05}, {"params": decay}]
    return torch.optim.AdamW(groups, 1e-2, weight_decay=0.1)


def _momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)


def _step_both(twins: Twins, optimizers: list[Optimizer], step: int) -> None:
    twins.backward(draw(MLP.batch, step))
    for optimizer in optimizers:
        optimizer.step()
    twins.check()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _plain_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Run one unsharded step, on the same batch on all ranks, to create optimizer state."""
    model(torch.ones(5, 7)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _assert_state_is_sharded(optimizer: Optimizer, model: nn.Module) -> None:
    params = set(model.parameters())
    assert set(optimizer.state) <= params
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert set(held) == params and len(held) == len(params)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape and param.dim():
                assert isinstance(value, DTensor), name
                assert value.placements == param.placements


@pytest.mark.parametrize("build", [_adamw, _adamw_by_tensor, _grouped, _momentum])
@pytest.mark.parametrize("with_state", [False, True])
@on_ranks(2)
def test_optimizer_built_before_first_step_gets_sharded_parameters(
    build: Build, with_state: bool
) -> None:
    model = MLP()
    models = model, copy.deepcopy(model)
    optimizers = [build(model) for model in models]
    if with_state:  # before torch.compile installs optimizer hooks
        for each, optimizer in zip(models, optimizers):
            _plain_step(each, optimizer)
    twins = Twins(*models)
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizers[0].param_groups]
    for step in range(3):
        _step_both(twins, optimizers, step)
    for group, before in zip(optimizers[0].param_groups, options):
        assert {k: v for k, v in group.items() if k != "params"} == before
    _assert_state_is_sharded(optimizers[0], twins.model)
    assert len(optimizers[0].state) == len(list(twins.model.parameters()))


class _Scaled(MLP):
    """An MLP with a scalar parameter, which is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
@on_ranks(2)
def test_state_of_replicated_parameters_steps_with_sharded_state(options: dict[str, Any]) -> None:
    models = _Scaled(), _Scaled()
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2, **options) for model in models]
    for model, optimizer in zip(models, optimizers):
        _plain_step(model, optimizer)
    twins = Twins(*models)
    for step in range(2):
        _step_both(twins, optimizers, step)
    state = optimizers[0].state[twins.model.scale]
    assert state["exp_avg"].placements == twins.model.scale.placements
    assert not isinstance(state["step"], DTensor)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("by_dcp", [False, True])
@on_ranks(2)
def test_full_state_loaded_after_sharding_is_split(kind: Any, by_dcp: bool) -> None:
    models = _Scaled(), _Scaled()
    reference = models[1]
    # Together, scalars that are and are not DTensors cannot be stepped.
    optimizers = [kind(model.parameters(), 1e-2, foreach=True) for model in models]
    _plain_step(reference, optimizers[1])
    get = get_optimizer_state_dict if by_dcp else lambda _, optimizer: optimizer.state_dict()
    state = copy.deepcopy(get(reference, optimizers[1]))
    text = str(state)
    graphshard.shard(models[0], world_mesh())
    models[0].load_state_dict(reference.state_dict())
    if by_dcp:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(models[0], optimizers[0], state, options=options)
    else:
        optimizers[0].load_state_dict(state)
        assert str(state) == text
    _assert_state_is_sharded(optimizers[0], models[0])
    twins = Twins(*models)
    for step in range(2):
        _step_both(twins, optimizers, step)
    scalars = optimizers[0].state[twins.model.scale]
    assert {n for n, v in scalars.items() if isinstance(v, DTensor)} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("as_lr", [float, torch.tensor])
@on_ranks(2)
def test_dcp_creates_state_before_sharding(as_lr: Callable[[float], Any]) -> None:
    model = _Scaled()
    models = model, copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), as_lr(1e-2), foreach=False) for m in models]
    twins = Twins(*models)
    for each, optimizer in zip(models, optimizers):
        model_state, optim_state = get_state_dict(each, optimizer)
        set_state_dict(each, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
        assert optimizer.param_groups[0]["lr"] == as_lr(1e-2)
    for step in range(2):
        _step_both(twins, optimizers, step)
    _assert_state_is_sharded(optimizers[0], model)


@pytest.mark.parametrize("build", [_adamw, _grouped, _momentum])
@on_ranks(2)
def test_optimizer_built_after_first_step_has_sharded_state(build: Build) -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    optimizers = [build(twins.model), build(twins.reference)]
    for step in range(3):
        _step_both(twins, optimizers, step)
    _assert_state_is_sharded(optimizers[0], twins.model)


@on_ranks(2)
def test_optimizer_of_two_models_keeps_unsharded_model() -> None:
    twins, other = Twins(MLP()), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*other.parameters(), *twins.model.parameters()], 1e-2)
    twins.backward(draw(MLP.batch, 0))
    held = optimizer.param_groups[0]["params"]
    assert held[:2] == list(other.parameters())
    assert not isinstance(held[0], DTensor)
    assert all(mine is param for mine, param in zip(held[2:], twins.model.parameters()))


@on_ranks(2)
def test_scheduler_built_before_first_step_sets_learning_rate() -> None:
    twins = Twins(MLP())
    optimizers = [_momentum(twins.model), _momentum(twins.reference)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for step in range(3):
        _step_both(twins, optimizers, step)
        for scheduler in schedulers:
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**3


class _WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.one_row = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale * self.one_row).square().mean()


def _clip(foreach: bool | None) -> None:
    twins = Twins(_WithScalar())
    twins.backward(draw(MLP.batch, 0))
    norms = [
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        for model in (twins.model, twins.reference)
    ]
    assert norms[1] > 0.1
    assert_close("norm", *norms)
    twins.check()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_clip_grad_norm_matches_unsharded_model(world_size: int, foreach: bool | None) -> None:
    ranks.run(world_size, _clip, foreach)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_accumulate_until_they_are_zeroed(set_to_none: bool) -> None:
    twins = Twins(MLP())
    optimizers = [sgd(twins.model), sgd(twins.reference)]
    for step in range(6):
        twins.backward(draw(MLP.batch, step))
        twins.check()
        if step % 3 == 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none)
    for param in twins.model.parameters():
        assert (param.grad is None) == set_to_none


@on_ranks(2)
def test_zeroed_gradients_stay_same_tensors() -> None:
    twins = Twins(MLP())
    twins.backward(draw(MLP.batch, 0))
    grads = [param.grad for param in twins.model.parameters()]
    twins.zero_grad(set_to_none=False)
    twins.backward(draw(MLP.batch, 1))
    twins.check()
    assert all(p.grad is grad for p, grad in zip(twins.model.parameters(), grads))


@on_ranks(2)
def test_grad_scaler_steps_like_unsharded_model() -> None:
    twins = Twins(MLP())
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    optimizers: list[Any] = [sgd(twins.model), sgd(twins.reference)]
    for step in range(2):
        twins.backward(draw(MLP.batch, step), lambda model, x: scalers[0].scale(model(x)))
        scalers[1].scale(torch.zeros(1))
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        twins.check()
        twins.zero_grad()


@pytest.mark.parametrize("build", [sgd, _adamw])
@on_ranks(2)
def test_compiled_optimizer_step_matches_eager_step(build: Build) -> None:
    twins = Twins(MLP())
    optimizers = [build(model) for model in (twins.model, twins.reference)]
    steps = [torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step]
    for step in range(3):
        twins.backward(draw(MLP.batch, step))
        twins.check()
        for run in steps:
            run()
        twins.zero_grad()


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weight = model.up.weight


def _hidden_from_sharding(model: nn.Module, graph_breaks: bool) -> None:
    """Freeze all objects and run a first step, which shards ``model``."""

    def loss(x: Tensor) -> Tensor:
        if graph_breaks:
            torch._dynamo.graph_break()  # sharded while the function runs
        return cast(Tensor, model(x))

    compiled = torch.compile(loss, backend=graphshard.backend(world_mesh(), compiler="aot_eager"))
    gc.collect()
    gc.freeze()
    try:
        compiled(torch.ones(5, 7)).backward()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("graph_breaks", [False, True])
@on_ranks(2)
def test_step_of_frozen_optimizer_raises(graph_breaks: bool) -> None:
    model = MLP()
    optimizer = sgd(model)
    _hidden_from_sharding(model, graph_breaks)
    with pytest.raises(RuntimeError, match=r"gc\.unfreeze"):
        optimizer.step()


@on_ranks(2)
def test_training_frozen_module_outside_of_model_raises() -> None:
    model = MLP()
    outside = _Loss(model)
    _hidden_from_sharding(model, graph_breaks=False)
    with pytest.raises(RuntimeError, match=r"gc\.unfreeze"):
        outside.weight.square().sum().backward()
