from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphshard
from graphshard.params import shard
from tests import ranks
from tests.models import GPT, MLP, Trainable
from tests.numerics.compare import (
    Twins,
    assert_close,
    assert_same,
    assert_sharded,
    draw,
    full_values,
    generator,
    graphshard_warnings,
    sgd,
    step_all,
    whole,
    world_mesh,
)
from tests.numerics.test_calls import Checkpointed
from tests.numerics.test_parameters import Reused
from tests.ranks import on_ranks


def _sharded(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    plain = copy.deepcopy(model)
    assert graphshard.shard(model, world_mesh()) is model
    assert_sharded(model)
    assert_same(model, plain)
    return model, plain


@on_ranks(2)
def test_sharding_twice_changes_nothing() -> None:
    model, plain = _sharded(MLP())
    params = list(model.parameters())
    graphshard.shard(model, world_mesh())
    assert all(mine is param for mine, param in zip(model.parameters(), params))
    Twins(model, plain).train(MLP.batch)


@on_ranks(2)
def test_backend_warns_if_shard_had_other_arguments() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16)
    for given, asked, all_rows, told in [
        ({}, {"mp_policy": policy}, (2, 3), 1),  # each number of rows compiles a graph
        ({"mp_policy": policy}, {"mp_policy": policy}, (2,), 0),
        ({"mp_policy": policy}, {}, (2,), 0),
        ({}, {"reshard_after_forward": False, "compiler": "aot_eager"}, (2,), 1),
    ]:
        model = graphshard.shard(MLP(), world_mesh(), **given)
        backend = graphshard.backend(world_mesh(), **{"compiler": "aot_eager", **asked})
        with graphshard_warnings() as texts:
            for rows in all_rows:
                torch.compile(model, backend=backend)(draw(MLP.batch, 0)[0][:rows])
        assert len(texts) == told
        assert all(f"{next(iter(asked))}=" in text for text in texts)


class _Initialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.linear = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.empty(()))
        self.tied = nn.Linear(7, 11, bias=False)
        self.tied.weight = self.embed.weight
        self.register_buffer("offset", torch.empty(5))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)
        self.offset.fill_(2.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return self.tied(x).square().mean() + (self.linear(x) * self.scale + self.offset).mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(11, (3, 4), generator=rng)


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@on_ranks(2)
def test_meta_device_model_is_initialized_and_trains() -> None:
    with torch.device("meta"):
        model = _Initialised()
    graphshard.shard(model, world_mesh())
    assert_sharded(model)
    assert all(param.is_meta for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model.to_empty(device="cpu")
    _initialize(model)
    assert model.tied.weight is model.embed.weight
    reference = _Initialised()
    reference.load_state_dict(full_values(model))
    plain = torch.optim.AdamW(reference.parameters(), 1e-2)
    twins = Twins(model, reference)
    for step in range(3):
        twins.backward(draw(_Initialised.batch, step))
        twins.check()
        step_all(optimizer, plain)


def _by_element(name: str, param: DTensor) -> None:
    param.fill_(len(name)).sqrt_()


def _aware_of_dtensors(name: str, param: DTensor) -> None:
    whole = torch.randn(param.shape, generator=generator(len(name), *param.shape))
    given = param.device_mesh, param.placements
    param.copy_(distribute_tensor(whole, *given, src_data_rank=None))


def _initialized(shape: tuple[int, ...]) -> list[dict[str, Tensor]]:
    found = []
    for initialize in (_by_element, _aware_of_dtensors):
        with torch.device("meta"):
            model = GPT()
        graphshard.shard(model, init_device_mesh("cpu", shape))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, param in model.named_parameters():
                initialize(name, param)
        found.append({name: whole(param) for name, param in model.named_parameters()})
    return found


def test_initial_values_do_not_depend_on_number_of_ranks() -> None:
    expected = ranks.run(1, _initialized, (1,))[0]
    for values in expected:
        assert len({float(value.sum()) for value in values.values()}) > 3
    for shape in ((3,), (2, 2)):
        for found in ranks.run(math.prod(shape), _initialized, shape):
            for values, alone in zip(found, expected, strict=True):
                assert values.keys() == alone.keys()
                for name, value in values.items():
                    assert torch.equal(value, alone[name]), name


@on_ranks(4)
def test_meta_device_model_holds_only_shards() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1001, 999), nn.Linear(999, 3))
    graphshard.shard(model, world_mesh())
    model.to_empty(device="cpu")
    _initialize(model)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        rows, world = param.shape[0], dist.get_world_size()
        padded = -(-rows // world) * param[0].numel() if param.dim() > 1 else -(-rows // world)
        held = param.to_local().untyped_storage().nbytes()
        assert held <= padded * param.element_size()


@on_ranks(2)
def test_full_parameters_are_freed() -> None:
    model = MLP()
    old = list(model.parameters())
    graphshard.shard(model, world_mesh())
    with torch._C.DisableTorchFunction():
        assert all(param.untyped_storage().nbytes() == 0 for param in old)


@pytest.mark.parametrize("at_first_call", [False, True])
@pytest.mark.parametrize("step", ["_shard_parameter", "_repoint_optimizers"])
@on_ranks(2)
def test_model_whose_sharding_was_interrupted_is_refused(at_first_call: bool, step: str) -> None:
    model, backend = MLP(), graphshard.backend(world_mesh(), compiler="aot_eager")
    x = MLP.batch(generator(0))
    compiled = torch.compile(model, backend=backend)
    act = getattr(shard, step)
    calls: list[None] = []

    def interrupted(*args: Any) -> Any:
        calls.append(None)
        if step != "_shard_parameter" or len(calls) == 3:
            raise KeyboardInterrupt
        return act(*args)

    again: list[Callable[[], object]] = [lambda: graphshard.shard(model, world_mesh())]
    again.insert(0 if at_first_call else 1, lambda: compiled(x))
    with mock.patch.object(shard, step, interrupted), pytest.raises(KeyboardInterrupt):
        again[0]()
    uses = [lambda: graphshard.full_state_dict(model), model.state_dict, lambda: model(x)]
    for use in [*again, *uses]:
        with pytest.raises((RuntimeError, ValueError), match=r"interrupted.*build the model again"):
            use()
    _sharded(MLP())


@on_ranks(2)
def test_interrupt_before_the_first_parameter_loses_nothing() -> None:
    model = MLP()
    with (
        mock.patch.object(shard, "_shard_parameter", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        graphshard.shard(model, world_mesh())
    Twins(*_sharded(model)).train(MLP.batch, steps=1)


# Changes between steps, made to a sharded model and to its unsharded copy.


def _to_double(model: nn.Module) -> None:
    model.to(torch.float64)


def _to_half_and_back(model: nn.Module) -> None:
    model.bfloat16().float()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _load_assign(model: nn.Module) -> None:
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _load_in_place_of_zeros(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)


def _empty_and_load(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def _change_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5).add_(0.1)


@pytest.mark.parametrize(
    ("change", "kind", "compiled_before"),
    [
        (_to_double, MLP, False),
        (_to_double, Reused, True),
        (_to_half_and_back, Reused, True),
        (_load, MLP, False),
        (_load_assign, Reused, True),
        (_load_in_place_of_zeros, MLP, False),
        (_empty_and_load, Reused, True),
        (_change_in_place, Reused, True),
    ],
)
@on_ranks(2)
def test_sharded_model_trains_after_change(
    change: Callable[[nn.Module], None], kind: Trainable, compiled_before: bool
) -> None:
    twins = Twins(*_sharded(kind()))
    if compiled_before:
        twins.train(kind.batch, steps=1)
    for model in (twins.model, twins.reference):
        change(model)
    assert_sharded(twins.model)
    dtype = next(twins.reference.parameters()).dtype

    def batch(rng: torch.Generator) -> Tensor:
        drawn = kind.batch(rng)
        return drawn.to(dtype) if drawn.is_floating_point() else drawn

    twins.train(batch, steps=2)


@on_ranks(2)
def test_optimizer_survives_loading() -> None:
    twins = Twins(*_sharded(MLP()))
    optimizers = [sgd(twins.model), sgd(twins.reference)]
    for model in (twins.model, twins.reference):
        _load(model)
    for step in range(2):
        twins.backward(draw(MLP.batch, step))
        twins.check()
        step_all(*optimizers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overrides": {"down.*": {"reshard_after_forward": False}}},
        {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)},
    ],
)
@on_ranks(2)
def test_replaced_module_is_sharded_at_next_step(options: dict[str, Any]) -> None:
    twins = Twins(MLP(), **options)
    twins.train(MLP.batch, steps=1)
    new = nn.Linear(7, 13)
    twins.reference.up = copy.deepcopy(new)
    twins.model.up = new
    twins.train(MLP.batch, steps=2)


# Calls without graphshard's backend.


@pytest.mark.parametrize("kind", [GPT, Reused, Checkpointed])
@pytest.mark.parametrize("no_grad", [True, False])
@on_ranks(2)
def test_call_without_torch_compile_matches_plain_model(kind: Trainable, no_grad: bool) -> None:
    model, plain = _sharded(kind())
    xs = draw(kind.batch, 0)
    with torch.set_grad_enabled(not no_grad):
        loss = model(xs[dist.get_rank()])
        losses = torch.stack([plain(x) for x in xs])
    assert_close("loss", loss, losses[dist.get_rank()])
    if not no_grad:
        loss.backward()
        losses.mean().backward()
        assert_same(model, plain)


@on_ranks(2)
def test_sharded_model_trains_with_another_backend() -> None:
    model, plain = _sharded(MLP())
    xs = draw(MLP.batch, 0)
    torch.compile(model, backend="aot_eager")(xs[dist.get_rank()]).backward()
    torch.stack([plain(x) for x in xs]).mean().backward()
    assert_same(model, plain)


class _Reading(nn.Module):
    def __init__(self, part: nn.Linear) -> None:
        super().__init__()
        self.part, self.own = part, nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.own(x), self.part.weight).square().mean()


@pytest.mark.parametrize("copied", [True, False])
@on_ranks(2)
def test_eager_model_reads_module_of_another_model(copied: bool) -> None:
    models = [_Reading(part := nn.Linear(7, 5)), _Reading(part)]
    plain = copy.deepcopy(models)
    for model in models:
        graphshard.shard(model, world_mesh())
    if copied:
        models[0].part, plain[0].part = map(copy.deepcopy, (models[1].part, plain[1].part))
    xs = draw(MLP.batch, 0)
    for model, other in zip(models, plain):
        model(xs[dist.get_rank()]).backward()
        torch.stack([other(x) for x in xs]).mean().backward()
        assert_same(model, other)


# Errors.


def _replace_parameter(model: Any) -> None:
    model.up.weight = nn.Parameter(torch.zeros(13, 7))


def _replace_in_dict(model: Any) -> None:
    model.up._parameters["weight"] = nn.Parameter(torch.zeros(13, 7))


def _load_other_layout(model: Any) -> None:
    state = model.state_dict()
    state["up.weight"] = state["up.weight"].redistribute(placements=[Shard(1)])
    model.load_state_dict(state, assign=True)


REPLACED = [_replace_parameter, _replace_in_dict, _load_other_layout]


@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("compiled_before", [True, False])
@on_ranks(2)
def test_replaced_parameter_raises(replace: Callable[[Any], None], compiled_before: bool) -> None:
    twins = Twins(*_sharded(MLP()))
    if compiled_before:
        twins.train(MLP.batch, steps=1)
    x = MLP.batch(generator(0))
    with pytest.raises((ValueError, RuntimeError), match=r"up\.weight") as caught:
        replace(twins.model)
        twins.compiled(x)
    assert "replaced" in str(caught.value)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@on_ranks(2)
def test_parameter_made_from_sharded_one_is_refused(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    model = graphshard.shard(MLP(), mesh)
    nn.utils.parametrizations.weight_norm(model.up)
    with pytest.raises(RuntimeError, match=r"'up.*original0'.*make it before sharding"):
        graphshard.shard(model, mesh)
