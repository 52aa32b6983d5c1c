"""Parameters and buffers that share elements, or are next to each other in one tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.models import MLP
from tests.numerics.compare import Twins, assert_plain, compile_sharded, world_mesh
from tests.ranks import on_ranks


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


def _same(model: _Pair) -> None:
    model.last.weight.data = model.first.weight.data


def _transposed(model: _Pair) -> None:
    model.last.weight = nn.Parameter(model.first.weight.detach().t())


def _overlapping(model: _Pair) -> None:
    flat = torch.randn(60)
    model.first.weight = nn.Parameter(flat[:49].view(7, 7))
    model.last.weight = nn.Parameter(flat[11:].view(7, 7))


def _view(model: _Pair) -> None:
    model.register_buffer("rows", model.first.weight.data[3:])


def _same_object(model: _Pair) -> None:
    model.register_buffer("weight", model.last.weight)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("tie", "match"),
    [
        (_same, r"'first.weight' and 'last.weight' .* \(last.weight = first.weight\)"),
        (_transposed, r"'first.weight' and 'last.weight' .* compute 'last.weight' from"),
        (_overlapping, "'first.weight' and 'last.weight' .* clone"),
        (_view, "'first.weight' and buffer 'rows' .* compute 'rows' from 'first.weight'"),
        (_same_object, "'last.weight' and buffer 'weight' .* clone"),
    ],
)
@on_ranks(2)
def test_parameters_that_share_elements_raise(
    tie: Callable[[_Pair], None], compiled: bool, match: str
) -> None:
    model = _Pair()
    tie(model)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=match):
        if compiled:
            compile_sharded(model)(torch.ones(5, 7))
        else:
            graphshard.shard(model, world_mesh())
    assert_plain(model)
    assert torch.equal(model(torch.ones(5, 7)), before(torch.ones(5, 7)))


def _flat(model: _Pair) -> None:
    flat = torch.randn(98) / 7
    model.first.weight = nn.Parameter(flat[:49].view(7, 7))
    model.last.weight = nn.Parameter(flat[49:].view(7, 7))


def _columns(model: _Pair) -> None:
    both = torch.randn(7, 14) / 7
    model.first.weight = nn.Parameter(both[:, :7])
    model.last.weight = nn.Parameter(both[:, 7:])


def _one_object(model: _Pair) -> None:
    model.last.weight = model.first.weight


def _empty(model: _Pair) -> None:
    nothing = torch.zeros(0)
    model.first.nothing = nn.Parameter(nothing.view(0, 3))
    model.last.nothing = nn.Parameter(nothing.view(0, 3))


def _expanded(model: _Pair) -> None:
    both = torch.randn(14) / 7
    model.first.weight = nn.Parameter(both[::2].expand(7, 7).clone())
    model.first.bias = nn.Parameter(both[::2])
    model.last.bias = nn.Parameter(both[1::2])


def _buffers(model: _Pair) -> None:
    both = torch.randn(63) / 7
    model.first.weight = nn.Parameter(both[:49].view(7, 7))
    model.register_buffer("rest", both[49:])
    model.register_buffer("last_of_rest", both[60:])
    model.last.weight.requires_grad_(False)
    model.register_buffer("frozen", model.last.weight.data)


@pytest.mark.parametrize("tie", [_flat, _columns, _one_object, _empty, _expanded, _buffers])
@on_ranks(2)
def test_parameters_side_by_side_in_one_buffer_train(tie: Callable[[_Pair], None]) -> None:
    model = _Pair()
    tie(model)
    reference = copy.deepcopy(model)
    Twins(model, reference).train(MLP.batch)


@on_ranks(2)
def test_ignored_and_meta_parameters_may_share_memory() -> None:
    model = _Pair()
    _same(model)
    ignored = [model.first.weight, model.last.weight]
    graphshard.shard(model, world_mesh(), ignored_params=ignored)
    with torch.device("meta"):
        meta = _Pair()
        _same(meta)
    graphshard.shard(meta, world_mesh())
