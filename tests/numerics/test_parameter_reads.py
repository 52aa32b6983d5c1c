"""Forwards that read, list or compare parameters get the same results as in the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import graphshard
from tests import ranks
from tests.numerics.compare import Twins, assert_same, graphshard_warnings, sgd, world_mesh
from tests.ranks import on_ranks


class Reader(nn.Module):
    """Model with single, tied, listed and named parameters, and a traced or eager ``read``."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor], eager: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) / 5)
        self.linear = nn.Linear(5, 5)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.items = nn.ParameterList([nn.Parameter(torch.randn(5, 5) / 5) for _ in range(3)])
        self.named = nn.ParameterDict({name: nn.Parameter(torch.randn(5, 5) / 5) for name in "ab"})
        self.read = torch.compiler.disable(read) if eager else read

    def forward(self, x: Tensor) -> Tensor:
        y = self.read(self, x) if x.numel() else x
        return (self.linear(y) + y @ self.weight).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(4, 5, generator=rng)


def _list_slice(model: Reader, x: Tensor) -> Tensor:
    for param in model.items[1:]:
        x = x @ param
    return x


def _dict_copy(model: Reader, x: Tensor) -> Tensor:
    for param in model.named.copy().values():
        x = x @ param
    return x


def _isinstance(model: Reader, x: Tensor) -> Tensor:
    return x * (2 if isinstance(model.weight, nn.Parameter) else 3)


def _is_leaf(model: Reader, x: Tensor) -> Tensor:
    return x * (2 if model.weight.is_leaf and model.weight.grad_fn is None else 3)


def _grad_is_none(model: Reader, x: Tensor) -> Tensor:
    return x * (2 if model.weight.grad is None else 3)


def _identity(model: Reader, x: Tensor) -> Tensor:
    same = model.first.weight is model.second.weight and model.weight is model.weight
    return model.first(x) * (2 if same else 3) + model.second(x)


def _requires_grad(model: Reader, x: Tensor) -> Tensor:
    with torch.no_grad():
        requires_grad = model.weight.requires_grad
    return x * (2 if requires_grad else 3)


def _read_without_grad(model: Reader, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight, bias = model.weight, model.linear.bias
    return x @ weight + bias


def _used_without_grad(model: Reader, x: Tensor) -> Tensor:
    weight = model.weight
    with torch.no_grad():
        scale = (x @ weight).square().mean()
    return x @ weight * scale


def _attribute(model: Reader, x: Tensor) -> Tensor:
    return x @ getattr(model, "weight") + sum(m.weight.sum() for m in (model.first, model.linear))  # noqa: B009


def _attribute_of_parameter(model: Reader, x: Tensor) -> Tensor:
    gain: float = getattr(model.weight, "gain", 1.0)
    return x * gain * (2 if hasattr(model.linear.weight, "gain") else 3)


class _Doubled(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if isinstance(result, Tensor) else result


def _in_function_mode(model: Reader, x: Tensor) -> Tensor:
    with _Doubled():
        return F.linear(x, model.weight)


EVERYWHERE = {
    read.__name__.strip("_"): read
    for read in (
        _list_slice,
        _dict_copy,
        _isinstance,
        _is_leaf,
        _grad_is_none,
        _identity,
        _requires_grad,
        _read_without_grad,
        _used_without_grad,
        _attribute,
        _attribute_of_parameter,
        _in_function_mode,
    )
}


def _parameters(model: Reader, x: Tensor) -> Tensor:
    return x + 0.1 * sum(p.square().sum() for p in model.linear.parameters())


def _named_parameters(model: Reader, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    return x @ params["weight"] + torch.stack([p.norm() for p in params.values()]).sum()


def _table(model: Reader, x: Tensor) -> Tensor:
    return x @ model.linear._parameters["weight"]  # type: ignore[operator]


def _table_of_attributes(model: Reader, x: Tensor) -> Tensor:
    x = x @ vars(model.linear)["_parameters"]["weight"]
    return x + nn.Module.__getattr__(model.linear, "bias")


def _get_parameter(model: Reader, x: Tensor) -> Tensor:
    return x @ model.get_parameter("linear.weight")


def _state_dict(model: Reader, x: Tensor) -> Tensor:
    return x + sum(v.square().sum() for v in model.linear.state_dict().values()).detach()


def _type(model: Reader, x: Tensor) -> Tensor:
    return x * (2 if type(model.weight) is nn.Parameter else 3)


def _key(model: Reader, x: Tensor) -> Tensor:
    factors = {model.first.weight: 2}
    return model.first(x) * factors.get(model.second.weight, 3)


def _carried_over_a_break(model: Reader, x: Tensor) -> Tensor:
    weight = model.weight
    x = x @ weight
    torch._dynamo.graph_break()
    return x @ weight + model.weight.sum()


def _registered_after_a_break(model: Reader, x: Tensor) -> Tensor:
    named = nn.ParameterDict({"first": model.weight, "second": model.linear.weight})
    torch._dynamo.graph_break()
    return x @ named["first"] @ named["second"]


@torch.compiler.disable
def _penalty(params: list[nn.Parameter]) -> Tensor:
    kept = nn.ParameterList(p for p in params if isinstance(p, nn.Parameter) and p.is_leaf)
    return torch.stack([p.square().sum() for p in kept]).sum()


def _passed_to_an_eager_part(model: Reader, x: Tensor) -> Tensor:
    return x + _penalty([model.weight, model.linear.bias])


@torch.compiler.disable
def _factor(param: Any) -> float:
    return float(param.gain) * (2 if isinstance(param, nn.Parameter) else 3)


def _inspected_in_an_eager_part(model: Reader, x: Tensor) -> Tensor:
    x = x @ model.weight * _factor(model.weight)
    with torch.no_grad():
        weight: Any = model.weight
        torch._dynamo.graph_break()
    factor = weight.gain if isinstance(weight, nn.Parameter) else 3
    return x @ weight * factor * _factor(weight)


@torch.compiler.disable
def _double_gradients(model: Reader, param: Tensor) -> None:
    if "hook" not in vars(model):
        vars(model)["hook"] = param.register_hook(lambda grad: 2 * grad)


def _hooked_in_an_eager_part(model: Reader, x: Tensor) -> Tensor:
    _double_gradients(model, model.first.weight)
    return model.first(x) + model.second(x)


def _recomputed(model: Reader, x: Tensor) -> Tensor:
    weight = model.weight

    def run(y: Tensor) -> Tensor:
        return (y @ weight @ model.weight * (2 if weight is model.weight else 3)).relu()

    y: Tensor = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    return y @ weight


def _in_branches(model: Reader, x: Tensor) -> Tensor:
    weight = model.weight
    y: Tensor = torch.cond(
        x.sum() > 0, lambda x: x @ weight, lambda x: x @ weight @ model.first.weight, (x,)
    )
    return y @ weight


def _in_transforms(model: Reader, x: Tensor) -> Tensor:
    grad = torch.func.grad(lambda x: (x @ model.weight).square().sum())(x)
    return grad @ model.weight + torch.func.vmap(lambda row: row @ model.weight)(x)


def _compared(model: Reader, x: Tensor) -> Tensor:
    positive = model.weight > 0
    with torch.no_grad():
        count = positive.sum()
    kept = torch.func.grad(lambda x: torch.where(positive[0], x, 2 * x).square().sum())(x)
    y: Tensor = torch.utils.checkpoint.checkpoint(
        lambda x: x @ torch.where(positive, model.weight, 0.0), kept, use_reentrant=False
    )
    negative = model.weight < 0
    negative &= x.sum() > 0
    return (y + negative[0]) / count * (2 if isinstance(positive, nn.Parameter) else 3)


def _unpacked(model: Reader, x: Tensor) -> Tensor:
    first, *others = model.weight
    with torch.no_grad():
        norm = others[0].norm()
    for row in model.weight:
        x = torch.utils.checkpoint.checkpoint(lambda x, r=row: x + r.sin(), x, use_reentrant=False)
    factor = 2 if first.requires_grad and not isinstance(first, nn.Parameter) else 3
    return x * first * others[-1] / norm * factor


def _as_a_vector(model: Reader, x: Tensor) -> Tensor:
    return x + nn.utils.parameters_to_vector(model.linear.parameters()).square().sum()


TRACED = {
    read.__name__.strip("_"): read
    for read in (
        _parameters,
        _named_parameters,
        _table,
        _table_of_attributes,
        _get_parameter,
        _state_dict,
        _type,
        _key,
        _carried_over_a_break,
        _registered_after_a_break,
        _passed_to_an_eager_part,
        _inspected_in_an_eager_part,
        _hooked_in_an_eager_part,
        _recomputed,
        _in_branches,
        _in_transforms,
        _compared,
        _unpacked,
        _as_a_vector,
    )
}


NOT_ON_2_11 = {
    "state_dict": "Dynamo of torch 2.11 leaves it to Python, where parameters are DTensors",
    "type": "for Dynamo of torch 2.11 the type of a tensor without a source is not itself",
}


@pytest.mark.parametrize("read", [*EVERYWHERE, *TRACED])
def test_traced_reads_match_plain_model(read: str) -> None:
    if torch.__version__ < (2, 13) and read in NOT_ON_2_11:
        pytest.skip(NOT_ON_2_11[read])
    ranks.run(2, _train, {**EVERYWHERE, **TRACED}[read], False)


@pytest.mark.parametrize("read", EVERYWHERE)
def test_eager_reads_match_plain_model(read: str) -> None:
    ranks.run(2, _train, EVERYWHERE[read], True)


def _train(read: Callable[[Any, Tensor], Tensor], eager: bool) -> None:
    with graphshard_warnings():
        torch.manual_seed(0)
        twins = Twins(Reader(read, eager), fullgraph=False)
        for model in (twins.model, twins.reference):
            model.weight.gain = 2.0  # type: ignore[assignment]
        twins.train(Reader.batch)


def _several(model: Reader, x: Tensor) -> Tensor:
    for read in (_identity, _isinstance, _is_leaf, _attribute_of_parameter, _used_without_grad):
        x = read(model, x)
    model.weight.grad = None
    return x


def _across_breaks(model: Reader, x: Tensor) -> Tensor:
    for read in (_registered_after_a_break, _passed_to_an_eager_part, _inspected_in_an_eager_part):
        x = read(model, x)
    return x


@pytest.mark.parametrize("read", [_several, _across_breaks])
@on_ranks(2)
def test_traced_reads_of_other_dim_match_plain_model(
    read: Callable[[Reader, Tensor], Tensor],
) -> None:
    overrides = {"*weight": {"dim": 1}}
    twins = Twins(Reader(read, False), fullgraph=read is _several, overrides=overrides)
    for step in range(2):
        for model in (twins.model, twins.reference):
            model.weight.gain = 2.0
        twins.backward([Reader.batch(torch.Generator().manual_seed(step))] * 2)
        assert_same(twins.model, twins.reference)


@on_ranks(2)
def test_traced_read_of_grad_sees_accumulation() -> None:
    torch.manual_seed(0)
    twins = Twins(Reader(_grad_is_none, False), fullgraph=False)
    for step in range(3):
        twins.backward([Reader.batch(torch.Generator().manual_seed(step))] * 2)
        twins.check()


@pytest.mark.parametrize("eager", [False, True])
@on_ranks(2)
def test_attributes_of_parameters_may_change_between_steps(eager: bool) -> None:
    torch.manual_seed(0)
    twins = Twins(Reader(_attribute_of_parameter, eager), fullgraph=False)
    for gain in (None, 2.0, 3.0):
        for model in (twins.model, twins.reference):
            if gain is not None:
                model.weight.gain = model.linear.weight.gain = gain
            model.double().float()
        twins.backward([Reader.batch(torch.Generator().manual_seed(0))] * 2)
        twins.check()


def _clamp_all(model: Reader) -> None:
    for param in model.parameters():
        param.clamp_(-0.1, 0.1)


def _clamp_attribute(model: Reader) -> None:
    for module in (model, model.linear):
        module.weight.clamp_(-0.1, 0.1)  # type: ignore[operator]


def _clamp_data(model: Reader) -> None:
    for module in (model, model.linear):
        module.weight.data.clamp_(-0.1, 0.1)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("clamp", [_clamp_all, _clamp_attribute, _clamp_data])
@on_ranks(2)
def test_other_backends_see_shards(clamp: Callable[[Reader], None], dim: int) -> None:
    model = Reader(_attribute, False)
    graphshard.shard(model, world_mesh(), overrides={"*weight": {"dim": dim}})
    torch.compile(torch.no_grad()(clamp), backend="eager")(model)
    for weight in (model.weight, model.linear.weight):
        assert weight.full_tensor().abs().max() <= 0.1  # type: ignore[operator]


@on_ranks(2)
def test_freezing_between_steps_switches_branch() -> None:
    torch.manual_seed(0)
    twins = Twins(Reader(_requires_grad, False), fullgraph=False)
    for step, requires_grad in enumerate([True, False, True]):
        for model in (twins.model, twins.reference):
            model.weight.requires_grad_(requires_grad)
            sgd(model).zero_grad()
        twins.backward([Reader.batch(torch.Generator().manual_seed(step))] * 2)
        twins.check()
