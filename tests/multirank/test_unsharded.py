"""On several ranks, a model compiled with graphshard never silently trains unsharded."""

from __future__ import annotations

import copy
import functools
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
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_plain,
    assert_sharded,
    full_values,
    graphshard_warnings,
    sgd,
    world_mesh,
)
from tests.ranks import on_ranks

Compile = Callable[..., Any]
"""Function ``compile(model, **options)``; options are those of ``torch.compile``."""


def _backend(**options: Any) -> graphshard.Backend:
    return graphshard.backend(world_mesh(), compiler="aot_eager", **options)


def _options(named: bool) -> dict[str, Any]:
    if not named:
        return {"backend": _backend()}
    return {"backend": "graphshard", "options": {"mesh": world_mesh(), "compiler": "aot_eager"}}


def _step(model: nn.Module, called: Any) -> None:
    optimizer = sgd(model)
    called(torch.randn(5, 7)).square().mean().backward()
    optimizer.step()


def _in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def _disabled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options, disable=True)


def _compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def _function(model: nn.Module, **options: Any) -> Any:
    return torch.compile(lambda x: model(x), **options)


class _Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x)


def _method(model: nn.Module, **options: Any) -> Any:
    return torch.compile(_Trainer(model).loss, **options)


def _disabled_function(model: nn.Module, **options: Any) -> Any:
    return torch.compile(lambda x: model(x), **options, disable=True)


def _plain_model(model: nn.Module, **options: Any) -> Any:
    torch.compile(model, **options)
    return model


def _force_eager() -> AbstractContextManager[object]:
    return torch.compiler.set_stance("force_eager")


def _config_disable() -> AbstractContextManager[object]:
    return torch._dynamo.config.patch(disable=True)


def _suppress_errors() -> AbstractContextManager[object]:
    return torch._dynamo.config.patch(suppress_errors=True)


# Sharded although nothing is compiled.


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _linear() -> nn.Module:
    return nn.Linear(7, 5)


UNCOMPILED = [
    (MLP, _compiled, _force_eager),
    (MLP, _compiled, _config_disable),
    (MLP, _disabled, nullcontext),
    (_sequential, _in_place, nullcontext),
    (_linear, _in_place, nullcontext),
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("kind", "compile", "off"), UNCOMPILED)
@on_ranks(2)
def test_model_is_sharded_although_nothing_is_compiled(
    kind: Any, compile: Compile, off: Any, named: bool
) -> None:
    twins = Twins(kind())
    with off():
        twins.compiled = compile(twins.model, **_options(named))
        with graphshard_warnings() as texts:
            twins.train(MLP.batch, loss=lambda model, x: model(x).square().mean())
    assert_sharded(twins.model)
    assert len(texts) == 1, texts
    assert "compile" in texts[0]


class _Unsized(MLP):
    def __len__(self) -> int:
        raise TypeError("has no length")


def _compiled_twice(model: nn.Module, **options: Any) -> Any:
    return torch.compile(torch.compile(model, backend="aot_eager"), **options)


@pytest.mark.parametrize(("kind", "compile"), [(_Unsized, _compiled), (MLP, _compiled_twice)])
@on_ranks(2)
def test_model_without_truth_value_is_sharded(kind: Any, compile: Compile) -> None:
    twins = Twins(kind())
    twins.compiled = compile(twins.model, backend=twins.backend)
    with graphshard_warnings() as texts:
        twins.train(MLP.batch, loss=lambda model, x: model(x).square().mean())
    assert_sharded(twins.model)
    assert not texts, texts


@on_ranks(2)
def test_sharded_but_uncompiled_model_warns_once() -> None:
    twins = Twins(graphshard.shard(MLP(), world_mesh()), MLP())
    twins.reference.load_state_dict(full_values(twins.model))
    twins.compiled = twins.model
    with graphshard_warnings() as texts:
        twins.train(MLP.batch)
    assert len(texts) == 1 and "MLP is not compiled" in texts[0], texts


@torch.compiler.disable
def _in_python(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class _Loop(nn.Module):
    """A model whose loop runs eagerly, so that Dynamo's graphs contain no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(_in_python(layer, x))
        return x


@pytest.mark.parametrize("by_argument", [False, True])
@on_ranks(2)
def test_model_with_eager_loop_in_compiled_function_is_sharded(by_argument: bool) -> None:
    twins = Twins(_Loop())
    if by_argument:
        step = torch.compile(lambda model, x: model(x), backend=twins.backend)
        twins.compiled = lambda x: step(twins.model, x)
    else:
        twins.compiled = torch.compile(lambda x: twins.model(x), backend=twins.backend)
    twins.train(MLP.batch, loss=lambda model, x: model(x).square().mean())
    assert_sharded(twins.model)


@on_ranks(2)
def test_model_that_reuses_a_graph_does_not_warn() -> None:
    backend, models = _backend(), [MLP(), MLP()]
    with graphshard_warnings() as texts:
        for model in models:
            _step(model, torch.compile(model, backend=backend))
            assert_sharded(model)
    assert len(backend.plans) == 2 and not texts, texts


@on_ranks(2)
def test_copy_made_before_first_call_stays_plain() -> None:
    model = MLP()
    called = _disabled(model, backend=_backend())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        copied(torch.ones(5, 7)).backward()
        assert_plain(copied)
    called(torch.ones(5, 7))
    assert_sharded(model)


# Not sharded: the first optimizer step raises.


UNSHARDED = [
    (_plain_model, nullcontext),
    (_function, _force_eager),
    (_function, _config_disable),
    (_disabled_function, nullcontext),
    (_method, _force_eager),
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("compile", "off"), UNSHARDED)
@on_ranks(2)
def test_optimizer_step_on_unsharded_model_raises(compile: Compile, off: Any, named: bool) -> None:
    model = MLP()
    with off():
        called = compile(model, **_options(named))
        with pytest.raises(RuntimeError, match=r"SGD steps 'up\.weight' of MLP.*graphshard\.shard"):
            _step(model, called)
    dist.barrier()


@on_ranks(2)
def test_suppressed_compile_error_raises_at_first_step() -> None:
    model = MLP()
    compiled = _function(model, backend=_backend(overrides={"nothing": {"shard": False}}))
    with _suppress_errors(), pytest.raises(RuntimeError, match="SGD steps"):
        _step(model, compiled)


@on_ranks(2)
def test_suppressed_compile_error_of_unknown_model_warns_at_first_step() -> None:
    model, backend = MLP(), _backend(overrides={"nothing": {"shard": False}})
    compiled = torch.compile(lambda model, x: model(x), backend=backend)
    with _suppress_errors(), graphshard_warnings() as texts:
        _step(model, functools.partial(compiled, model))
    assert len(texts) == 1 and "sharded nothing" in texts[0], texts


@on_ranks(1)
def test_single_rank_may_train_unsharded() -> None:
    model = MLP()
    torch.compile(model, backend=_backend())
    _step(model, model)


@on_ranks(2)
def test_models_of_other_backends_stay_plain() -> None:
    model, other = MLP(), torch.compile(MLP(), backend="aot_eager")
    outside = torch.compiler.disable(lambda x: other(x), recursive=False)
    compiled = torch.compile(lambda x: model(x) + outside(x), backend=_backend())
    compiled(torch.ones(5, 7)).backward()
    assert_sharded(model)
    assert_plain(other)


class _Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_eager_model_in_compiled_function_raises_at_step() -> None:
    model, other = MLP(), _Disabled()
    compiled = torch.compile(lambda x: model(x) + other(x).sum(), backend=_backend())
    compiled(torch.ones(5, 7)).sum().backward()
    assert_sharded(model)
    sgd(model).step()
    with pytest.raises(RuntimeError, match=r"SGD steps 'linear\.weight' of _Disabled"):
        sgd(other).step()
    dist.barrier()


class _EagerHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 7), _Disabled()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _body_in_place(model: nn.Module, **options: Any) -> nn.Module:
    graphshard.shard(model, world_mesh()).get_submodule("body").compile(**options)
    return model


REPLACED: list[tuple[Any, Compile, str]] = [
    (_EagerHead, _compiled, "head"),
    (_EagerHead, _function, "head"),
    (_EagerHead, _body_in_place, "head"),
    (_sequential, _in_place, "2"),
]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("kind", "compile", "name"), REPLACED)
@on_ranks(2)
def test_optimizer_step_on_module_replaced_after_sharding_raises(
    kind: Any, compile: Compile, name: str, copied: bool
) -> None:
    model = kind()
    called = compile(model, backend=(backend := _backend()))
    _step(model, called)
    if copied:
        model = copy.deepcopy(model)
        called = compile(model, backend=backend)
    setattr(model, name, kind().get_submodule(name))
    sgd(model).step()  # the new module has no gradient yet
    with pytest.raises(RuntimeError, match=rf"steps '{name}\..* added after.*graphshard\.shard"):
        _step(model, called)
    graphshard.shard(model, world_mesh())
    _step(model, called)
    assert_sharded(model)


def _ignore_by_shard(model: nn.Module, head: nn.Module) -> nn.Module:
    return graphshard.shard(model, world_mesh(), ignored_params=head.parameters())


def _ignore_by_backend(model: nn.Module, head: nn.Module) -> Any:
    return torch.compile(model, backend=_backend(ignored_params=head.parameters()))


@pytest.mark.parametrize("ignore", [_ignore_by_shard, _ignore_by_backend])
@on_ranks(2)
def test_module_replaced_after_sharding_may_be_ignored(ignore: Any) -> None:
    model = graphshard.shard(_EagerHead(), world_mesh())
    model.head = _Disabled()
    _step(model, ignore(model, model.head))
    assert_plain(model.head)


@on_ranks(2)
def test_optimizers_may_step_plain_rest_of_partly_sharded_model() -> None:
    model = _EagerHead()
    graphshard.shard(model.body, world_mesh())
    _step(model, model)
    assert_plain(model.head)


@on_ranks(2)
def test_compiled_function_that_shards_nothing_warns() -> None:
    # graphshard cannot see models passed as arguments of a function.
    model = _Disabled()
    compiled = torch.compile(lambda model, x: model(x).tanh(), backend=_backend())
    with graphshard_warnings() as texts:
        compiled(model, torch.ones(5, 7)).sum().backward()
        sgd(model).step()
    assert len(texts) == 1 and "sharded nothing" in texts[0], texts


# Optimizers of other models.


@on_ranks(2)
def test_optimizers_of_other_models_may_step() -> None:
    model, other, reduced = MLP(), MLP(), DistributedDataParallel(MLP())
    backend = _backend(ignored_params=[model.up.bias])
    compiled = torch.compile(model, backend=backend)
    with graphshard_warnings() as texts:
        _step(other, other)
        _step(reduced, reduced)
        optimizer = sgd(model)
        model.up.bias.square().sum().backward()
        optimizer.step()  # the only parameter with a gradient is ignored
        _step(model, compiled)
        _step(other, other)
    assert not texts


@on_ranks(2)
def test_model_trained_with_ddp_may_stay_plain() -> None:
    model = MLP()
    torch.compile(model, backend=_backend())
    ddp = DistributedDataParallel(model)
    _step(model, ddp)
    assert_plain(model)


@pytest.mark.parametrize("compile", [_compiled, _in_place, _disabled])
@on_ranks(2)
def test_ddp_around_compiled_model_is_refused(compile: Compile) -> None:
    # DDP would keep the replaced parameters alive and reduce their gradients.
    model = MLP()
    ddp = DistributedDataParallel(compile(model, backend=_backend()))
    with pytest.raises(ValueError, match=r"Distributed.* reduces .*'up\.weight': remove the"):
        ddp(torch.ones(5, 7))
    assert_plain(model)
    with pytest.raises(ValueError, match=r"Distributed.* reduces .*'up\.weight'"):
        graphshard.shard(model, world_mesh())
    del ddp
    graphshard.shard(model, world_mesh())
    assert_sharded(model)


@on_ranks(2)
def test_unused_backend_warns_once() -> None:
    model = MLP()
    backend = _backend()
    compiled = torch.compile(model, backend="aot_eager")
    with graphshard_warnings() as texts:
        for _ in range(2):
            _step(model, compiled)
    assert len(texts) == 1 and "sharded nothing" in texts[0], texts
    del backend


@on_ranks(2)
def test_optimizer_step_compiles_without_break() -> None:
    backend, model = _backend(), MLP()
    optimizer = sgd(model)
    model(torch.ones(5, 7)).backward()
    torch.compile(optimizer.step, backend="eager")()  # Dynamo traces the global optimizer hook
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    assert not any("graphshard" in reason for reason in reasons), reasons
    del backend
