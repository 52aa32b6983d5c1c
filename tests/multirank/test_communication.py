"""Collectives of training and evaluation: their tensors, bytes, number and exposed time."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard.kinds import TransferKind
from graphshard.pipeline import meter
from graphshard.planning.plan import Plan
from tests import ranks, recording
from tests.models import GPT, MLP, ConvNet, Trainable
from tests.numerics.compare import Twins, compile_sharded, draw, train
from tests.numerics.test_breaks import DisabledFirst
from tests.numerics.test_parameters import EqualGradients, Frozen, Reused, Tiny, Unused
from tests.plan.dumps import fqns_of

Sent = list[tuple[str, int]]
"""(kind, bytes) of each collective, in order."""


@dataclass(frozen=True)
class Step:
    forward: Sent
    backward: Sent
    plans: tuple[Plan, Plan]

    def fqns(self, kind: str, backward: bool) -> list[str]:
        """Return the sorted names of parameters in collectives of a kind, one per transfer."""
        plan = self.plans[backward]
        buckets = [bucket for bucket in plan.buckets if bucket.kind == kind]
        return sorted(fqn for bucket in buckets for fqn in fqns_of(plan, bucket))

    def bytes(self, kind: str, backward: bool) -> int:
        sent = self.backward if backward else self.forward
        return sum(size for sent_kind, size in sent if sent_kind == kind)


def _sent() -> Sent:
    sent = [(event.kind, event.bytes) for event in recording.collectives()]
    recording.clear()
    return sent


def _record(kind: Trainable, options: dict[str, Any]) -> Step:
    """Record the second step, since the first one also shards the model."""
    twins = Twins(kind(), **options)
    batch = draw(kind.batch, 0)[dist.get_rank()]
    twins.compiled(batch).backward()
    recording.clear()
    loss = twins.compiled(batch)
    forward = _sent()
    loss.backward()
    plans = twins.backend.plans
    return Step(forward, _sent(), (plans[0], plans[1]))


@functools.cache
def _run(kind: Trainable, world_size: int = 2, **options: Any) -> Step:
    steps = ranks.run(world_size, _record, kind, options, backend="recording")
    for step in steps:
        assert (step.forward, step.backward) == (steps[0].forward, steps[0].backward)
        assert step.plans == steps[0].plans
    for sent, plan in zip((steps[0].forward, steps[0].backward), steps[0].plans):
        assert sent == [(bucket.kind, bucket.num_bytes) for bucket in plan.buckets]
    return steps[0]


def _padded_bytes(param: Tensor, world_size: int) -> int:
    rows = -(-param.shape[0] // world_size) * world_size
    return rows * (param.numel() // param.shape[0]) * param.element_size()


@dataclass(frozen=True)
class Needs:
    """A plain model's parameters, and their names by use in eager autograd, sorted."""

    params: dict[str, nn.Parameter]
    saved: list[str]  # saved for backward
    trained: list[str]  # with a gradient, sharded
    replicated: list[str]  # with a gradient, not sharded

    def bytes(self, names: list[str], world_size: int) -> int:
        return sum(_padded_bytes(self.params[name], world_size) for name in names)


def _needs(kind: Trainable) -> Needs:
    model, storages = kind(), set()

    def pack(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(kind.batch(torch.Generator()))
    loss.backward()
    params = dict(sorted(model.named_parameters()))
    split = [name for name, p in params.items() if p.dim() and p.numel()]
    trained = [name for name, p in params.items() if p.grad is not None]
    return Needs(
        params,
        saved=[name for name in split if params[name].untyped_storage().data_ptr() in storages],
        trained=[name for name in trained if name in split],
        replicated=[name for name in trained if name not in split],
    )


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [(kind, 2) for kind in (MLP, GPT, ConvNet, Frozen, Reused, Unused, EqualGradients)]
    + [(kind, 4) for kind in (MLP, Tiny)],
)
def test_each_parameter_is_gathered_and_reduced_once(kind: Trainable, world_size: int) -> None:
    # Each graph gathers the parameters that it needs once; each gradient is reduced once.
    step, needs = _run(kind, world_size), _needs(kind)
    used = [n for n, p in needs.params.items() if not n.startswith("never") and p.dim()]
    used = [name for name in used if needs.params[name].numel()]
    assert {sent_kind for sent_kind, _ in step.forward} == {TransferKind.ALL_GATHER}
    again = step.fqns(TransferKind.ALL_GATHER, True)
    kept = {step.plans[0].params[i].fqn for i in step.plans[0].kept}
    assert not kept.intersection(again)
    # The partitioner may recompute an activation from its parameters instead of saving it.
    assert set(needs.saved) <= kept.union(again) <= set(used)
    expected = [
        (TransferKind.ALL_GATHER, False, used),
        (TransferKind.REDUCE_SCATTER, True, needs.trained),
    ]
    for collective, backward, names in [
        *expected,
        (TransferKind.ALL_GATHER, True, sorted(set(again))),
    ]:
        assert step.fqns(collective, backward) == names
        assert step.bytes(collective, backward) == needs.bytes(names, world_size)
    assert step.fqns(TransferKind.ALL_REDUCE, True) == needs.replicated


def test_inductor_sends_the_same_as_aot_eager() -> None:
    eager, compiled = _run(MLP), _run(MLP, compiler="inductor")
    used = eager.fqns(TransferKind.ALL_GATHER, False)
    assert compiled.fqns(TransferKind.ALL_GATHER, False) == used
    assert compiled.fqns(TransferKind.REDUCE_SCATTER, True) == eager.fqns(
        TransferKind.REDUCE_SCATTER, True
    )
    again = compiled.fqns(TransferKind.ALL_GATHER, True)
    assert sorted(set(again)) == again and set(again) <= set(used)


@pytest.mark.parametrize(
    ("kind", "compiler"), [(MLP, "aot_eager"), (Reused, "aot_eager"), (MLP, "inductor")]
)
def test_kept_parameters_are_not_gathered_again(kind: Trainable, compiler: str) -> None:
    again, kept = _run(kind), _run(kind, reshard_after_forward=False, compiler=compiler)
    assert again.bytes(TransferKind.ALL_GATHER, True) > 0
    assert kept.bytes(TransferKind.ALL_GATHER, True) == 0
    assert kept.fqns(TransferKind.ALL_GATHER, False) == again.fqns(TransferKind.ALL_GATHER, False)
    assert kept.fqns(TransferKind.REDUCE_SCATTER, True) == again.fqns(
        TransferKind.REDUCE_SCATTER, True
    )


def test_training_with_kept_parameters_matches_plain_model() -> None:
    ranks.run(2, train, Reused, compiler="aot_eager", reshard_after_forward=False)


def _evaluate(kind: Trainable) -> Sent:
    compiled = compile_sharded(kind())
    batch = draw(kind.batch, 0)[dist.get_rank()]
    with torch.no_grad():
        compiled(batch)
        recording.clear()
        compiled(batch)
    return _sent()


def test_evaluation_gathers_each_parameter_once() -> None:
    size = sum(_padded_bytes(param, 2) for param in Reused().parameters())
    for sent in ranks.run(2, _evaluate, Reused, backend="recording"):
        assert {kind for kind, _ in sent} == {TransferKind.ALL_GATHER}
        assert sum(num_bytes for _, num_bytes in sent) == size


def _eager_parts() -> Sent:
    twins = Twins(DisabledFirst(), fullgraph=False)
    for _ in range(2):
        recording.clear()
        twins.compiled(draw(DisabledFirst.batch, 0)[dist.get_rank()]).backward()
    return _sent()


def test_eager_parts_send_the_same_on_all_ranks() -> None:
    first, second = ranks.run(2, _eager_parts, backend="recording")
    assert first == second
    size = sum(_padded_bytes(param, 2) for param in DisabledFirst().parameters())
    # The eager part runs twice; each use of a parameter in it has its own reduction.
    assert (
        sum(num_bytes for kind, num_bytes in first if kind == TransferKind.REDUCE_SCATTER) >= size
    )


def _step() -> Sent:
    model = MLP()
    compiled = compile_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    compiled(draw(MLP.batch, 0)[dist.get_rank()]).backward()
    recording.clear()
    optimizer.step()
    optimizer.zero_grad()
    copy.deepcopy(model)
    return _sent()


def test_optimizer_step_sends_nothing() -> None:
    for sent in ranks.run(2, _step, backend="recording"):
        assert sent == []


class _Event:
    """A fake CUDA event that is complete once it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end.at_s - self.at_s) * 1e3


@contextlib.contextmanager
def _events() -> Iterator[None]:
    events = mock.patch.object(torch.cuda, "Event", _Event)
    with events, mock.patch.object(meter, "_HostClock", meter._DeviceClock):
        yield


def _measure(compiler: str, by_events: bool) -> tuple[float, float, dict[str, float]]:
    """Return the total delay of a step's collectives, the step's time, and the last metrics.

    Times are in seconds.
    """
    with _events() if by_events else contextlib.nullcontext():
        return _measure_step(compiler)


def _measure_step(compiler: str) -> tuple[float, float, dict[str, float]]:
    backend = graphshard.backend(compiler=compiler)
    compiled = torch.compile(MLP(), backend=backend)
    for step in range(4):
        # Metrics time the run in step 2, whose compute is too short to hide 20 ms.
        recording.wire(alpha_s=0.02 if step == 2 else 0.0)
        recording.clear()
        dist.barrier()
        start = time.perf_counter()
        compiled(draw(MLP.batch, 0)[dist.get_rank()]).backward()
        if step == 2:
            wall_s, num_sent = time.perf_counter() - start, len(_sent()) - 1  # the barrier
        metrics = backend.metrics(steps=1, tokens=10)
        assert ("measured_us" in metrics) == (step >= 2)
        assert ("step_s" in metrics) == (step >= 1)
    return 0.02 * num_sent, wall_s, metrics


@pytest.mark.parametrize(
    ("compiler", "by_events"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_metrics_measure_exposed_time(compiler: str, by_events: bool) -> None:
    measured = ranks.run(2, _measure, compiler, by_events, backend="recording")
    for wire_s, wall_s, metrics in measured:
        exposed_s, total_s = metrics["measured_exposed_us"] / 1e6, metrics["measured_us"] / 1e6
        assert 0.5 * wire_s < exposed_s < total_s < wall_s  # busy machines hide a part
        assert metrics["measured_exposure"] == pytest.approx(exposed_s / total_s)
        assert metrics["tokens_per_s"] == pytest.approx(10 / metrics["step_s"])
        assert 0 < metrics["mfu"] < 1
