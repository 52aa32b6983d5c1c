"""Initial values of a sharded model, copies of it, and its old parameter objects."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import graphshard
from tests import ranks
from tests.models import GPT, MLP
from tests.numerics.compare import (
    Twins,
    assert_close,
    assert_plain,
    compile_sharded,
    draw,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks


class _Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.flags = nn.Parameter(torch.rand(5) > 0.5, requires_grad=False)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
        self.register_buffer("strided", torch.randn(4, 6)[:, ::2])
        self.register_buffer("empty", torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scalar + self.low.float() * self.flags
        return (y @ self.transposed.t()).square().mean() + self.strided.sum() * self.mask.sum()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(4, 7, generator=rng)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor) for name, tensor in named.items()}


Shard = Callable[[nn.Module], object]


def _by_first_step(model: nn.Module, **options: bool) -> None:
    compile_sharded(model, **options)(torch.ones(4, 7))


def _by_shard(model: nn.Module, **options: bool) -> None:
    graphshard.shard(model, world_mesh(), **options)


def _broadcast(shard: Shard) -> None:
    torch.manual_seed(dist.get_rank())
    model = _Odds()
    torch.manual_seed(0)
    of_first_rank = _tensors(_Odds())
    shard(model)
    tensors = _tensors(model)
    assert tensors.keys() == of_first_rank.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, of_first_rank[name]), name
    assert model.strided.shape == (4, 3)


@pytest.mark.parametrize("shard", [_by_first_step, _by_shard])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_start_from_values_of_first_rank(shard: Shard, world_size: int) -> None:
    ranks.run(world_size, _broadcast, shard)


@pytest.mark.parametrize("shard", [_by_first_step, _by_shard])
@on_ranks(2)
def test_without_sync_module_states_ranks_keep_their_values(shard: Callable[..., object]) -> None:
    torch.manual_seed(dist.get_rank())
    model = _Odds()
    own = _tensors(model)
    shard(model, sync_module_states=False)
    for name, param in model.named_parameters():
        if param.dim():
            rows = torch.arange(param.shape[0]).chunk(2)[dist.get_rank()]
            assert torch.equal(param.to_local(), own[name][rows]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, own[name]), name


@pytest.mark.parametrize("seed_by_rank", [False, True])
@on_ranks(2)
def test_values_used_before_sharding_must_be_equal(seed_by_rank: bool) -> None:
    # The eager part runs before the first graph, when graphshard has not seen the model yet.
    torch.manual_seed(dist.get_rank() if seed_by_rank else 0)
    model = MLP()
    before = _tensors(model)
    eager = torch.compiler.disable(lambda x: torch.tanh(model.mid(model.up(x))))
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    compiled = torch.compile(lambda x: model.down(eager(x)).sum(), backend=backend)
    if not seed_by_rank:
        compiled(torch.ones(5, 7)).backward()
        return
    with pytest.raises(ValueError, match=r"'.*' of rank 1 .*use the same seed on all ranks"):
        compiled(torch.ones(5, 7))
    assert_plain(model)
    after = _tensors(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


@on_ranks(2)
def test_expanded_buffer_is_broadcast() -> None:
    model = MLP()
    model.register_buffer("expanded", torch.full((1,), float(dist.get_rank())).expand(6))
    _by_shard(model)
    assert torch.equal(model.expanded, torch.zeros(6))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, AveragedModel])
@on_ranks(2)
def test_ema_copy_from_before_sharding_stays_plain(
    copy_of: Callable[[nn.Module], nn.Module],
) -> None:
    model = MLP()
    average = copy_of(model)
    before = _tensors(average)
    twins = Twins(model)
    twins.train(MLP.batch, steps=1)
    assert_plain(average)
    assert all(torch.equal(value, before[name]) for name, value in _tensors(average).items())
    average(torch.ones(5, 7)).backward()
    for mean, param in zip(average.parameters(), model.parameters()):
        mean.data.lerp_(param.full_tensor(), 1.0)
    for mean, param in zip(average.parameters(), twins.reference.parameters()):
        assert_close("average", mean, param)


@on_ranks(2)
def test_copy_of_sharded_model_keeps_tied_weights() -> None:
    twins = Twins(GPT())
    twins.train(GPT.batch, steps=1)
    clone = copy.deepcopy(twins.model)
    assert clone.head.weight is clone.tokens.weight
    assert clone.head.weight is not twins.model.head.weight
    Twins(clone, copy.deepcopy(twins.reference)).train(GPT.batch, steps=2)


@on_ranks(2)
def test_gradients_from_before_the_first_step_are_kept() -> None:
    twins = Twins(MLP())
    xs = draw(MLP.batch, 7)
    twins.model(xs[dist.get_rank()]).backward()
    torch.stack([twins.reference(x) for x in xs]).mean().backward()
    twins.backward(draw(MLP.batch, 0))
    twins.check()


def _read_grad(params: list[nn.Parameter]) -> object:
    return params[0].grad


def _compute(params: list[nn.Parameter]) -> object:
    return params[0] * 2


def _clip(params: list[nn.Parameter]) -> object:
    return nn.utils.clip_grad_norm_(params, 1.0)


@pytest.mark.parametrize("use", [_read_grad, _compute, _clip])
@on_ranks(2)
def test_use_of_old_parameter_objects_raises(use: Callable[[list[nn.Parameter]], object]) -> None:
    model = MLP()
    old = list(model.parameters())
    compile_sharded(model)(torch.ones(5, 7)).backward()
    with pytest.raises(RuntimeError, match=r"call model\.parameters\(\) again"):
        use(old)
