"""Replaced parameters, which must be DTensors of the same layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import graphshard
from tests.models import MLP
from tests.numerics.compare import Twins, assert_close, world_mesh
from tests.ranks import on_ranks


class _Scaled(nn.Module):
    """Linear layer with a gain per row; `reset` sets gains to the row norms of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * torch.tanh(self.lin(x))).square().mean()

    def reset(self) -> None:
        self.gain = nn.Parameter(torch.linalg.norm(self.lin.weight.detach(), dim=1))


def _function(model: nn.Module) -> Any:
    return lambda x: model(x)


@pytest.mark.parametrize("function", [None, _function])
@on_ranks(2)
def test_parameter_replaced_after_step_is_trained(function: Any) -> None:
    twins = Twins(_Scaled(), function=function)
    twins.train(MLP.batch, steps=1)
    for model in (twins.model, twins.reference):
        assert isinstance(model, _Scaled)
        model.reset()
    twins.train(MLP.batch, steps=2)


@pytest.mark.parametrize("compiled", [True, False])
@on_ranks(2)
def test_parameter_replaced_before_first_step_is_trained(compiled: bool) -> None:
    model = _Scaled()
    reference = copy.deepcopy(model)
    twins = Twins(graphshard.shard(model, world_mesh()), reference)
    model.reset()
    reference.reset()
    if not compiled:
        twins.compiled = model
    twins.train(MLP.batch)


def _call_with(model: nn.Module, params: Mapping[str, Any], x: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(model, dict(params), (x,))
    return result


def _assign_and_restore(model: nn.Module, params: Mapping[str, Any], x: Tensor) -> Tensor:
    own = dict(model.named_parameters())
    _assign(model, params)
    result: Tensor = model(x)
    _assign(model, own)
    return result


def _assign(model: nn.Module, params: Mapping[str, Any]) -> None:
    for name, param in params.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, param)


def _doubled(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(param.detach() * 2) for name, param in model.named_parameters()}


def _of_doubled_copy(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a copy, which have shards of their own."""
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for param in doubled.parameters():
            param.mul_(2)
    return dict(doubled.named_parameters())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("call", "double"), [(_call_with, _doubled), (_assign_and_restore, _of_doubled_copy)]
)
@on_ranks(2)
def test_parameters_can_be_swapped_and_restored(call: Any, double: Any, compiled: bool) -> None:
    model, x = _Scaled(), torch.ones(5, 7)
    reference = copy.deepcopy(model)
    twins = Twins(graphshard.shard(model, world_mesh()), reference)
    if not compiled:
        twins.compiled = model
    twins.train(MLP.batch, steps=1)
    results = [call(called, double(called), x) for called in (twins.compiled, reference)]
    assert_close("result", *results)
    twins.train(MLP.batch, steps=2)


@on_ranks(2)
def test_computed_replacement_raises() -> None:
    model = graphshard.shard(_Scaled(), world_mesh())
    with pytest.raises(ValueError, match=r"'gain' was replaced .* computed .*functional_call"):
        _call_with(model, {"gain": model.gain * 2}, torch.ones(5, 7))
    model(torch.ones(5, 7))


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(9, (3, 5), generator=rng)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("function", [None, _function, "plain"])
@on_ranks(2)
def test_new_module_can_be_tied_to_sharded_parameter(function: Any, bias: bool) -> None:
    is_plain = function == "plain"
    twins = Twins(_Embedded(), function=None if is_plain else function)
    twins.train(_Embedded.batch, steps=1)
    head = nn.Linear(6, 9, bias=bias)
    for model in (twins.model, twins.reference):
        assert isinstance(model, _Embedded)
        model.head = copy.deepcopy(head)
        model.head.weight = model.embed.weight
    if is_plain:
        twins.compiled = graphshard.shard(twins.model, world_mesh())
    twins.train(_Embedded.batch, steps=2)
    assert twins.model.head.weight is twins.model.embed.weight


def _plain(gain: Any) -> Tensor:
    return gain.full_tensor()


def _replicated(gain: Any) -> Tensor:
    return gain.redistribute(placements=[Replicate()])


def _on_swapped_ranks(gain: Any) -> Tensor:
    layout = {"shape": gain.shape, "stride": gain.stride()}
    mesh = DeviceMesh("cpu", [1, 0])
    return DTensor.from_local(gain.to_local(), mesh, gain.placements, run_check=False, **layout)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (_plain, "'gain'.*replaced.*load_state_dict"),
        (_replicated, "'gain'.*Shard.*on Device"),
        (_on_swapped_ranks, r"'gain'.*the ranks \[1, 0\] instead of .*the ranks \[0, 1\]"),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
@on_ranks(2)
def test_replacement_of_another_layout_raises(make: Any, compiled: bool, match: str) -> None:
    model = _Scaled()
    called = Twins(graphshard.shard(model, world_mesh()), model).compiled if compiled else model
    graphshard.shard(model, world_mesh())
    model.gain = nn.Parameter(make(model.gain.detach()))
    with pytest.raises(ValueError, match=match):
        called(torch.ones(5, 7))


@on_ranks(2)
def test_casting_with_plain_replacement_raises() -> None:
    model = graphshard.shard(_Scaled(), world_mesh())
    model.gain = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=r"'gain' is sharded, but was replaced by a plain"):
        model.double()
