from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import graphshard
from tests import ranks
from tests.models import GPT, MLP, ConvNet, Trainable
from tests.numerics.compare import (
    Loss,
    Twins,
    assert_close,
    assert_same,
    assert_sharded,
    draw,
    full_values,
    generator,
    num_graphs,
    train,
)
from tests.ranks import on_ranks

# Kinds of outputs, one per class; `loss` reduces the output to a scalar.


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    note: str = "unchanged"


class Named(NamedTuple):
    loss: Tensor
    rest: list[Tensor]


class _Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    batch = staticmethod(MLP.batch)


class ReturnsDataclass(_Returning):
    def forward(self, x: Tensor) -> Output:
        y = self.linear(x)
        return Output(y.square().mean(), y)

    @staticmethod
    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        assert type(out) is Output and out.note == "unchanged" and out.logits.shape == (5, 5)
        return out.loss


class ReturnsDict(_Returning):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"loss": y.square().mean(), "nested": [{"y": y}], "none": None, "four": 4}

    @staticmethod
    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        assert list(out) == ["loss", "nested", "none", "four"] and out["four"] == 4
        return out["loss"] + out["nested"][0]["y"].mean()


class ReturnsNamedTuple(_Returning):
    def forward(self, x: Tensor) -> Named:
        y = self.linear(x)
        return Named(y.square().mean(), [y, x])

    @staticmethod
    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        assert type(out) is Named and torch.equal(out.rest[1], x)
        return out.loss


class ReturnsParameters(_Returning):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x), self.linear.weight, self.linear.bias * 2, self.linear.weight.t()

    @staticmethod
    def loss(model: Any, x: Tensor) -> Tensor:
        y, weight, bias, turned = model(x)
        assert weight.shape == (5, 7)
        return y.mean() + weight.square().mean() + bias.sum() + turned.exp().mean()


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [
        (ReturnsDataclass, "aot_eager"),
        (ReturnsDict, "aot_eager"),
        (ReturnsNamedTuple, "aot_eager"),
        (ReturnsParameters, "aot_eager"),
        (ReturnsParameters, "inductor"),
    ],
)
@on_ranks(2)
def test_model_with_structured_outputs_trains(kind: Any, compiler: str) -> None:
    Twins(kind(), compiler=compiler).train(kind.batch, steps=2, loss=kind.loss)


# Orders of forwards and backwards.


def _two_forwards(model: Any, x: Tensor) -> Tensor:
    return model(x) + 2 * model(x.flip(0) * 3)


def _three_sizes(model: Any, x: Tensor) -> Tensor:
    return model(x) + model(x[:4]) + model(x[:3])


def _forward_without_grad_between(model: Any, x: Tensor) -> Tensor:
    loss = model(x)
    with torch.no_grad():
        target = model(x * 2)
    return loss * target


def _discarded_forward(model: Any, x: Tensor) -> Tensor:
    model(x * 2)
    return model(x)


@pytest.mark.parametrize(
    "loss", [_two_forwards, _three_sizes, _forward_without_grad_between, _discarded_forward]
)
@on_ranks(2)
def test_several_forwards_before_one_backward_match_unsharded_copy(loss: Loss) -> None:
    Twins(MLP()).train(MLP.batch, loss=loss)


@on_ranks(2)
def test_backwards_may_run_in_reverse_order_of_forwards() -> None:
    twins = Twins(MLP())
    rank, xs, ys = dist.get_rank(), draw(MLP.batch, 0), draw(MLP.batch, 1)
    first, second = twins.compiled(xs[rank]), twins.compiled(ys[rank])
    second.backward()
    first.backward()
    for batches in (xs, ys):
        torch.stack([twins.reference(x) for x in batches]).mean().backward()
    twins.check()


@on_ranks(2)
def test_two_backwards_of_one_forward_accumulate() -> None:
    twins = Twins(MLP())
    xs = draw(MLP.batch, 0)
    for loss in (
        twins.compiled(xs[dist.get_rank()]),
        torch.stack([twins.reference(x) for x in xs]).mean(),
    ):
        loss.backward(retain_graph=True)
        loss.backward()
    twins.check()


@on_ranks(2)
def test_gradient_of_input_is_not_averaged() -> None:
    twins = Twins(MLP())
    x = draw(MLP.batch, 0)[dist.get_rank()].requires_grad_()
    twins.compiled(x).backward()
    ours, x.grad = x.grad, None
    twins.reference(x).backward()
    assert_close("gradient of the input", ours, x.grad)


# Evaluation, with and without gradients.

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize(
    ("mode", "first"),
    [("no_grad", False), ("inference_mode", True), ("enable_grad", True)],
)
@on_ranks(2)
def test_evaluation_does_not_affect_training(mode: str, first: bool) -> None:
    twins = Twins(ConvNet())
    batches = draw(ConvNet.batch, 5)
    if not first:
        twins.backward(batches)
        twins.zero_grad()
    twins.reference.load_state_dict(full_values(twins.model))
    for training in (False, True):
        twins.model.train(training)
        twins.reference.train(training)
        with MODES[mode]():
            for _ in range(2):
                batch = batches[dist.get_rank()]
                assert_close("output", twins.compiled(batch), twins.reference(batch))
    assert_sharded(twins.model)
    assert all(param.grad is None for param in twins.model.parameters())
    twins.backward(batches)
    assert_same(twins.model, twins.reference)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 64)
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.5, self.training)
        return F.dropout(self.last(x), 0.1, self.training).square().mean()

    batch = staticmethod(MLP.batch)


@on_ranks(2)
def test_dropout_with_equal_seeds_matches_unsharded_copy() -> None:
    twins = Twins(Dropping())
    for step in range(3):
        xs = draw(Dropping.batch, step)
        torch.manual_seed(100 * step + dist.get_rank())
        twins.compiled(xs[dist.get_rank()]).backward()
        for rank, x in enumerate(xs):
            torch.manual_seed(100 * step + rank)
            (twins.reference(x) / len(xs)).backward()
        twins.check()
        twins.step()


# Activation checkpointing.


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.shared = nn.Linear(7, 7)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def layer(self, x: Tensor, layer: nn.Module) -> Tensor:
        return torch.sin(self.shared(torch.relu(layer(x)))) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.layer, x, layer, use_reentrant=False)
        return self.shared(x).square().mean()

    batch = staticmethod(MLP.batch)


class CheckpointedDropout(Checkpointed):
    def layer(self, x: Tensor, layer: nn.Module) -> Tensor:
        return super().layer(F.dropout(x, 0.0), layer)


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class CheckpointedByPolicy(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, PRODUCTS)
        for layer in self.layers:
            x = checkpoint(self.layer, x, layer, use_reentrant=False, context_fn=context)
        return self.shared(x).square().mean()


@pytest.mark.parametrize(
    ("kind", "reshard"),
    [
        (Checkpointed, False),
        (CheckpointedDropout, True),
        (CheckpointedByPolicy, True),
    ],
)
def test_checkpointed_layers_train(kind: Trainable, reshard: bool) -> None:
    ranks.run(2, train, kind, reshard_after_forward=reshard)


def test_model_with_activation_memory_budget_of_zero_trains() -> None:
    budget = graphshard.SchedulePolicy(activation_memory_budget=0)
    ranks.run(2, train, GPT, schedule=budget)


def test_checkpointed_layers_train_with_inductor() -> None:
    ranks.run(2, train, Checkpointed, compiler="inductor", steps=2)


def test_convolutions_and_batch_norm_train_with_inductor() -> None:
    ranks.run(2, train, ConvNet, compiler="inductor", steps=2)


# Changing sizes.


@on_ranks(2)
def test_changing_sizes_recompile_once() -> None:
    twins = Twins(MLP())
    for size in range(3):
        shape = (2 + size, 5 + 3 * size, 7)
        twins.backward([torch.randn(shape, generator=generator(size, rank)) for rank in range(2)])
        twins.check()
        twins.zero_grad()
    assert num_graphs() <= 2
    assert [plan.graph for plan in twins.backend.plans] == ["forward", "backward"] * num_graphs()


@on_ranks(2)
def test_ranks_may_have_batches_of_different_sizes() -> None:
    twins = Twins(MLP())
    for step, sizes in enumerate([(5, 5), (5, 3), (2, 5), (4, 4)]):
        batches = [torch.randn(n, 7, generator=generator(step, n)) for n in sizes]
        twins.backward(batches)
        twins.check()
        twins.zero_grad()
