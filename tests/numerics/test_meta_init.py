"""Initialization after `to_empty`: values written to a copy of a DTensor's rows raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import graphshard
from graphshard.params.uninitialized import mark_uninitialized, num_uninitialized
from tests.models import MLP
from tests.numerics.compare import compile_sharded, world_mesh
from tests.ranks import on_ranks


def _fill(p: Any) -> None:
    p.data.fill_(0.5)


def _draw(p: Any) -> None:
    nn.init.normal_(p)


def _distribute(p: Any) -> None:
    p.copy_(distribute_tensor(torch.full(p.shape, 0.5), p.device_mesh, p.placements))


def _assign_data(p: Any) -> None:
    p.data = torch.full_like(p.data, 0.5)


def _fill_rows(p: Any) -> None:
    for row in range(len(p)):
        p.data[row].fill_(0.5)


def _fill_most(p: Any) -> None:
    for part in p.chunk(2):
        part.fill_(0.5)


def _sharded() -> MLP:
    with torch.device("meta"):
        model = MLP()
    graphshard.shard(model, world_mesh())
    model.to_empty(device="cpu")
    return model


@pytest.mark.parametrize("fill", [_fill, _draw, _distribute, _assign_data])
@on_ranks(2)
def test_full_parameters_can_be_initialized(fill: Callable[[Any], None]) -> None:
    model = _sharded()
    with torch.no_grad():
        for param in model.parameters():
            fill(param)
    compiled = compile_sharded(model)
    for _ in range(2):
        assert compiled(torch.ones(5, 7)).isfinite()


@pytest.mark.parametrize("fill", [_fill_rows, _fill_most])
@pytest.mark.parametrize("eager", [False, True])
@on_ranks(2)
def test_values_lost_by_dtensor_raise(fill: Callable[[Any], None], eager: bool) -> None:
    model = _sharded()
    with torch.no_grad():
        for param in model.parameters():
            _fill(param)
        model.to_empty(device="cpu")
        for name, param in model.named_parameters():
            (fill if name == "mid.weight" else _fill)(param)
    call = model if eager else compile_sharded(model)
    with pytest.raises(ValueError, match=r"elements of parameter 'mid\.weight' were not init"):
        call(torch.ones(5, 7))
    with torch.no_grad():
        model.mid.weight.fill_(0.5)
    assert call(torch.ones(5, 7)).isfinite()


@on_ranks(2)
def test_load_state_dict_initializes() -> None:
    for assign in (False, True):
        model, other = _sharded(), graphshard.shard(MLP(), world_mesh())
        model.load_state_dict(other.state_dict(), assign=assign)
        assert compile_sharded(model)(torch.ones(5, 7)).isfinite()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (3, 5)])
def test_unfilled_mark_is_not_an_ordinary_nan(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor: Tensor = torch.full(shape, float("nan"), dtype=dtype)
    assert num_uninitialized(tensor) == 0
    assert mark_uninitialized(tensor) and num_uninitialized(tensor) == tensor.numel()
    assert tensor.isnan().all()
    assert num_uninitialized(tensor.fill_(float("nan"))) == 0


def test_integers_cannot_be_marked() -> None:
    tensor = torch.arange(3)
    assert not mark_uninitialized(tensor) and num_uninitialized(tensor) == 0
    assert tensor.tolist() == [0, 1, 2]
