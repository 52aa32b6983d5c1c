from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import graphshard
from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind, TransferKind
from graphshard.params.checks import _device_error
from graphshard.pipeline.settings import CompileSettings
from graphshard.planning.plan import Plan
from graphshard.planning.simulate import simulate
from tests import ranks
from tests.models import GPT, MLP
from tests.numerics.compare import (
    NEEDS_FP8,
    History,
    Twins,
    assert_equal,
    assert_history_rounded,
    draw,
    named_mesh,
    relative_error,
    train_steps,
    whole,
)
from tests.ranks import on_ranks

STEPS = 3
OFFLOAD = CPUOffloadPolicy(pin_memory=False)  # FSDP2 cannot pin without an accelerator
ON_DEVICE = OffloadPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

WAYS: dict[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "ZeRO-3": ((2,), {}),
    "ZeRO-2": ((2,), {"reshard_after_forward": False}),
    "bf16": ((2,), {"mp_policy": BF16}),
    "HSDP": ((2, 2), {}),
}
"""Mesh shapes, and arguments for both FSDP2 and graphshard."""


def _model(make: Callable[[], GPT | MLP] = GPT) -> GPT | MLP:
    torch.manual_seed(0)
    return make()


def _train_against_fsdp2(way: str) -> None:
    shape, options = WAYS[way]
    mesh, ours = named_mesh(shape), _model()
    batches = [draw(GPT.batch, step)[dist.get_rank()] for step in range(STEPS)]

    def by_fsdp2(**options: Any) -> History:
        model = _model()
        for module in [*model.blocks, model]:  # type: ignore[misc, list-item]
            fully_shard(module, mesh=mesh, offload_policy=OFFLOAD, **options)
        model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        return train_steps(model, model, batches)

    backend = graphshard.backend(mesh, offload_policy=OFFLOAD, compiler="aot_eager", **options)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    trained, expected = train_steps(compiled, ours, batches), by_fsdp2(**options)
    if "mp_policy" in options:  # FSDP2 adds the gradients of a tied weight in bfloat16
        assert_history_rounded(trained, expected, by_fsdp2())
    else:
        assert_equal(trained, expected)
    _check_copies(backend.plans)


def _check_copies(plans: list[Plan]) -> None:
    """Assert that each all-gather has its own copy to the device, and gradients are copied back."""
    forward, backward = plans
    assert (forward.graph, backward.graph) == (GraphKind.FORWARD, GraphKind.BACKWARD)
    for plan in plans:
        loads = {b.buffers: b for b in plan.buckets if b.kind == TransferKind.COPY_TO_DEVICE}
        gathers = {b.buffers: b for b in plan.buckets if b.kind == TransferKind.ALL_GATHER}
        assert loads.keys() == gathers.keys()
        assert all(load.wait == gathers[of].launch for of, load in loads.items())
    shards = sum(p.nbytes for p in _model().parameters()) / forward.buckets[0].world
    assert forward.count(TransferKind.COPY_TO_DEVICE) and not forward.count(
        TransferKind.COPY_TO_HOST
    )
    assert backward.num_bytes(TransferKind.COPY_TO_HOST) >= shards / 2


@pytest.mark.low_precision
@pytest.mark.parametrize("way", WAYS)
def test_training_matches_fsdp2(way: str) -> None:
    world = 4 if way == "HSDP" else 2
    ranks.run(world, _train_against_fsdp2, way)


def _losses(model: GPT | MLP, options: Mapping[str, Any], fullgraph: bool = True) -> list[Any]:
    torch._dynamo.reset()
    backend = graphshard.backend(named_mesh((2,)), **{"compiler": "aot_eager", **options})
    compiled: Any = torch.compile(model, backend=backend, fullgraph=fullgraph)
    found: list[Any] = []
    optimizer = None
    for step in range(6):
        batch = draw(type(model).batch, step)[dist.get_rank()]
        graphshard.set_requires_gradient_sync(model, step % 3 == 2)
        loss = compiled(batch)
        loss.backward()
        found.append(float(loss))
        if step % 3 == 2:
            optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
            optimizer.step()
            found += [whole(p.grad) for p in model.parameters()]
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"compiler": "inductor"},
        pytest.param({"mp_policy": BF16, "fp8": graphshard.Float8Policy()}, marks=NEEDS_FP8),
        {
            "overrides": {"*norm*": {"shard": False}, "blocks.0.*": {"offload_policy": ON_DEVICE}},
            "schedule": graphshard.SchedulePolicy(overlap=False),
        },
    ],
    ids=["inductor", "fp8", "mixed, no overlap"],
)
@on_ranks(2)
def test_offload_changes_no_value(options: Mapping[str, Any]) -> None:
    of_a_gpt = "fp8" in options or "overrides" in options
    make: Callable[[], GPT | MLP] = functools.partial(GPT, 32) if of_a_gpt else MLP
    offloaded, plain = (
        _losses(_model(make), {**options, "offload_policy": policy})
        for policy in (CPUOffloadPolicy(), None)
    )
    for ours, theirs in zip(offloaded, plain, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


class Broken(MLP):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(batch)


@on_ranks(2)
def test_offload_with_graph_break_changes_no_value() -> None:
    torch.manual_seed(0)
    broken = _losses(Broken(), {"offload_policy": CPUOffloadPolicy()}, fullgraph=False)
    plain = _losses(_model(MLP), {"offload_policy": CPUOffloadPolicy()})
    for ours, theirs in zip(broken, plain, strict=True):
        assert relative_error(torch.as_tensor(ours), torch.as_tensor(theirs)) < 1e-5


@on_ranks(2)
def test_offloaded_meta_device_model_trains() -> None:
    with torch.device("meta"):
        model = MLP()
    graphshard.shard(model, named_mesh((2,)), offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert len(_losses(model, {})) > 6


@pytest.mark.parametrize("fqn", ["up.weight", "down.weight"])
def test_offload_on_gpus_accepts_sharded_and_replicated_parameters_on_host(fqn: str) -> None:
    backend = graphshard.backend(
        offload_policy=CPUOffloadPolicy(), overrides={"down": {"shard": False}}
    )
    mesh = mock.Mock(device_type="cuda")
    assert _device_error(torch.device("cpu"), mesh, backend.options.for_parameter([fqn])) is None


# Activations offloaded to the host to stay within a memory budget.


class Deep(nn.Module):
    DIM, ROWS = 32, 600

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.DIM, self.DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> torch.Tensor:
        return torch.randn(Deep.ROWS, Deep.DIM, generator=rng)


@on_ranks(2)
def test_budget_offloads_activations() -> None:
    limited, peaks = None, []
    # Off by default on a CPU, as its memory is host memory.
    with mock.patch.object(CompileSettings, "may_offload_activations", True):
        for budget in (None, 0.9):
            if budget is not None:
                limited = budget * peaks[0] / 1e9
            policy = graphshard.SchedulePolicy(memory_budget_gb=limited)
            twins = Twins(Deep(), compiler="inductor", schedule=policy)
            twins.train(Deep.batch, 2)
            plans = twins.backend.plans
            times = [
                simulate(p.problem, p.buckets, CostModel(HARDWARE["cpu"])).peak_bytes for p in plans
            ]
            peaks.append(max(times))
    forward, backward = plans
    moved = forward.count(TransferKind.COPY_TO_HOST), backward.count(TransferKind.COPY_TO_DEVICE)
    assert moved[0] == moved[1] > 0
    assert peaks[1] <= 0.9 * peaks[0]


def test_activations_are_not_offloaded_from_cpu() -> None:
    policy = graphshard.SchedulePolicy(memory_budget_gb=1e-4)
    assert not CompileSettings("aot_eager", policy, torch.device("cpu")).may_offload_activations
    assert CompileSettings("aot_eager", policy, torch.device("cuda")).may_offload_activations
