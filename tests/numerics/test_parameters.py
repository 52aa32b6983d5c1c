from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from tests import ranks
from tests.models import MLP, Trainable
from tests.numerics.compare import (
    Twins,
    assert_close,
    compile_sharded,
    draw,
    graphshard_warnings,
    num_graphs,
    sgd,
    train,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks


def _rows(rng: torch.Generator) -> Tensor:
    return torch.randn(4, 6, generator=rng)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one_row = nn.Parameter(torch.randn(1, 6))
        self.three = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.hollow = nn.Parameter(torch.zeros(5, 0))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.one_row * self.scalar + self.three.sum() + self.empty.sum()
        return (y.square().mean() + self.hollow.sum()) * self.scalar.exp()

    batch = staticmethod(_rows)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter((torch.randn(6, 8) / 6).t())
        self.sliced = nn.Parameter((torch.randn(7, 12) / 12)[:, ::2])
        self.flipped = nn.Parameter((torch.randn(4, 3, 5) / 60).permute(2, 0, 1))
        conv = nn.Conv2d(1, 5, 3)
        self.conv = conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.transposed.t() @ self.transposed + self.flipped.sum()
        return self.conv((y @ self.sliced.t())[None, None]).square().mean()

    batch = staticmethod(_rows)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x)))).square().mean()

    batch = staticmethod(_rows)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.index = nn.Parameter(torch.randint(0, 6, (5,)), requires_grad=False)
        self.small = nn.Parameter(torch.randint(-3, 3, (6,), dtype=torch.int8), requires_grad=False)
        self.short = nn.Parameter(torch.randint(3, (7, 2), dtype=torch.int16), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(6) > 0.3, requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("offsets", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.small + self.offsets + self.short.sum()
        y = torch.where(self.flags & self.flag, y, y * 0.5).masked_fill(self.mask, 0.25)
        return y[:, self.index].square().mean() * 1e-3

    batch = staticmethod(_rows)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(6, 6)
        self.upper = nn.Linear(6, 5).double()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.upper(self.lower(x).double()) * self.scale).square().mean()

    batch = staticmethod(_rows)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.linear = nn.Linear(6, 6)
        self.teacher = nn.Linear(6, 6)
        self.stopped = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.linear(x) * self.stopped.detach(), target)

    batch = staticmethod(_rows)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.linear = nn.Linear(6, 6)
        self.again = self.linear
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.linear.weight
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + torch.tanh(self.linear(x))
        x = self.tied(self.again(x)) @ self.linear.weight
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(9, (3, 5), generator=rng)


class EqualGradients(nn.Module):
    """Model in which the gradients of all parameters are one graph value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6))
        self.second = nn.Parameter(torch.randn(6))
        self.third = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.first + self.second + self.third).square().mean()

    batch = staticmethod(_rows)


class TwoViews(nn.Module):
    """Model whose operators combine views of one parameter, made by one or more view ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.cat([self.weight[:4].t(), self.weight[4:].t()], 1)
        mixed = self.weight.t() @ self.weight.view(4, 2, 6)[:, 1].repeat(2, 1)
        return (x @ mixed @ turned).square().mean()

    batch = staticmethod(_rows)


@pytest.mark.parametrize("kind", [Frozen, Unused, Reused, EqualGradients, TwoViews])
def test_model_with_unusual_parameters_trains(kind: Trainable) -> None:
    ranks.run(2, train, kind)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Tiny(), Strided(), Whole(), Mixed()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).double() for part in self.parts]).sum()

    batch = staticmethod(_rows)


# On four ranks, more of the parameters have fewer rows than ranks.
@pytest.mark.parametrize(("world_size", "compiler"), [(4, "aot_eager"), (2, "inductor")])
def test_unusual_parameters_train_in_one_graph(world_size: int, compiler: str) -> None:
    ranks.run(world_size, train, Unusual, compiler=compiler, steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_half_precision_gradients_match_unsharded_copy(dtype: torch.dtype) -> None:
    twins = Twins(MLP().to(dtype))
    twins.backward([x.to(dtype) for x in draw(MLP.batch, 0)])
    for name, param in twins.reference.named_parameters():
        ours = dict(twins.model.named_parameters())[name].grad
        assert_close(name, ours, param.grad, tolerance=float(torch.finfo(dtype).eps) * 4)


@on_ranks(2)
def test_equal_gradients_do_not_share_memory() -> None:
    twins = Twins(EqualGradients())
    twins.backward(draw(_rows, 0))
    for model in (twins.model, twins.reference):
        model.first.grad.mul_(2)
    twins.check()
    twins.backward(draw(_rows, 1))
    twins.check()


@on_ranks(2)
def test_tied_weights_stay_one_parameter() -> None:
    twins = Twins(Reused())
    twins.train(Reused.batch, steps=1)
    model: Any = twins.model
    assert model.tied.weight is model.linear.weight is model.again.weight
    assert model.head.weight is model.embed.weight
    assert model.again is model.linear


@on_ranks(2)
def test_requires_grad_changes_between_steps() -> None:
    twins = Twins(MLP())
    seen = []
    for step in range(8):
        for model in (twins.model, twins.reference):
            model.up.weight.requires_grad_(step % 2 == 0)
            model.down.requires_grad_(step % 4 < 2)
        twins.backward(draw(MLP.batch, step))
        twins.check()
        twins.zero_grad()
        seen.append(num_graphs())
    assert seen[:4] == [1, 2, 3, 4] and seen[4:] == [4] * 4, seen


class Freezing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.up.requires_grad_(False)
        return super().forward(x)


@on_ranks(2)
def test_forward_freezes_module() -> None:
    twins = Twins(Freezing(), fullgraph=False)
    for step in range(2):
        with graphshard_warnings():
            twins.backward(draw(MLP.batch, step))
        twins.check()
    assert twins.model.up.weight.grad is None


@pytest.mark.parametrize("eager", [False, True])
@on_ranks(2)
def test_backward_follows_requires_grad(eager: bool) -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    batches, rank = [draw(MLP.batch, step) for step in range(4)], torch.distributed.get_rank()
    ours = twins.model if eager else twins.compiled
    for model, call in (
        (twins.model, lambda xs: ours(xs[rank])),
        (twins.reference, lambda xs: torch.stack([*map(twins.plain, xs)]).mean()),
    ):
        # As a GAN trains its generator between the discriminator's forward and backward.
        loss, again = call(batches[0]), call(batches[0])
        model.requires_grad_(False)
        inputs = [x.clone().requires_grad_() for x in batches[1]]
        of_inputs = call(inputs)
        model.requires_grad_(True)
        loss.backward()
        of_inputs.backward()
        assert inputs[rank].grad is not None
        model.requires_grad_(False)
        call(batches[1])
        model.requires_grad_(True)
        again.backward(inputs=[model.up.weight])
        loss = call(batches[2])
        model.up.requires_grad_(False)
        loss.backward()
        with graphshard.no_sync(model):
            loss = call(batches[3])
        model.mid.requires_grad_(False)
        loss.backward()
        model.requires_grad_(True)
        with graphshard.no_sync(model):
            call(batches[1]).backward()
        call(batches[0]).backward()
    twins.check()


@on_ranks(2)
def test_unfrozen_parameters_are_trained() -> None:
    twins = Twins(Frozen())
    twins.train(Frozen.batch, steps=1)
    for model in (twins.model, twins.reference):
        model.requires_grad_(True)
    twins.train(Frozen.batch, steps=2)
    assert isinstance(twins.model.frozen.weight.requires_grad, bool)


@on_ranks(2)
def test_fully_frozen_model_passes_gradients_on() -> None:
    model = MLP().requires_grad_(False)
    plain = copy.deepcopy(model)
    compiled = compile_sharded(model)
    x = torch.ones(5, 7, requires_grad=True)
    compiled(x).backward()
    assert_close("gradient of the input", x.grad, torch.autograd.grad(plain(x), x)[0])
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_ignored_parameters_stay_plain() -> None:
    model = MLP()
    ignored = [model.mid.weight, model.down.bias]
    plain = copy.deepcopy(model)
    compiled = compile_sharded(model, ignored_params=ignored)
    optimizers = [sgd(model), sgd(plain)]
    rank, xs = torch.distributed.get_rank(), draw(MLP.batch, 0)
    compiled(xs[rank]).backward()
    plain(xs[rank]).backward()
    assert model.mid.weight is ignored[0] and model.down.bias is ignored[1]
    for param in ignored:
        assert type(param) is nn.Parameter and not isinstance(param.grad, DTensor)
    assert_close("own gradient", model.mid.weight.grad, plain.mid.weight.grad)
    assert isinstance(model.up.weight, DTensor)
    both = torch.stack([whole(plain.up.weight.grad)])
    torch.distributed.all_reduce(both)
    assert_close("averaged gradient", model.up.weight.grad, both[0] / 2)
    for optimizer in optimizers:
        optimizer.step()
    assert_close("own step", model.mid.weight, plain.mid.weight)


def _loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    return model


REPLACEMENTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "assign": _loaded,
    "deepcopy": copy.deepcopy,
    "to_empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@on_ranks(2)
def test_replaced_ignored_parameters_stay_plain(replacement: str) -> None:
    model = MLP()
    graphshard.shard(model, world_mesh(), ignored_params=[model.mid.weight])
    replaced = REPLACEMENTS[replacement](model)
    for param in replaced.parameters():
        nn.init.ones_(param)
    nn.init.constant_(replaced.mid.weight, own := float(torch.distributed.get_rank()))
    compile_sharded(replaced)(torch.ones(5, 7))
    assert type(replaced.mid.weight) is nn.Parameter and isinstance(replaced.up.weight, DTensor)
    assert torch.equal(replaced.mid.weight, torch.full_like(replaced.mid.weight, own))


@on_ranks(2)
def test_ignored_parameters_of_an_earlier_call_can_be_sharded() -> None:
    model = MLP()
    graphshard.shard(model, world_mesh(), ignored_params=model.mid.parameters())
    graphshard.shard(model.mid, world_mesh())
    assert isinstance(model.mid.weight, DTensor)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


@on_ranks(2)
def test_unused_output_gives_zero_gradients() -> None:
    twins, x = Twins(_TwoHeads()), torch.ones(2, 7)
    for called in (twins.compiled, torch.compile(twins.reference, backend="aot_eager")):
        called(x)[0].sum().backward()
    twins.check()
    assert twins.model.unused.weight.grad is not None
    assert not whole(twins.model.unused.weight.grad).any()


class Sliced(nn.Module):
    """Model whose input width is symbolic until a later layer fixes it.

    The gradient of an earlier parameter is therefore traced with a symbolic size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Parameter(torch.randn(12))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = x * self.halves[: x.shape[1]] + self.halves[x.shape[1] :]
        return self.second(self.first(x).relu()).square().mean()

    batch = staticmethod(_rows)


@pytest.mark.parametrize("overrides", [{}, {"*": {"shard": False}}])
@on_ranks(2)
def test_gradient_of_symbolic_size_matches_unsharded_copy(overrides: Any) -> None:
    twins = Twins(Sliced(), dynamic=True, fullgraph=False, overrides=overrides)
    for step in range(2):
        twins.backward(draw(_rows, step, 2))
        for name, param in twins.model.named_parameters():
            assert param.grad is not None
            assert_close(name, whole(param.grad), twins.reference.get_parameter(name).grad)
        twins.zero_grad()


@pytest.mark.parametrize("value", [None, 3.0])
@on_ranks(2)
def test_name_of_deleted_parameter_can_be_a_plain_attribute(value: float | None) -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    new = None if value is None else torch.full((13,), value)
    for model in (twins.model, twins.reference):
        layer: Any = model.get_submodule("up")
        del layer.bias
        layer.bias = new
        assert layer.bias is new and "up.bias" not in model.state_dict()
    twins.train(MLP.batch, steps=2)
