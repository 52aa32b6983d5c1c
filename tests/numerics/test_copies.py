"""Copies of a sharded model work; pickling the model or a part of it raises with advice."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphshard
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_same,
    assert_sharded,
    compile_sharded,
    draw,
    full_values,
    sgd,
    step_all,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks

# Pickling.


def _save(value: Any) -> None:
    torch.save(value, io.BytesIO())


class WithActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.GELU(), OwnReduce())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> torch.Tensor:
        return torch.randn(5, 4, generator=rng)


class OwnReduce(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def __reduce__(self) -> Any:
        return _own_reduce, (type(self),), self.__dict__


def _own_reduce(kind: type) -> Any:
    return kind.__new__(kind)


@on_ranks(2)
def test_pickling_raises_with_advice() -> None:
    model = graphshard.shard(WithActivation(), world_mesh())
    compiled = compile_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(draw(WithActivation.batch, 0)[0]).backward()
    optimizer.step()
    parts = [model, compiled, *model.layers, model.layers[0].weight, optimizer]
    for part in [*parts, model.state_dict(keep_vars=True)]:
        for save in (_save, pickle.dumps, ForkingPickler.dumps):
            with pytest.raises(
                ValueError, match="sharded by graphshard and cannot be pickled"
            ) as e:
                save(part)
            assert "full_state_dict" in str(e.value)
    for state in (model.state_dict(), optimizer.state_dict()):
        _save(state)
        copy.deepcopy(state)


# Copies of a sharded model.


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
@on_ranks(2)
def test_copy_of_sharded_model_trains(make: Callable[[Any], Any]) -> None:
    model, plain = WithActivation(), None
    plain = copy.deepcopy(model)
    graphshard.shard(model, world_mesh())
    copied = make(model)
    assert_sharded(copied)
    Twins(copied, plain).train(WithActivation.batch)


def _plain_of(model: nn.Module) -> nn.Module:
    plain = MLP()
    plain.load_state_dict(full_values(model))
    return plain


@on_ranks(2)
def test_copy_of_parameter_leaves_model_unchanged() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    twins = Twins(model, _plain_of(model))
    for make in (copy.copy, copy.deepcopy):
        copied = make(model.up.weight)
        assert isinstance(copied, DTensor) and copied is not model.up.weight
    twins.train(MLP.batch, steps=1)


@pytest.mark.parametrize("what", ["model", "compiled", "average"])
@on_ranks(2)
def test_copy_of_model_with_gradients_trains_identically(what: str) -> None:
    model = MLP()
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    compiled = torch.compile(model, backend=backend)
    batches = [draw(MLP.batch, step)[dist.get_rank()] for step in range(4)]
    compiled(batches[0]).backward()
    if what == "compiled":
        copied = copy.deepcopy(compiled)
        twin = copied._orig_mod
    else:
        averaged = AveragedModel(model) if what == "average" else None
        twin = copy.deepcopy(model) if averaged is None else averaged.module
        copied = torch.compile(twin, backend=backend)
    assert_same(twin, model, tolerance=0.0)
    assert all(p.grad is not q.grad for p, q in zip(twin.parameters(), model.parameters()))
    optimizers = [sgd(model), sgd(twin)]
    for batch in batches[1:]:
        step_all(*optimizers)
        losses = [compiled(batch), copied(batch)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert_same(twin, model, tolerance=0.0)
    optimizers[0].step()
    assert not torch.equal(whole(model.up.weight), whole(twin.up.weight))


@on_ranks(2)
def test_copy_of_optimizer_with_gradients_equals_it() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    compile_sharded(model)(draw(MLP.batch, 0)[dist.get_rank()]).backward()
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    for param, other in zip(model.parameters(), copied.param_groups[0]["params"]):
        assert other is not param and other.grad is not param.grad
        pairs = [(param, other), (param.grad, other.grad)]
        pairs += [(value, copied.state[other][n]) for n, value in optimizer.state[param].items()]
        pairs += [(param, copy.deepcopy(param)), (param.grad, copy.deepcopy(param.grad))]
        assert all(type(a) is type(b) and torch.equal(whole(a), whole(b)) for a, b in pairs)


class _WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x).square().mean()


@on_ranks(2)
def test_copy_of_parametrized_module_trains() -> None:
    twins = Twins(_WeightNormed())
    twins.backward(draw(MLP.batch, 0))
    copied = AveragedModel(twins.model).module
    assert_same(copied, twins.reference)
    Twins(copied, twins.reference).train(MLP.batch, steps=2)


# Copies made before the first step.


def _backend(**options: Any) -> graphshard.Backend:
    return graphshard.backend(world_mesh(), compiler="aot_eager", **options)


def _copy_of_model_compiled_in_place(backend: graphshard.Backend) -> MLP:
    model = MLP()
    model.compile(backend=backend)
    return copy.deepcopy(model)


def _step(model: nn.Module, called: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = sgd(model)
    called(draw(MLP.batch, 0)[dist.get_rank()]).backward()
    optimizer.step()


@pytest.mark.parametrize("of_copy", [False, True])
@on_ranks(2)
def test_step_of_plain_copy_of_model_compiled_in_place_raises(of_copy: bool) -> None:
    copied = _copy_of_model_compiled_in_place(_backend())
    if of_copy:
        copied = copy.deepcopy(copied)
    with pytest.raises(
        RuntimeError, match=r"'up\.weight' of MLP, which is a copy .*Compile the copy"
    ):
        _step(copied, copied)
    dist.barrier()


def _compiled_in_place(model: nn.Module, backend: graphshard.Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def _compiled(model: nn.Module, backend: graphshard.Backend) -> Any:
    return torch.compile(model, backend=backend)


def _sharded(model: nn.Module, backend: graphshard.Backend) -> nn.Module:
    return graphshard.shard(model, world_mesh())


@pytest.mark.parametrize("make", [_compiled_in_place, _compiled, _sharded])
@pytest.mark.parametrize("runs_before", [False, True])
@on_ranks(2)
def test_copy_of_model_compiled_in_place_can_be_sharded(make: Any, runs_before: bool) -> None:
    copied = _copy_of_model_compiled_in_place(backend := _backend())
    if runs_before:
        copied(draw(MLP.batch, 0)[0])
    _step(copied, make(copied, backend))
    assert_sharded(copied)


@on_ranks(2)
def test_copy_of_model_compiled_in_place_may_stay_plain_if_ranks_agree() -> None:
    backend = _backend()
    in_ddp = _copy_of_model_compiled_in_place(backend)
    _step(in_ddp, nn.parallel.DistributedDataParallel(in_ddp))
    model = MLP()
    model.compile(backend=backend)
    teacher = copy.deepcopy(model)
    _step(model, lambda x: model(x) + teacher(x).detach())
    model = MLP()
    torch.compile(model, backend=backend)
    plain = copy.deepcopy(model)
    _step(plain, plain)
    for each in (in_ddp, teacher, plain):
        assert not any(isinstance(param, DTensor) for param in each.parameters())


@on_ranks(2)
def test_copy_of_model_compiled_in_place_can_be_pickled() -> None:
    copied = _copy_of_model_compiled_in_place(_backend())
    _save(copied)
    content = pickle.dumps(copied)
    assert b"Backend" not in content and b"DeviceMesh" not in content
    loaded = pickle.loads(content)
    batch = draw(MLP.batch, 0)[0]
    assert torch.equal(loaded(batch), copied(batch))


@pytest.mark.parametrize("copy_runs_first", [False, True])
@on_ranks(2)
def test_copy_of_compiled_model_casts_inputs(copy_runs_first: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    compiled = torch.compile(MLP(), backend=_backend(mp_policy=policy))
    pair = [compiled, copy.deepcopy(compiled)]
    optimizers = [sgd(each) for each in pair]
    for step in range(2):
        step_all(*optimizers)
        batch = draw(MLP.batch, step)[dist.get_rank()]
        losses = [each(batch) for each in (reversed(pair) if copy_runs_first else pair)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses) and losses[0].dtype == torch.float32
    assert_sharded(pair[1])
    assert_same(pair[1], pair[0], tolerance=0.0)


# Weight averages and optimizers created before the first step.


@pytest.mark.parametrize(("before", "shard_first"), [(True, True), (False, False), (True, False)])
@on_ranks(2)
def test_weight_average_must_be_created_after_sharding(before: bool, shard_first: bool) -> None:
    """Check that an average created after sharding follows the model, and an earlier one raises."""
    model = MLP()
    model.tied = model.up
    plain = copy.deepcopy(model)
    twins = Twins(model, plain)
    if shard_first:
        graphshard.shard(model, world_mesh())
    if not before:
        twins.train(MLP.batch, steps=1)
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (model, plain)]
    optimizers = [sgd(model), sgd(plain)]
    for step in range(2):
        twins.backward(draw(MLP.batch, step))
        for optimizer, average, of in zip(optimizers, averages, (model, plain)):
            optimizer.step()
            optimizer.zero_grad()
            if average is averages[0] and before and not shard_first:
                with pytest.raises(RuntimeError, match="DTensor"):
                    average.update_parameters(of)
                return
            average.update_parameters(of)
    assert_same(*averages)


@pytest.mark.parametrize("in_function", [False, True])
@on_ranks(2)
def test_optimizer_of_stale_parameters_raises(in_function: bool) -> None:
    model = MLP()
    stale = list(model.parameters())
    called = (lambda x: model(x)) if in_function else model
    compile_sharded(called)(draw(MLP.batch, 0)[dist.get_rank()]).backward()
    with pytest.raises(RuntimeError, match=r"call model.parameters\(\) again"):
        torch.optim.AdamW(stale).step()
