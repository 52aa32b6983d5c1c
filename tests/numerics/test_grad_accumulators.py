"""Sums of unreduced gradients in unusual situations."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parameter import Parameter

import graphshard
from graphshard.params.sharded_param import sharded_model_of, sharded_param_of
from tests import ranks
from tests.fallible import Fallible, fails_in
from tests.models import MLP
from tests.numerics.compare import (
    Twins,
    assert_same,
    compile_sharded,
    draw,
    named_mesh,
    sgd,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks


def _plain(twins: Twins, batches: list[Tensor]) -> None:
    torch.stack([twins.plain(batch) for batch in batches]).mean().backward()


def _of_an_input() -> None:
    """Call ``torch.autograd.grad`` for an input.

    The whole compiled backward runs, and autograd discards the gradients of parameters.
    """
    twins = Twins(MLP())
    batches, rank = [draw(MLP.batch, step) for step in range(3)], dist.get_rank()
    with graphshard.no_sync(twins.model):
        twins.backward(batches[0])
    for _ in range(2):
        x = batches[1][rank].clone().requires_grad_()
        torch.autograd.grad(twins.compiled(x), x)
    with graphshard.no_sync(twins.model):
        twins.backward(batches[1])
    twins.backward(batches[2])
    twins.check()


def _copying_hooks() -> None:
    twins = Twins(MLP())
    batches, rank = [draw(MLP.batch, step) for step in range(2)], dist.get_rank()
    with graphshard.no_sync(twins.model):
        twins.backward(batches[0])
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda saved: saved):
        loss = twins.compiled(batches[1][rank])
    loss.backward()
    _plain(twins, batches[1])
    twins.check()


def _an_error() -> None:
    """Check that sums of all parameters are reduced even after a failed backward."""
    twins = Twins(MLP())
    batches, rank = [draw(MLP.batch, step) for step in range(3)], dist.get_rank()
    twins.backward(batches[0])
    twins.zero_grad()
    with graphshard.no_sync(twins.model):
        twins.backward(batches[0])
    handle = twins.model.up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        twins.compiled(batches[1][rank]).backward()
    handle.remove()
    twins.zero_grad()
    with graphshard.no_sync(twins.model):
        twins.backward(batches[1])
    twins.backward(batches[2])
    assert all(param.grad is not None for param in twins.model.parameters())


def _retried() -> None:
    twins = Twins(Fallible())
    make, rank = Fallible.batch, dist.get_rank()
    batches = [draw(make, step) for step in range(3)]
    for fail in (_in_the_graph, _in_a_hook):
        with graphshard.no_sync(twins.model):
            twins.backward(batches[0])
        for _ in range(2):
            loss = twins.compiled(batches[1][rank])
            with fail(twins.model), pytest.raises((MemoryError, ZeroDivisionError)):
                loss.backward()
        twins.backward(batches[2])
        twins.check()
        twins.zero_grad()


@contextmanager
def _in_the_graph(_: nn.Module) -> Iterator[None]:
    fails_in.add("backward")
    yield
    fails_in.clear()


@contextmanager
def _in_a_hook(model: nn.Module) -> Iterator[None]:
    """Fail before any gradient has reached its parameter."""
    handles = [param.register_hook(lambda grad: 1 / 0) for param in model.parameters()]
    yield
    for handle in handles:
        handle.remove()


def _in_two_threads() -> None:
    """Run another model's backward before the first model's gradients reach their parameters."""
    slow, quick = Twins(MLP()), Twins(MLP())
    batches, rank = [draw(MLP.batch, step) for step in range(3)], dist.get_rank()
    for twins in (slow, quick):
        with graphshard.no_sync(twins.model):
            twins.backward(batches[0])
    loss, entered, goes_on = slow.compiled(batches[1][rank]), Event(), Event()

    def wait(_: Tensor) -> None:
        entered.set()
        assert goes_on.wait(30)

    handles = [param.register_hook(wait) for param in slow.model.parameters()]
    thread = Thread(target=loss.backward)
    thread.start()
    assert entered.wait(30)
    quick.backward(batches[1])
    goes_on.set()
    thread.join()
    for handle in handles:
        handle.remove()
    _plain(slow, batches[1])
    slow.backward(batches[2])
    for twins in (slow, quick):
        twins.check()


def _frozen_and_back() -> None:
    twins = Twins(MLP())
    batches = [draw(MLP.batch, step) for step in range(6)]
    twins.backward(batches[0])
    twins.zero_grad()
    for round_, trained in enumerate((False, True)):
        for model in (twins.model, twins.reference):
            model.up.weight.requires_grad_(trained)
        with graphshard.no_sync(twins.model):
            twins.backward(batches[2 * round_ + 1])
        assert all(param.grad is None for param in twins.model.parameters())
        twins.backward(batches[2 * round_ + 2])
        twins.check()
        twins.zero_grad()


def _on_a_slice() -> None:
    """Accumulate on a slice of a mesh with an additional axis between replicas and shards."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "tp", "shard"))
    twins = Twins(MLP(), mesh=mesh["replicate", "shard"])
    rank = dist.get_rank()
    for step in range(2):
        batches = draw(MLP.batch, step)
        with graphshard.no_sync(twins.model):
            twins.compiled(batches[rank]).backward()
        twins.compiled(batches[rank]).backward()
        for _ in range(2):
            _plain(twins, batches)
        for ours, theirs in zip(twins.model.parameters(), twins.reference.parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)
        twins.zero_grad()


@pytest.mark.parametrize(
    "run",
    [
        _of_an_input,
        _copying_hooks,
        _an_error,
        _retried,
        _in_two_threads,
        _frozen_and_back,
        _on_a_slice,
    ],
)
def test_no_gradient_is_lost_or_added_twice(run: Callable[[], None]) -> None:
    ranks.run(4 if run is _on_a_slice else 2, run)


@pytest.mark.parametrize("eager", [False, True])
@on_ranks(2)
def test_backward_of_reduced_and_unreduced_forwards_adds_both(eager: bool) -> None:
    twins = Twins(MLP())
    for reduced_first in (False, True):
        twins.zero_grad()
        batches, rank = [draw(MLP.batch, step) for step in range(3)], dist.get_rank()
        twins.backward(batches[0])
        twins.zero_grad()
        called = twins.model if eager else twins.compiled
        with graphshard.no_sync(twins.model):
            twins.backward(batches[0])
        reduced = called(batches[2][rank]) if reduced_first else None
        with graphshard.no_sync(twins.model):
            loss = called(batches[1][rank])
        (loss + (called(batches[2][rank]) if reduced is None else reduced)).backward()
        for of in batches[1:]:
            _plain(twins, of)
        twins.check()


def _late(shape: tuple[int, ...], eager: bool) -> None:
    mesh = named_mesh(shape)
    twins, other = Twins(MLP(), mesh=mesh), Twins(MLP(), mesh=mesh)
    batches, rank = [draw(MLP.batch, step) for step in range(6)], dist.get_rank()
    for one in (twins, other):
        one.compiled(batches[0][rank]).backward()
        _plain(one, batches[0])
    called = twins.model if eager else twins.compiled
    setters = (graphshard.set_requires_gradient_sync, graphshard.set_requires_all_reduce)
    skip = setters[mesh.ndim - 1]
    skip(twins.model, False)
    late = [called(batches[step][rank]) for step in (1, 2)]
    skip(twins.model, True)
    other.compiled(batches[0][rank]).backward()
    late.pop().backward()
    called(batches[3][rank]).backward()
    late.pop().backward()
    for batch in batches[4:]:
        called(batch[rank]).backward()
    for batch in batches[1:]:
        _plain(twins, batch)
    assert_same(twins.model, twins.reference)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_late_unreduced_backward_is_added_once(shape: tuple[int, ...], eager: bool) -> None:
    ranks.run(math.prod(shape), _late, shape, eager)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


def _dropped_block() -> list[bool]:
    model, x = _Blocks(), draw(MLP.batch, 0)[dist.get_rank()]
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    model.first.compile(backend=backend)
    model.second.compile(backend=backend)
    model(x, True).backward()
    model.zero_grad()
    with graphshard.no_sync(model):
        model(x, True).backward()
    model(x, False).backward()
    return [param.grad is not None for param in model.parameters()]


def test_block_skipped_by_last_microbatch_is_reduced() -> None:
    assert all(map(all, ranks.run(2, _dropped_block)))


class _Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.first, self.second = (nn.Linear(7, 7) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, uses_all = batch
        x = torch.tanh(self.always(x))
        return (self.second(torch.tanh(self.first(x))) if uses_all else x).square().mean()


@on_ranks(2)
def test_totals_of_untied_weights_are_reduced_in_one_order() -> None:
    twins, rank = Twins(_Untied()), dist.get_rank()
    xs = draw(MLP.batch, 0)
    twins.backward([(x, True) for x in xs])
    twins.zero_grad()
    for model in (twins.model, twins.reference):
        weight = model.get_parameter("first.weight").detach()
        model.get_submodule("second").weight = Parameter(weight.clone())
    with graphshard.no_sync(twins.model):
        twins.backward([(x, True) for x in xs])
    known = sharded_model_of(twins.model)
    assert known is not None
    # Ranks may hold them in any order: a set's depends on memory addresses.
    held: Any = sorted(known.sharded_params, key=attrgetter("_number"), reverse=bool(rank))
    known.sharded_params = held
    twins.backward([(x, False) for x in xs])
    twins.check()


def _abandon_after_no_sync() -> None:
    model = MLP()
    model.cycle = [model]  # type: ignore[assignment]
    compiled = compile_sharded(model)
    with graphshard.no_sync(model):
        compiled(draw(MLP.batch, 0)[0]).backward()


@on_ranks(2)
def test_sums_of_abandoned_model_do_not_depend_on_garbage_collector() -> None:
    gc.disable()
    try:
        _abandon_after_no_sync()
        if dist.get_rank() == 0:
            gc.collect()
        Twins(MLP()).train(MLP.batch)
    finally:
        gc.enable()


SETTERS = {
    "sync": graphshard.set_requires_gradient_sync,
    "all_reduce": graphshard.set_requires_all_reduce,
}


@contextmanager
def _unreduced(model: nn.Module, how: str) -> Iterator[None]:
    if how == "no_sync":
        with graphshard.no_sync(model):
            yield
    else:
        SETTERS[how](model, False)
        yield
        SETTERS[how](model, True)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("how", ["no_sync", *SETTERS])
@on_ranks(2)
def test_model_that_accumulated_is_freed(how: str, eager: bool) -> None:
    param = _accumulate_once(how, eager)
    gc.collect()
    assert param() is None


def _accumulate_once(how: str, eager: bool) -> weakref.ref[Tensor]:
    twins, rank = Twins(MLP(), mesh=named_mesh((2, 1))), dist.get_rank()
    batches = [draw(MLP.batch, step) for step in range(3)]
    twins.compiled(batches[0][rank]).backward()
    twins.zero_grad()
    called = twins.model if eager else twins.compiled
    with _unreduced(twins.model, how):
        called(batches[1][rank]).backward()
    sharded_params = filter(None, map(sharded_param_of, twins.model.parameters()))
    assert any(param.unreduced_totals() for param in sharded_params)
    called(batches[2][rank]).backward()
    for batch in batches[1:]:
        _plain(twins, batch)
    assert_same(twins.model, twins.reference)
    return weakref.ref(twins.model.up.weight)


def _train_other_model_on_some_ranks() -> None:
    twins, batch, rank = Twins(MLP()), draw(MLP.batch, 0, 4), dist.get_rank()
    with graphshard.no_sync(twins.model):
        twins.backward(batch)
    other = Twins(MLP(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    if rank < 2:
        other.backward(batch[:2])
        other.check()
    twins.backward(batch)
    twins.check()


def test_backward_on_some_ranks_reduces_no_totals_of_all_ranks() -> None:
    ranks.run(4, _train_other_model_on_some_ranks)


@pytest.mark.parametrize("how", ["no_sync", *SETTERS])
@on_ranks(2)
def test_step_without_late_gradients_warns(how: str) -> None:
    twins, x = Twins(MLP(), mesh=named_mesh((2, 1))), draw(MLP.batch, 0)[dist.get_rank()]
    optimizer = sgd(twins.model)
    with _unreduced(twins.model, how):
        twins.compiled(x).backward()
    twins.compiled(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    with _unreduced(twins.model, how):
        late = twins.compiled(x)
    twins.compiled(x).backward()
    late.backward()
    with pytest.warns(UserWarning, match=r"SGD steps '.*' without the gradients") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings(), _unreduced(twins.model, how):
        warnings.simplefilter("error")
        optimizer.step()  # gradients are meant to accumulate further


class _Sum(nn.Module):
    """Sum whose two operands get the same gradient tensor, which is expanded for a mean."""

    def __init__(self, is_mean: bool) -> None:
        super().__init__()
        self.is_mean = is_mean
        self.a, self.b = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a + self.b
        return x.mean() if self.is_mean else x.square().sum()

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(4, generator=generator)


@pytest.mark.parametrize("is_mean", [False, True])
@on_ranks(2)
def test_totals_of_shared_gradients_have_memory_of_their_own(is_mean: bool) -> None:
    twins, rank = Twins(_Sum(is_mean)), dist.get_rank()
    batches = [draw(_Sum.batch, step) for step in range(3)]
    for batch in batches:
        _plain(twins, batch)
    graphshard.shard(twins.model, twins.mesh, compiler="aot_eager")
    with graphshard.no_sync(twins.model):
        twins.model(batches[0][rank]).backward()
        twins.compiled(batches[1][rank]).backward()
    twins.compiled(batches[2][rank]).backward()
    twins.check()


class _Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 4)
        codes = torch.ones(4, dtype=torch.int8)
        self.codes = Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.codes).square().mean()


@on_ranks(2)
def test_frozen_integers_are_not_accumulated() -> None:
    twins = Twins(_Integers())
    with graphshard.no_sync(twins.model):
        twins.backward(draw(MLP.batch, 0))
    twins.backward(draw(MLP.batch, 1))
    twins.check()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        return y.imag.sum() + y.real.square().sum()


def _complex_sum() -> Tensor:
    model = _Complex()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    compiled = compile_sharded(model, mp_policy=policy)
    with graphshard.no_sync(model):
        compiled(torch.ones(4)).backward()
    compiled(torch.ones(4)).backward()
    return whole(model.weight.grad)


def test_sum_of_complex_gradients_stays_complex() -> None:
    for grad in ranks.run(2, _complex_sum):
        assert torch.equal(grad, torch.full((4,), 4 + 2j))


@on_ranks(2)
def test_model_without_a_sharded_parameter_can_be_copied() -> None:
    model = nn.Sequential(nn.Linear(7, 4))
    graphshard.shard(model, world_mesh())
    model[0].bias = None
    twin = copy.deepcopy(model)
    assert twin[0].bias is None and torch.equal(whole(twin[0].weight), whole(model[0].weight))
