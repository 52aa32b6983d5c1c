"""Casts of a model's inputs and outputs, from the first compiled call on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from tests.models import GPT, MLP, Trainable
from tests.numerics.compare import assert_sharded, graphshard_warnings, world_mesh
from tests.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class CastBoundary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        y, ids = more["y"], more["ids"]
        return {"out": self.linear(x + y), "ids": ids, "dtypes": [x.dtype, y.dtype]}


BOUNDARY = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP16)


def _call(model: Any) -> None:
    for _ in range(2):  # the first call shards
        found = model(torch.ones(2, 4), more={"y": torch.ones(2, 4), "ids": torch.arange(3)})
        assert found["dtypes"] == [BF16, BF16]
        assert found["out"].dtype == FP16 and found["ids"].dtype == torch.int64
        found["out"].sum().backward()


def _one_line(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def _in_place(model: nn.Module, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def _function(model: nn.Module, backend: Any) -> Any:
    @torch.compile(backend=backend)
    def call(x: Tensor, **kwargs: Any) -> Any:
        return model(x, **kwargs)

    return call


@pytest.mark.parametrize("compiled", [_one_line, _in_place, _function])
@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_inputs_and_outputs_are_cast_from_first_call(
    compiled: Callable[..., Any], first: bool
) -> None:
    model = CastBoundary()
    if first:
        graphshard.shard(model, world_mesh(), mp_policy=BOUNDARY)
    called = compiled(
        model, graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=BOUNDARY)
    )
    _call(called)
    hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    assert len(hooks) == 2


@on_ranks(2)
def test_second_model_of_a_backend_is_cast() -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=BOUNDARY)
    for model in (CastBoundary(), CastBoundary()):
        _call(torch.compile(model, backend=backend))
        model.linear.requires_grad_(False)
    parts = nn.ModuleList([CastBoundary(), CastBoundary()])
    for part in parts:
        part.compile(backend=backend)
        _call(part)


@on_ranks(2)
def test_plain_call_before_first_compiled_call_is_not_cast() -> None:
    model = MLP()
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=BOUNDARY)
    compiled = torch.compile(model, backend=backend)
    assert model(torch.ones(5, 7)).dtype == FP32
    assert compiled(torch.ones(5, 7)).dtype == model(torch.ones(5, 7)).dtype == FP16


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x).square().mean()


@on_ranks(2)
def test_inputs_and_outputs_are_cast_with_a_graph_break() -> None:
    options = {"compiler": "aot_eager", "mp_policy": MixedPrecisionPolicy(BF16, FP32)}
    model = Broken()
    compiled = torch.compile(model, backend=graphshard.backend(world_mesh(), **options))
    for _ in range(2):
        compiled(torch.ones(5, 7)).backward()
    assert model.linear.weight.grad.dtype == FP32
    late = Broken()
    late.forward = torch.compile(  # type: ignore[method-assign]
        late.forward, backend=graphshard.backend(world_mesh(), **options)
    )
    with pytest.raises(RuntimeError, match=r"call graphshard.shard\(model, ...\) first"):
        late(torch.ones(5, 7))
    assert type(late.linear.weight) is nn.Parameter


@dataclass
class Batch:
    x: Tensor
    ids: Tensor


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: Batch) -> Batch:
        return Batch(self.linear(batch.x), batch.ids)


@on_ranks(2)
def test_dataclasses_are_cast() -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=BOUNDARY)
    compiled = torch.compile(TakesDataclass(), backend=backend)
    for _ in range(2):
        found = compiled(Batch(torch.ones(2, 4), torch.arange(3)))
        assert (found.x.dtype, found.ids.dtype) == (FP16, torch.int64)


@pytest.mark.parametrize("kind", [GPT, MLP])
@on_ranks(2)
def test_backend_by_name_casts_inputs_of_first_call(kind: Trainable) -> None:
    options = {"compiler": "aot_eager", "mp_policy": MixedPrecisionPolicy(BF16, FP32)}
    compiled = torch.compile(kind(), backend="graphshard", options=options)
    batch = kind.batch(torch.Generator())
    for _ in range(2):
        assert compiled(batch).dtype == BF16


def _linear() -> nn.Module:
    return nn.Linear(4, 3)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh())


@pytest.mark.parametrize("compile", [_one_line, _in_place])
@pytest.mark.parametrize("make", [_linear, _sequential])
@on_ranks(2)
def test_bare_torch_nn_module_is_cast(
    make: Callable[[], nn.Module], compile: Callable[[nn.Module, Any], Any]
) -> None:
    model = make()
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=BOUNDARY)
    called = compile(model, backend)
    for _ in range(2):
        with graphshard_warnings() as texts:
            out = called(torch.ones(2, 4))
            assert out.dtype == FP16
            out.sum().backward()
        # In some torch versions, compile() of such a module does nothing.
        assert compile is _in_place or not texts, texts
    assert_sharded(model)
    assert compile is _in_place or len(backend.plans) == 2
    # Of the hooks that sharding adds, only the casting hook is left.
    assert len(model._forward_pre_hooks) == 1
