"""One NCCL rank: the numbers of plain torch.compile, the same memory in every step, full parameters
that are given up after use, and a host that never waits for the GPU."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from benchmarks.models import DeepMLP, parameter_bytes
from graphshard.kinds import TransferKind
from graphshard.ops.float8_math import RECIPES
from graphshard.planning.live_bytes import alive_bytes
from graphshard.planning.plan import Plan
from tests.gpu.training import Trainer, agree, by_torch_compile, cosines_in_fp8, on_one_rank
from tests.numerics.compare import generator, relative_error, sgd
from tests.numerics.test_float8 import MIN_COSINE

pytestmark = pytest.mark.gpu
WARM_UP, STEPS = 3, 5
DIM, LINEARS = 2048, 32  # 537 MB of parameters


def test_agrees_with_torch_compile() -> None:
    on_one_rank("cuda", agree, by_torch_compile, "cuda", "inductor")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_gradients_in_fp8(compiler: str, recipe: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU computes no products in fp8")
    found = on_one_rank("cuda", cosines_in_fp8, "cuda", compiler, recipe)
    assert min(found) > MIN_COSINE


def _trainer(reshard_after_forward: bool = True) -> Trainer:
    """Of a model that has made the steps of the warm-up."""
    torch.cuda.set_device(0)
    model = DeepMLP(DIM, LINEARS).to("cuda")
    trainer = Trainer(model, "cuda", reshard_after_forward=reshard_after_forward)
    for _ in range(WARM_UP):
        trainer.step()
    return trainer


def _memory_by_step(reshard_after_forward: bool) -> list[tuple[int, int]]:
    """Of each step: bytes allocated after it, and at most during it."""
    trainer, memory = _trainer(reshard_after_forward), []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    return memory


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_every_step_needs_the_same_memory(reshard_after_forward: bool) -> None:
    memory = on_one_rank("cuda", _memory_by_step, reshard_after_forward)
    assert len(memory) == STEPS
    assert set(memory) == {memory[0]}, memory


class _Forward(NamedTuple):
    """Bytes that a forward keeps for backward, and those that it needs at most, in parts of the
    parameters, which are 1.0 themselves; what its plan says that it needs."""

    kept: float
    peak: float
    planned: float


def _memory_of_forward(reshard_after_forward: bool) -> _Forward:
    trainer = _trainer(reshard_after_forward)
    trainer.model.zero_grad(set_to_none=True)
    num_bytes = parameter_bytes(trainer.model)
    others = torch.cuda.memory_allocated() - num_bytes  # momentum, the batch
    torch.cuda.reset_peak_memory_stats()
    loss = trainer.forward()
    kept = torch.cuda.memory_allocated() - others - num_bytes
    peak = torch.cuda.max_memory_allocated() - others
    trainer.backward(loss)
    plan = trainer.plans[0]
    planned = max(alive_bytes(plan.problem, plan.buckets))
    return _Forward(kept / num_bytes, peak / num_bytes, planned / num_bytes)


def test_full_parameters_are_freed_after_use() -> None:
    # On one rank a gathered parameter is a second copy of its shard, so they can be told apart.
    ours = on_one_rank("cuda", _memory_of_forward, True)
    by_zero2 = on_one_rank("cuda", _memory_of_forward, False)
    assert ours.kept <= 0.1, ours
    assert ours.peak <= min(1.01 * ours.planned, 1.75), ours
    assert by_zero2.kept >= 0.75, by_zero2


def _steps_without_synchronisation() -> None:
    trainer = _trainer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):  # the mode does find a synchronisation
            torch.ones(1, device="cuda").item()
        for _ in range(STEPS):
            trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_the_host_never_waits_for_the_gpu() -> None:
    on_one_rank("cuda", _steps_without_synchronisation)


class _Trained(NamedTuple):
    """Losses and gradients of all steps; bytes allocated behind them, and at most during the last;
    whether shards are pinned; the plans."""

    numbers: list[list[torch.Tensor]]
    held: int
    peak: int
    pinned: bool
    plans: list[Plan]


def _train(rows: int, **options: Any) -> _Trained:
    torch.cuda.set_device(0)
    torch._dynamo.reset()
    gc.collect()  # of the model before
    torch.manual_seed(0)
    model = DeepMLP(DIM, 8).to("cuda")
    backend = graphshard.backend(init_device_mesh("cuda", (1,)), **options)
    compiled = torch.compile(model, backend=backend)
    numbers = []
    for step in range(STEPS):
        x = torch.randn(rows, DIM, generator=generator(step)).to("cuda")
        torch.cuda.reset_peak_memory_stats()
        loss = compiled(x)
        loss.backward()
        numbers.append([loss.detach().cpu()])
        numbers[-1] += [p.grad.to_local().cpu() for p in model.parameters()]
        optimizer = sgd(model)
        optimizer.step()
        optimizer.zero_grad()
    pinned = all(p.to_local().is_pinned() for p in model.parameters())
    memory = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return _Trained(numbers, *memory, pinned, backend.plans)


def _assert_equal_numbers(ours: _Trained, theirs: _Trained, tolerance: float = 0.0) -> None:
    for own, other in zip(ours.numbers, theirs.numbers, strict=True):
        assert max(map(relative_error, own, other)) <= tolerance


def _train_offloaded() -> None:
    plain, offloaded = _train(8), _train(8, offload_policy=CPUOffloadPolicy())
    _assert_equal_numbers(offloaded, plain)
    assert offloaded.pinned and not plain.pinned
    assert offloaded.held < plain.held / 2


def test_offloaded_shards() -> None:
    on_one_rank("cuda", _train_offloaded)


def _train_with_activations_on_the_host() -> None:
    rows = 16 * DIM  # an activation has sixteen times the bytes of a parameter
    plain = _train(rows)
    peak_gb = max(max(alive_bytes(p.problem, p.buckets)) for p in plain.plans) / 1e9
    policy = graphshard.SchedulePolicy(memory_budget_gb=0.7 * peak_gb)
    stowed = _train(rows, schedule=policy)
    forward, backward = stowed.plans
    assert (
        forward.count(TransferKind.COPY_TO_HOST) == backward.count(TransferKind.COPY_TO_DEVICE) > 0
    )
    _assert_equal_numbers(stowed, plain, 1e-6)  # other fusions
    assert stowed.peak < 0.85 * plain.peak


def test_activations_wait_on_the_host() -> None:
    on_one_rank("cuda", _train_with_activations_on_the_host)
