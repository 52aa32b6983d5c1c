"""Targets of `torch.compile`: models, their parts, functions, and whole training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import graphshard
from graphshard.dynamo_backend import _backend_for
from tests import ranks
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_plain,
    assert_same,
    assert_sharded,
    compile_sharded,
    draw,
    num_graphs,
    world_mesh,
)
from tests.ranks import on_ranks


@on_ranks(2)
def test_first_step_shards_in_one_graph() -> None:
    twins = Twins(MLP())
    twins.backward(draw(MLP.batch, 0))  # with fullgraph=True
    assert_sharded(twins.model)
    assert num_graphs() == 1
    assert [plan.graph for plan in twins.backend.plans] == ["forward", "backward"]


# Ways for a function to access its model: each returns a function to compile.


def _closure(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda batch: model(batch) * 2.0


class _Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch)


def _method(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return _Trainer(model).loss


def _default_argument(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(batch: Tensor, model: nn.Module = model) -> Tensor:
        return model(batch)

    return loss


def _in_containers(model: nn.Module) -> Callable[[Tensor], Tensor]:
    models = {"models": [None, model]}
    return lambda batch: models["models"][1](batch)


def _of_parts(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model.down(torch.tanh(model.mid(model.up(x)))).square().mean()


def _of_parameters(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (x @ model.up.weight.t() + model.up.bias).square().mean()


_models: list[nn.Module] = []


def _global(model: nn.Module) -> Callable[[Tensor], Tensor]:
    _models.append(model)
    index = len(_models) - 1
    return lambda batch: _models[index](batch)


def _bound_forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model.forward


WAYS = [
    _closure,
    _method,
    _default_argument,
    _in_containers,
    _of_parts,
    _of_parameters,
    _global,
    _bound_forward,
]


@pytest.mark.parametrize("function", WAYS)
@on_ranks(2)
def test_function_that_uses_model_trains(function: Callable[[nn.Module], Any]) -> None:
    Twins(MLP(), function=function).train(MLP.batch)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3)


def _of_two_models(pair: nn.Module) -> Callable[[Tensor], Tensor]:
    first, second = pair.first, pair.second
    return lambda x: second(first(x).relu()).square().mean()


class _TiedPair(_Pair):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(7, 5, bias=False)
        self.second.weight = self.first.weight


def _of_two_tied_models(pair: nn.Module) -> Callable[[Tensor], Tensor]:
    first, second = pair.first, pair.second
    return lambda x: second(first(x).relu() @ second.weight).square().mean()


@pytest.mark.parametrize(
    ("kind", "function"), [(_Pair, _of_two_models), (_TiedPair, _of_two_tied_models)]
)
@on_ranks(2)
def test_two_models_train_in_one_graph(
    kind: type[nn.Module], function: Callable[[nn.Module], Any]
) -> None:
    twins = Twins(kind(), function=function)
    twins.train(MLP.batch)
    assert num_graphs() == 1


@on_ranks(2)
def test_targets_without_parameters_are_compiled() -> None:
    assert compile_sharded(nn.Flatten(0))(torch.ones(2, 2)).shape == (4,)
    assert compile_sharded(lambda x: (x * 2).sum())(torch.ones(3)) == 6


@on_ranks(2)
def test_two_models_share_a_backend() -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    models = [MLP(), nn.Linear(7, 3)]
    for model in models:
        torch.compile(model, backend=backend)(torch.ones(5, 7)).sum().backward()
        assert_sharded(model)
    assert [plan.graph for plan in backend.plans] == ["forward", "backward"] * 2
    assert {param.fqn for param in backend.plans[2].params} == {"weight", "bias"}


class _Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = MLP()
        self.teacher = MLP()


@on_ranks(2)
def test_only_compiled_part_of_model_is_sharded() -> None:
    outer = _Student()
    names = list(outer.state_dict())
    twins = Twins(outer.student)
    twins.train(MLP.batch)
    assert_sharded(outer.student)
    assert_plain(outer.teacher)
    assert list(outer.state_dict()) == names


@on_ranks(2)
def test_part_may_be_sharded_before_whole_model() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    reference = copy.deepcopy(model)
    part, plain = compile_sharded(model[0]), reference[0]
    xs = draw(MLP.batch, 0)
    part(xs[dist.get_rank()]).sum().backward()
    (sum(plain(x).sum() for x in xs) / 2).backward()
    assert_sharded(model[0])
    assert_plain(model[2])
    twins = Twins(model, reference)
    twins.backward(xs, loss=lambda m, x: m(x).square().mean())
    twins.check()


@on_ranks(2)
def test_model_compiled_twice_continues_training() -> None:
    model = MLP()
    twins = Twins(model)
    twins.train(MLP.batch, steps=1)
    twins.compiled = compile_sharded(model)
    twins.train(MLP.batch, steps=2)


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Linear(7, 5)
        self.narrow = nn.Sequential(encoder, nn.Linear(5, 3))
        self.wide = nn.Sequential(encoder, nn.Linear(5, 9))


@on_ranks(2)
def test_two_compiled_models_share_a_part() -> None:
    both = _Autoencoder()
    twins = Twins(both)
    compiled = [compile_sharded(both.narrow), compile_sharded(both.wide)]
    xs = draw(MLP.batch, 0)
    for _ in range(2):
        for name, model in zip(("narrow", "wide"), compiled):
            model(xs[dist.get_rank()]).square().mean().backward()
            plain = getattr(twins.reference, name)
            torch.stack([plain(x).square().mean() for x in xs]).mean().backward()
        twins.check()
        twins.zero_grad()
    assert both.narrow[0].weight is both.wide[0].weight


@on_ranks(2)
def test_default_mesh_is_world() -> None:
    model = MLP()
    loss = torch.compile(model, backend=graphshard.backend(compiler="aot_eager"))
    loss(torch.ones(5, 7)).backward()
    assert_sharded(model)
    assert model.up.weight.device_mesh == world_mesh()


@pytest.mark.parametrize("fullgraph", [True, False])
@on_ranks(2)
def test_model_compile_keeps_names_and_trains(fullgraph: bool) -> None:
    model = MLP()
    twins = Twins(model)
    names = list(model.state_dict())
    model.compile(backend=twins.backend, fullgraph=fullgraph)
    twins.compiled = model
    twins.train(MLP.batch)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


@on_ranks(2)
def test_sequential_compiled_in_place_trains() -> None:
    """Compile a Sequential in place: Dynamo skips torch's own classes, but not their callees."""
    model = nn.Sequential(nn.Linear(7, 5), _Block(), nn.Linear(5, 3))
    twins = Twins(model)
    model.compile(backend=twins.backend)
    twins.compiled = model
    twins.train(MLP.batch, loss=lambda m, x: m(x).square().mean())


def _by_name(options: dict[str, Any]) -> None:
    model = MLP()
    twins = Twins(model)
    twins.compiled = torch.compile(model, backend="graphshard", fullgraph=True, options=options)
    twins.train(MLP.batch)


def test_backends_by_name_are_shared_if_their_options_are_equal() -> None:
    shared = _backend_for({"offload_policy": CPUOffloadPolicy(), "mesh": None})
    assert _backend_for({"mesh": None, "offload_policy": CPUOffloadPolicy()}) is shared
    zero3, zero2 = (_backend_for({"reshard_after_forward": value}) for value in (True, 1))
    assert zero3 is not zero2 and repr(zero3) != repr(zero2)


def test_backend_by_name_trains() -> None:
    ranks.run(2, _by_name, {"compiler": "aot_eager"})
    ranks.run(2, _by_name, {"compiler": "aot_eager", "reshard_after_forward": False})


class _Targets(CustomGraphPass):
    """User-defined pass that records the operators of each graph."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append({str(node.target) for node in graph.nodes})

    def uuid(self) -> None:
        return None


@on_ranks(2)
def test_options_of_torch_compile_reach_inductor() -> None:
    model = nn.Linear(7, 3)
    twins = Twins(model)
    backend = graphshard.backend(twins.mesh)
    targets = _Targets()
    options = {"max_fusion_size": 2, "post_grad_custom_post_pass": targets}
    twins.compiled = torch.compile(model, backend=backend, options=options)
    twins.train(MLP.batch, steps=1, loss=lambda m, x: m(x).square().mean())
    assert len(targets.seen) == 2  # forward and backward, with their collectives
    assert all("_c10d_functional.wait_tensor.default" in seen for seen in targets.seen)


@on_ranks(2)
def test_shard_of_compiled_module_shards_the_module_itself() -> None:
    model, mesh = MLP(), world_mesh()
    compiled = torch.compile(model, backend=graphshard.backend(mesh, compiler="aot_eager"))
    name = next(name for name, _ in model.named_parameters())
    overrides = {name: {"shard": False}}  # a name without the prefix of ``torch.compile``
    assert graphshard.shard(compiled, mesh, overrides=overrides) is compiled
    sharded = {n for n, p in model.named_parameters() if p.placements[0].is_shard()}
    assert sharded == {n for n, _ in model.named_parameters()} - {name}


# Regional compilation.


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


@on_ranks(2)
def test_blocks_compiled_separately_share_graphs() -> None:
    """Compile three equal blocks separately, with one graph for the first, one for the rest."""
    model = nn.Sequential(*(_Layer() for _ in range(3)))
    plain = copy.deepcopy(model)
    twins = Twins(graphshard.shard(model, world_mesh()), plain)
    for block in model:
        block.compile(backend=twins.backend, fullgraph=True)
    twins.compiled = model
    twins.train(MLP.batch, loss=lambda m, x: m(x).square().mean())
    assert num_graphs() <= 2


# A whole step in one compiled function.


def _step_of(model: nn.Module, optimizer: Optimizer, num_ranks: int) -> Callable[..., Tensor]:
    """Return a training step of two microbatches, each of ``num_ranks`` batches."""

    def step(first: list[Tensor], second: list[Tensor]) -> Tensor:
        optimizer.zero_grad()
        if isinstance(next(model.parameters()), DTensor):
            with graphshard.no_sync(model):
                model(first[0]).backward()
        else:
            for batch in first:
                (model(batch) / num_ranks).backward()
        loss = sum(model(batch) for batch in second) / num_ranks
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return step


@on_ranks(2)
def test_compiled_training_step_matches_plain_step() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    ours = _step_of(model, torch.optim.AdamW(model.parameters(), 0.01), 1)
    theirs = _step_of(reference, torch.optim.AdamW(reference.parameters(), 0.01), 2)
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    compiled, rank = torch.compile(ours, backend=backend), dist.get_rank()

    for step in range(2):
        first, second = draw(MLP.batch, 2 * step), draw(MLP.batch, 2 * step + 1)
        compiled(first[rank : rank + 1], second[rank : rank + 1])
        theirs(first, second)
        assert_sharded(model)
        assert_same(model, reference)
