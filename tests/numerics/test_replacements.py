"""Replaced parameters, which must be DTensors of the same layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import graphshard
from tests.models import MLP
from tests.numerics.compare import Twins, assert_close, assert_same, draw, generator, world_mesh
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


def _set_none(module: nn.Module, name: str) -> None:
    setattr(module, name, None)


def _register_none(module: nn.Module, name: str) -> None:
    delattr(module, name)
    module.register_parameter(name, None)


@pytest.mark.parametrize("remove", [_set_none, _register_none])
@on_ranks(2)
def test_model_trains_without_removed_bias(remove: Any) -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    removed = twins.model.up.bias
    for model in (twins.model, twins.reference):
        remove(model.up, "bias")
    twins.train(MLP.batch, steps=2)
    assert removed.grad is None
    copied = copy.deepcopy(twins.model)
    x = torch.ones(5, 7)
    torch.testing.assert_close(copied(x), twins.model(x))
    for model in (twins.model, twins.reference):  # a parameter that was put back
        model.up.bias = removed if model is twins.model else nn.Parameter(removed.full_tensor())
    assert_close("restored", *(model(x) for model in (twins.compiled, twins.reference)))
    twins.model.up.bias = nn.Parameter(torch.ones(13))
    with pytest.raises(RuntimeError, match=r"'up.bias' was replaced"):
        twins.compiled(x)


@on_ranks(2)
def test_tied_parameter_may_be_removed_from_one_module() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    model[1].bias = model[0].bias
    twins = Twins(_Mean(model))
    twins.train(MLP.batch, steps=1)
    models = twins.model, twins.reference
    tied = [one.inner[0].bias for one in models]
    for removed in ({0}, {1}, {0, 1}):
        for one, bias in zip(models, tied):
            for i in (0, 1):
                one.inner[i].bias = None if i in removed else bias
        twins.train(MLP.batch, steps=1)


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


@on_ranks(2)
def test_computed_replacement_raises() -> None:
    model = graphshard.shard(_Scaled(), world_mesh())
    with pytest.raises(ValueError, match=r"'gain' was replaced .* computed .*functional_call"):
        _call_with(model, {"gain": model.gain * 2}, torch.ones(5, 7))
    model(torch.ones(5, 7))


class _Embedded(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, width), nn.Linear(width, 9)

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


# Parameters that share memory.


def _of_detached(model: Any) -> Tensor:
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    shared: Tensor = model.embed.weight
    return shared


def _of_shadow(model: Any) -> Tensor:
    shadow: Tensor = model.embed.weight.detach().clone()
    model.head.weight = nn.Parameter(shadow)
    return shadow


def _of_loaded(model: Any) -> Tensor:
    shadow: Tensor = model.embed.weight.detach().clone()
    model.load_state_dict({**model.state_dict(), "head.weight": shadow}, assign=True)
    return shadow


# One of two ranks needs padding, as 9 rows and 3 columns are split unevenly.
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("share", [_of_detached, _of_shadow, _of_loaded])
@on_ranks(2)
def test_replacement_shares_memory_as_in_plain_model(share: Any, dim: int) -> None:
    twins = Twins(_Embedded(width=3), overrides={"*.weight": {"dim": dim}})

    def train(step: int) -> None:
        twins.backward(draw(_Embedded.batch, step))
        assert_same(twins.model, twins.reference)
        twins.step()

    train(0)
    shared = [share(model) for model in (twins.model, twins.reference)]
    train(1)
    with torch.no_grad():
        for tensor in shared:
            tensor.mul_(0.5).add_(1)
    train(2)
    assert_close("shared", *shared)
    copied, values = copy.deepcopy(twins.model), torch.rand(9, 3, generator=generator(0))
    copied(torch.ones(1, dtype=torch.int64))
    copied.embed.weight.data.copy_(_like(values, copied.embed.weight))
    if share is _of_detached:
        assert_close("in a copy", copied.head.weight, values)


def _like(full: Tensor, dtensor: Any) -> DTensor:
    return distribute_tensor(full, dtensor.device_mesh, dtensor.placements)


class _Wide(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.lin = nn.Linear(7, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).square().mean()


def _in_larger_buffer(local: Tensor) -> Tensor:
    return torch.cat([local, torch.ones(3, 7)])[: len(local)]


def _of_numpy(local: Tensor) -> Tensor:  # its memory cannot grow
    return torch.from_numpy(local.numpy().copy())


@pytest.mark.parametrize("rows", [9, 10])
@pytest.mark.parametrize("make", [_in_larger_buffer, _of_numpy])
@on_ranks(2)
def test_all_ranks_share_memory_or_none(make: Any, rows: int) -> None:
    twins = Twins(_Wide(rows))
    twins.train(MLP.batch, steps=1)
    old: Any = twins.model.lin.weight
    layout = {"shape": old.shape, "stride": old.stride(), "run_check": False}
    local = make(old.to_local().detach().clone())
    new = DTensor.from_local(local, old.device_mesh, old.placements, **layout)
    twins.model.lin.weight = nn.Parameter(new)
    twins.train(MLP.batch, steps=1)
    shares = new.to_local().data_ptr() == twins.model.lin.weight.to_local().data_ptr()
    assert shares == (rows == 10)
