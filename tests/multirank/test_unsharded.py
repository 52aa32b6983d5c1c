"""A model that was to be sharded never trains unsharded without a word: where no compiled call of
it can run, it is sharded all the same, or the first step of an optimizer raises an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphshard
from tests import ranks
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_plain,
    assert_sharded,
    graphshard_warnings,
    sgd,
    world_mesh,
)

Compile = Callable[[nn.Module, graphshard.Backend], Any]


def _backend(**options: Any) -> graphshard.Backend:
    return graphshard.backend(world_mesh(), compiler="aot_eager", **options)


def _step(model: nn.Module, called: Any) -> None:
    optimizer = sgd(model)
    called(torch.randn(5, 7)).square().mean().backward()
    optimizer.step()


def _in_place(model: nn.Module, backend: graphshard.Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def _disabled(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(model, backend=backend, disable=True)


def _compiled(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(model, backend=backend)


def _function(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(lambda x: model(x), backend=backend)


class _Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x)


def _method(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(_Trainer(model).loss, backend=backend)


def _disabled_function(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(lambda x: model(x), backend=backend, disable=True)


def _plain_model(model: nn.Module, backend: graphshard.Backend) -> Any:
    torch.compile(model, backend=backend)
    return model


def force_eager() -> AbstractContextManager[object]:
    return torch.compiler.set_stance("force_eager")


def config_disable() -> AbstractContextManager[object]:
    """What TORCH_COMPILE_DISABLE=1 sets."""
    return torch._dynamo.config.patch(disable=True)


def suppress_errors() -> AbstractContextManager[object]:
    return torch._dynamo.config.patch(suppress_errors=True)


# Sharded, though nothing is compiled.


def train_uncompiled(kind: Any, compile: Compile, off: Any) -> None:
    twins = Twins(kind())
    with off():
        twins.compiled = compile(twins.model, twins.backend)
        with graphshard_warnings() as texts:
            twins.train(MLP.batch, loss=lambda model, x: model(x).square().mean())
    assert_sharded(twins.model)
    assert len(texts) == 1, texts
    assert "compile" in texts[0]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _linear() -> nn.Module:
    return nn.Linear(7, 5)


UNCOMPILED = [
    (MLP, _compiled, force_eager),
    (MLP, _compiled, config_disable),
    (MLP, _disabled, nullcontext),
    (sequential, _in_place, nullcontext),
    (_linear, _in_place, nullcontext),
]


@pytest.mark.parametrize(("kind", "compile", "off"), UNCOMPILED)
def test_a_model_trains_right_though_nothing_is_compiled(
    kind: Any, compile: Compile, off: Any
) -> None:
    ranks.run(2, train_uncompiled, kind, compile, off)


class _Unsized(MLP):
    """A model whose truth value is an error."""

    def __len__(self) -> int:
        raise TypeError("has no length")


def _compiled_twice(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(torch.compile(model, backend="aot_eager"), backend=backend)


def train_without_truth_value(kind: Any, compile: Compile) -> None:
    twins = Twins(kind())
    twins.compiled = compile(twins.model, twins.backend)
    with graphshard_warnings() as texts:
        twins.train(MLP.batch, loss=lambda model, x: model(x).square().mean())
    assert_sharded(twins.model)
    assert not texts, texts


@pytest.mark.parametrize(("kind", "compile"), [(_Unsized, _compiled), (MLP, _compiled_twice)])
def test_a_model_without_a_truth_value_trains(kind: Any, compile: Compile) -> None:
    ranks.run(2, train_without_truth_value, kind, compile)


def _train_sharded_uncompiled() -> None:
    twins = Twins(graphshard.shard(MLP(), world_mesh()), MLP())
    twins.reference.load_state_dict(
        {name: p.full_tensor() for name, p in twins.model.state_dict().items()}
    )
    twins.compiled = twins.model
    with graphshard_warnings() as texts:
        twins.train(MLP.batch)
    assert len(texts) == 1 and "MLP is not compiled" in texts[0], texts


def test_a_sharded_model_that_is_never_compiled_warns_once() -> None:
    ranks.run(2, _train_sharded_uncompiled)


@torch.compiler.disable
def _in_python(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class _Loop(nn.Module):
    """Dynamo leaves its forward to Python, and finds no parameter in what it compiles of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(_in_python(layer, x))
        return x


def _train_a_loop(by_argument: bool) -> None:
    twins = Twins(_Loop())
    if by_argument:
        step = torch.compile(lambda model, x: model(x), backend=twins.backend)
        twins.compiled = lambda x: step(twins.model, x)
    else:
        twins.compiled = torch.compile(lambda x: twins.model(x), backend=twins.backend)
    twins.train(MLP.batch, loss=lambda model, x: model(x).square().mean())
    assert_sharded(twins.model)


@pytest.mark.parametrize("by_argument", [False, True])
def test_a_function_calls_a_model_whose_loop_is_left_to_python(by_argument: bool) -> None:
    ranks.run(2, _train_a_loop, by_argument)


def _share_a_graph() -> None:
    """The second model runs the graph that was compiled for the first."""
    backend, models = _backend(), [MLP(), MLP()]
    with graphshard_warnings() as texts:
        for model in models:
            _step(model, torch.compile(model, backend=backend))
            assert_sharded(model)
    assert len(backend.plans) == 2 and not texts, texts


def test_a_model_that_shares_the_graph_of_another_warns_of_nothing() -> None:
    ranks.run(2, _share_a_graph)


def _copy_before_the_first_call() -> None:
    """Copies know nothing of the backend, also where every call counts as a compiled one."""
    model = MLP()
    called = _disabled(model, _backend())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        copied(torch.ones(5, 7)).backward()
        assert_plain(copied)
    called(torch.ones(5, 7))
    assert_sharded(model)


def test_a_copy_made_before_the_first_call_stays_plain() -> None:
    ranks.run(2, _copy_before_the_first_call)


# Not sharded: an error at the first step.


def refuse_step(compile: Compile, off: Any) -> None:
    model = MLP()
    with off():
        called = compile(model, _backend())
        with pytest.raises(RuntimeError, match=r"SGD steps 'up\.weight' of MLP.*graphshard\.shard"):
            _step(model, called)
    dist.barrier()


UNSHARDED = [
    (_plain_model, nullcontext),
    (_function, force_eager),
    (_function, config_disable),
    (_disabled_function, nullcontext),
    (_method, force_eager),
]


@pytest.mark.parametrize(("compile", "off"), UNSHARDED)
def test_an_optimizer_that_steps_what_was_to_be_sharded(compile: Compile, off: Any) -> None:
    ranks.run(2, refuse_step, compile, off)


def _refuse_suppressed() -> None:
    model = MLP()
    compiled = _function(model, _backend(overrides={"nothing": {"shard": False}}))
    with suppress_errors(), pytest.raises(RuntimeError, match="SGD steps"):
        _step(model, compiled)


def test_an_error_that_torch_suppresses_is_one_at_the_first_step() -> None:
    ranks.run(2, _refuse_suppressed)


def _one_rank() -> None:
    model = MLP()
    torch.compile(model, backend=_backend())
    _step(model, model)


def test_a_single_rank_may_train_unsharded() -> None:
    ranks.run(1, _one_rank)


def _call_another_backend() -> None:
    """A function calls, from Python, what was compiled by another backend."""
    model, other = MLP(), torch.compile(MLP(), backend="aot_eager")
    outside = torch.compiler.disable(lambda x: other(x), recursive=False)
    compiled = torch.compile(lambda x: model(x) + outside(x), backend=_backend())
    compiled(torch.ones(5, 7)).backward()
    assert_sharded(model)
    assert_plain(other)


def test_a_function_leaves_models_of_other_backends_alone() -> None:
    ranks.run(2, _call_another_backend)


class _Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _refuse_to_step_beside() -> None:
    """A function compiles one model, and leaves the other one to Python."""
    model, other = MLP(), _Disabled()
    compiled = torch.compile(lambda x: model(x) + other(x).sum(), backend=_backend())
    compiled(torch.ones(5, 7)).sum().backward()
    assert_sharded(model)
    sgd(model).step()
    with pytest.raises(RuntimeError, match=r"SGD steps 'linear\.weight' of _Disabled"):
        sgd(other).step()
    dist.barrier()


def test_a_function_shards_one_of_its_models_alone() -> None:
    ranks.run(2, _refuse_to_step_beside)


def _warn_of_an_argument() -> None:
    """What a function is given is named nowhere."""
    model = _Disabled()
    compiled = torch.compile(lambda model, x: model(x).tanh(), backend=_backend())
    with graphshard_warnings() as texts:
        compiled(model, torch.ones(5, 7)).sum().backward()
        sgd(model).step()
    assert len(texts) == 1 and "sharded nothing" in texts[0], texts


def test_a_function_that_shards_nothing_warns() -> None:
    ranks.run(2, _warn_of_an_argument)


# Optimizers of other models.


def _step_others_first() -> None:
    """Another model trains before the compiled one, and a part of it that is left out."""
    model, other, reduced = MLP(), MLP(), DistributedDataParallel(MLP())
    backend = _backend(ignored_params=[model.up.bias])
    compiled = torch.compile(model, backend=backend)
    with graphshard_warnings() as texts:
        _step(other, other)
        _step(reduced, reduced)
        optimizer = sgd(model)
        model.up.bias.square().sum().backward()
        optimizer.step()  # holds what is to be sharded, but has a gradient of what is not
        _step(model, compiled)
        _step(other, other)
    assert not texts


def test_optimizers_of_other_models_step_before_and_after() -> None:
    ranks.run(2, _step_others_first)


def _ddp_of_a_compiled_model() -> None:
    """Somebody compiles a model, and trains it by DDP after all."""
    model = MLP()
    torch.compile(model, backend=_backend())
    ddp = DistributedDataParallel(model)
    _step(model, ddp)
    assert_plain(model)


def test_a_model_that_ddp_reduces_may_stay_plain() -> None:
    ranks.run(2, _ddp_of_a_compiled_model)


def _ddp_around(compile: Compile) -> None:
    """DDP would reduce gradients of parameters that are no more, and keep them allocated."""
    model = MLP()
    ddp = DistributedDataParallel(compile(model, _backend()))
    with pytest.raises(ValueError, match=r"'up\.weight' is reduced by Distributed.*leave that out"):
        ddp(torch.ones(5, 7))
    assert_plain(model)
    with pytest.raises(ValueError, match=r"'up\.weight' is reduced by Distributed"):
        graphshard.shard(model, world_mesh())
    del ddp
    graphshard.shard(model, world_mesh())
    assert_sharded(model)


@pytest.mark.parametrize("compile", [_compiled, _in_place, _disabled])
def test_ddp_around_a_compiled_model(compile: Compile) -> None:
    ranks.run(2, _ddp_around, compile)


def _forget_the_backend() -> None:
    model = MLP()
    backend = _backend()
    compiled = torch.compile(model, backend="aot_eager")
    with graphshard_warnings() as texts:
        for _ in range(2):
            _step(model, compiled)
    assert len(texts) == 1 and "sharded nothing" in texts[0], texts
    del backend


def test_a_backend_that_was_given_to_nothing_warns_once() -> None:
    ranks.run(2, _forget_the_backend)


def _compile_the_optimizer() -> None:
    backend, model = _backend(), MLP()
    optimizer = sgd(model)
    model(torch.ones(5, 7)).backward()
    torch.compile(optimizer.step, backend="eager")()  # Dynamo traces the hook of all optimizers
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    assert not any("graphshard" in reason for reason in reasons), reasons
    del backend


def test_an_optimizer_is_compiled() -> None:
    ranks.run(2, _compile_the_optimizer)
