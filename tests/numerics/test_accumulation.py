"""Gradient accumulation: all but the last microbatch skip reductions, or only all-reduces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.kinds import TransferKind
from tests import ranks, recording
from tests.models import GPT, MLP, Trainable
from tests.numerics.compare import (
    History,
    Twins,
    assert_equal,
    assert_same,
    compile_sharded,
    draw,
    named_mesh,
    num_graphs,
    relative_error,
    sgd,
    whole,
)
from tests.numerics.test_breaks import DisabledFirst
from tests.ranks import on_ranks

MICROBATCHES = 3
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
Sent = list[list[tuple[str, int]]]


def _seeded(kind: Trainable) -> Any:
    torch.manual_seed(0)
    return kind()


@dataclass(frozen=True)
class Trained:
    """Reductions and graphs of a training run.

    Attributes:
        sent: our reductions in each microbatch of the last step.
        theirs: FSDP2's reductions in the same microbatches.
        graphs: number of graphs.
    """

    sent: Sent
    theirs: Sent
    graphs: int


def _reductions() -> list[tuple[str, int]]:
    found = [(e.kind, e.bytes) for e in recording.collectives() if e.kind != "all_gather"]
    recording.clear()
    return found


def _train(
    kind: Trainable, shape: tuple[int, ...], all_reduce_only: bool, options: dict[str, Any]
) -> Trained:
    torch._dynamo.utils.counters.clear()
    ours, mesh = _seeded(kind), named_mesh(shape)
    backend = graphshard.backend(mesh, compiler="aot_eager", **options)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    if all_reduce_only:
        syncs = partial(graphshard.set_requires_all_reduce, ours)
    else:
        syncs = partial(graphshard.set_requires_gradient_sync, compiled)
    trained, sent = _accumulate(kind, compiled, ours, syncs)
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    expected, other = _by_fsdp2(kind, mesh, all_reduce_only, policy)
    assert_equal(trained, expected)
    return Trained(sent, other, num_graphs())


def _by_fsdp2(
    kind: Trainable, mesh: DeviceMesh, all_reduce_only: bool, policy: MixedPrecisionPolicy
) -> tuple[History, Sent]:
    model: Any = fully_shard(_seeded(kind), mesh=mesh, mp_policy=policy)
    model.set_force_sum_reduction_for_comms(True)
    if all_reduce_only:
        return _accumulate(kind, model, model, model.set_requires_all_reduce)
    return _accumulate(kind, model, model, model.set_requires_gradient_sync)


def _accumulate(
    kind: Trainable,
    call: Callable[[Tensor], Tensor],
    model: nn.Module,
    syncs: Callable[[bool], None],
) -> tuple[History, Sent]:
    """Train two steps; return the history, and the last step's reductions by microbatch."""
    history, optimizer, sent = History(), None, Sent()
    for step in range(2):
        sent.clear()
        for micro in range(MICROBATCHES):
            syncs(micro == MICROBATCHES - 1)
            recording.clear()
            loss = call(draw(kind.batch, step * MICROBATCHES + micro)[dist.get_rank()])
            loss.backward()
            sent.append(_reductions())
            history.losses.append(loss.detach())
        history.note_grads(model)
        optimizer = optimizer or sgd(model)
        optimizer.step()
        optimizer.zero_grad()
    return history, sent


@pytest.mark.parametrize(
    ("kind", "shape", "all_reduce_only", "options"),
    [
        (GPT, (2,), False, {}),
        (MLP, (2,), False, {"mp_policy": BF16}),
        (MLP, (2,), False, {"overrides": {"*": {"shard": False}}}),
        (MLP, (2, 2), False, {"reshard_after_forward": False}),
        (MLP, (2, 2), True, {}),
        (MLP, (2, 2), True, {"mp_policy": BF16}),
    ],
)
def test_accumulation_matches_fsdp2(
    kind: Trainable, shape: tuple[int, ...], all_reduce_only: bool, options: dict[str, Any]
) -> None:
    world = torch.Size(shape).numel()
    for trained in ranks.run(
        world, _train, kind, shape, all_reduce_only, options, backend="recording"
    ):
        assert trained.graphs == 2
        kinds = [[kind for kind, _ in sent] for sent in trained.sent]
        reduction = (
            TransferKind.ALL_REDUCE if "overrides" in options else TransferKind.REDUCE_SCATTER
        )
        first = [TransferKind.REDUCE_SCATTER] if all_reduce_only else []
        assert kinds[:-1] == [first] * (MICROBATCHES - 1)
        assert kinds[-1] == [reduction, TransferKind.ALL_REDUCE][: len(shape)]
        if reduction == TransferKind.REDUCE_SCATTER:
            assert trained.sent == trained.theirs


def _whole_batch() -> tuple[float, int]:
    """Compute gradients of microbatches and, for comparison, of their union as one batch.

    Returns:
        Largest relative error of a gradient, and the number of graphs that the second round of
        microbatches compiled.
    """
    micros = [draw(MLP.batch, step)[dist.get_rank()] for step in range(MICROBATCHES)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MLP())
    parts, whole_model = map(compile_sharded, models)
    for _ in range(2):
        for model in models:
            model.zero_grad()
        whole_model(torch.cat(micros)).backward()
        torch._dynamo.utils.counters.clear()
        *first, last = micros
        with graphshard.no_sync(parts):
            for micro in first:
                (parts(micro) / MICROBATCHES).backward()
            assert all(param.grad is None for param in models[0].parameters())
        (parts(last) / MICROBATCHES).backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(relative_error(*(whole(p.grad) for p in pair)) for pair in pairs), num_graphs()


def test_accumulated_gradients_match_whole_batch() -> None:
    for error, graphs in ranks.run(2, _whole_batch):
        assert error <= 1e-6
        assert graphs == 0


class _Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(7, 7)
        self.sometimes = nn.Linear(7, 7, bias=False)

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, uses = batch
        x = torch.tanh(self.always(x))
        return (self.sometimes(x) if uses else x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> tuple[Tensor, bool]:
        return torch.randn(5, 7, generator=rng), True


def _plainly(model: nn.Module) -> Any:
    return torch.compiler.disable(model.forward)


@pytest.mark.parametrize("function", [None, _plainly])
@on_ranks(2)
def test_sum_is_reduced_if_last_microbatch_adds_nothing(function: Any) -> None:
    twins = Twins(_Sometimes(), function=function, fullgraph=False)
    first, second = (draw(_Sometimes.batch, step) for step in range(2))
    for _ in range(2):
        with graphshard.no_sync(twins.model):
            twins.backward(first)
        twins.backward([(x, False) for x, _ in second])
        twins.check()
        twins.zero_grad()


def _fail(_: Tensor) -> None:
    raise RuntimeError("hook fails")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("last_is_used", [True, False])
@on_ranks(2)
def test_sum_counts_once_if_hook_fails(register: str, last_is_used: bool) -> None:
    model = _Sometimes()
    # Backward may stop before it reaches another trained parameter.
    model.always.requires_grad_(not last_is_used)
    twins = Twins(model)
    first, second, third = (draw(_Sometimes.batch, step) for step in range(3))
    second = [(x, last_is_used) for x, _ in second]
    with graphshard.no_sync(twins.model):
        twins.backward(first)
    handle = getattr(model.sometimes.weight, register)(_fail)
    with pytest.raises(RuntimeError, match="hook fails"):
        twins.backward(second)
    handle.remove()
    if register == "register_post_accumulate_grad_hook" or not last_is_used:
        torch.stack([twins.plain(batch) for batch in second]).mean().backward()
    if register == "register_post_accumulate_grad_hook":
        twins.check()
    twins.backward(third)
    twins.check()


@on_ranks(2)
def test_accumulation_in_eager_part_matches_unsharded_copy() -> None:
    twins = Twins(DisabledFirst(), fullgraph=False)
    for step in range(2):
        with graphshard.no_sync(twins.model):
            for micro in range(2):
                twins.backward(draw(DisabledFirst.batch, 3 * step + micro))
        twins.backward(draw(DisabledFirst.batch, 3 * step + 2))
        twins.check()
        twins.zero_grad()


@pytest.mark.parametrize(
    ("kind", "function", "last_is_used"),
    [
        (DisabledFirst, None, True),
        (_Sometimes, None, False),
        (_Sometimes, _plainly, False),
    ],
)
@on_ranks(4)
def test_deferred_all_reduce_covers_eager_and_unused_parts(
    kind: Any, function: Any, last_is_used: bool
) -> None:
    mesh = named_mesh((2, 2))
    twins = Twins(kind(), function=function, fullgraph=False, mesh=mesh)
    for step in range(2):
        graphshard.set_requires_all_reduce(twins.model, False)
        for micro in range(2):
            twins.backward(draw(kind.batch, 3 * step + micro, 4))
        graphshard.set_requires_all_reduce(twins.model, True)
        last = draw(kind.batch, 3 * step + 2, 4)
        twins.backward(last if last_is_used else [(x, False) for x, _ in last])
        assert_same(twins.model, twins.reference)
        twins.zero_grad()


@on_ranks(2)
def test_forward_decides_whether_its_backward_reduces() -> None:
    twins = Twins(MLP())
    batches = [draw(MLP.batch, step) for step in range(4)]
    rank = dist.get_rank()
    with graphshard.no_sync(twins.compiled):
        with graphshard.no_sync(twins.compiled):
            twins.backward(batches[0])
        late = twins.compiled(batches[1][rank])
        assert twins.model.up.weight.grad is None
    synced = twins.compiled(batches[2][rank])
    late.backward()
    assert twins.model.up.weight.grad is None
    again = twins.compiled(batches[3][rank])
    with torch.no_grad():
        twins.compiled(batches[3][rank])
    synced.backward()
    again.backward()
    for batch in batches[1:]:
        torch.stack([twins.plain(x) for x in batch]).mean().backward()
    twins.check()


@on_ranks(2)
def test_no_sync_of_submodule_defers_only_its_reductions() -> None:
    model = MLP()
    model.mid.requires_grad_(False)
    twins = Twins(model)
    for step in range(2):
        with graphshard.no_sync(twins.model.down):
            twins.backward(draw(MLP.batch, 2 * step))
        assert twins.model.up.weight.grad is not None and twins.model.down.weight.grad is None
        twins.backward(draw(MLP.batch, 2 * step + 1))
        twins.check()
        twins.zero_grad()


@on_ranks(2)
def test_require_backward_grad_sync_works_as_in_ddp() -> None:
    twins = Twins(MLP())
    batches = [draw(MLP.batch, step) for step in range(4)]
    twins.model.require_backward_grad_sync = False
    for holder, micros in ((twins.compiled, batches[:2]), (twins.model, batches[2:])):
        holder.require_backward_grad_sync = False
        twins.backward(micros[0])
        assert all(param.grad is None for param in twins.model.parameters())
        assert not holder.require_backward_grad_sync
        holder.require_backward_grad_sync = True
        twins.backward(micros[1])
        twins.check()
        twins.zero_grad()


@on_ranks(2)
def test_copy_made_in_no_sync_reduces() -> None:
    twins = Twins(MLP())
    twins.train(MLP.batch, steps=1)
    with graphshard.no_sync(twins.model):
        copied = copy.deepcopy(twins.model)
    assert copied.require_backward_grad_sync
    Twins(copied, twins.reference).train(MLP.batch, steps=1)


def test_non_module_and_non_bool_are_refused() -> None:
    with pytest.raises(ValueError, match="model is a function"), graphshard.no_sync(_seeded):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="requires_all_reduce=1: must be True or False"):
        graphshard.set_requires_all_reduce(MLP(), 1)  # type: ignore[arg-type]


@on_ranks(2)
def test_accumulation_ignores_default_device() -> None:
    twins = Twins(MLP())
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            batches = draw(MLP.batch, 0)
        with graphshard.no_sync(twins.model):
            twins.backward(batches)
        twins.backward(batches)
    finally:
        torch.set_default_device(None)
    twins.check()
