"""After a step, neither Python, autograd nor compiled code holds a full parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.graph.conftest import WORLD_SIZE
from tests.numerics.compare import sgd

DIM, LAYERS = 64, 2
LIMIT = DIM * DIM
"""Bytes of a full weight in fp8; batches and activations are smaller."""


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def layer(self, number: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[number](x))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(LAYERS):
            x = self.layer(number, x)
        return x.square().mean()


class Checkpointed(Linears):
    def forward(self, x: Tensor) -> Tensor:
        for number in range(LAYERS):
            x = checkpoint(self.layer, number, x, use_reentrant=False)
        return x.square().mean()


class Eager(Linears):
    @torch.compiler.disable
    def layer(self, number: int, x: Tensor) -> Tensor:
        return super().layer(number, x)


kept: list[Tensor] = []


class KeepsOne(Eager):
    """A model whose eager part keeps a reference to its last gathered parameter."""

    @torch.compiler.disable
    def layer(self, number: int, x: Tensor) -> Tensor:
        kept[:] = [self.layers[number].weight]
        return super().layer(number, x)


def _train(model: nn.Module, compiled: Any) -> None:
    compiled(_batch()).backward()


def _train_microbatches(model: nn.Module, compiled: Any) -> None:
    with graphshard.no_sync(model):
        compiled(_batch()).backward()
    compiled(_batch()).backward()


def _evaluate(model: nn.Module, compiled: Any) -> None:
    with torch.no_grad():
        compiled(_batch())


def _forward_alone(model: nn.Module, compiled: Any) -> None:
    compiled(_batch())


def _batch() -> Tensor:
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Case:
    """A model, the shape of its mesh, arguments of ``graphshard.backend``, and a step function.

    After `step`, the optimizer steps and gradients are freed.
    """

    model: type[Linears] = Linears
    mesh: tuple[int, ...] = (WORLD_SIZE,)
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Callable[[nn.Module, Any], None] = _train


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CASES = {
    "ZeRO-3": Case(),
    "ZeRO-2": Case(options={"reshard_after_forward": False}),
    "hpZ": Case(options={"reshard_after_forward": 2}),
    "HSDP": Case(mesh=(2, WORLD_SIZE // 2)),
    "one replicated": Case(options={"overrides": {"layers.1.*": {"shard": False}}}),
    "mixed precision": Case(options={"mp_policy": BF16}),
    "offload": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "fp8": Case(options={"mp_policy": BF16, "fp8": graphshard.Float8Policy()}),
    "checkpointing": Case(Checkpointed),
    "no_sync": Case(step=_train_microbatches),
    "no_sync of HSDP": Case(mesh=(2, WORLD_SIZE // 2), step=_train_microbatches),
    "eager parts": Case(Eager),
    "eager parts, no_sync": Case(Eager, step=_train_microbatches),
    "evaluation": Case(step=_evaluate),
    "evaluation of eager parts": Case(Eager, step=_evaluate),
    "forward alone": Case(step=_forward_alone),
    "forward alone of eager parts": Case(Eager, step=_forward_alone),
}


def _alive(step: Callable[[], None]) -> dict[int, int]:
    """Return the sizes of the allocations that a step did not free, by address.

    The profiler records only this thread; with a fake process group, no other thread allocates.
    """
    with profile(use_kineto=True, profile_memory=True) as recorded:
        step()
    events = list(recorded.kineto_results.experimental_event_tree())
    allocations = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields))
    alive: dict[int, int] = {}
    for _, change in sorted(allocations, key=lambda allocation: allocation[0]):
        if change.alloc_size > 0:
            alive[change.ptr] = change.alloc_size
        else:
            alive.pop(change.ptr, None)
    return alive


def _leaks(case: Case, compiler: str) -> list[tuple[int, list[int]]]:
    """Return the number of unsharded parameters after each of two steps, and the sizes of leaks.

    A leak is an allocation of at least `LIMIT` bytes that is not a shard.
    """
    model = case.model()
    plain = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    optimizer = sgd(model)
    mesh = init_device_mesh("cpu", case.mesh)
    backend = graphshard.backend(mesh, compiler=compiler, **case.options)
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        case.step(model, compiled)
        optimizer.step()
        optimizer.zero_grad()

    leaks = []
    for _ in range(2):  # the first compiles
        alive = _alive(step)
        for param in model.parameters():
            assert isinstance(param, DTensor) and param.grad is None
            alive.pop(param.to_local().untyped_storage().data_ptr(), None)
        left = sum(not storage.expired() for storage in plain)
        leaks.append((left, [size for size in alive.values() if size >= LIMIT]))
    return leaks


@pytest.mark.parametrize("name", CASES)
def test_no_full_parameter_is_alive_after_step(mesh: DeviceMesh, name: str) -> None:
    assert _leaks(CASES[name], "aot_eager") == [(0, [])] * 2


@pytest.mark.parametrize("name", ["ZeRO-3", "ZeRO-2"])
def test_no_full_parameter_is_alive_after_step_with_inductor(mesh: DeviceMesh, name: str) -> None:
    assert _leaks(CASES[name], "inductor") == [(0, [])] * 2


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_full_parameters_saved_for_backward_are_reported(mesh: DeviceMesh, compiler: str) -> None:
    losses: list[Tensor] = []
    case = Case(
        options={"reshard_after_forward": False},
        step=lambda model, compiled: losses.append(compiled(_batch())),
    )
    for _, sizes in _leaks(case, compiler):
        # Backward does not need the first layer's weight: its input has no gradient.
        assert sizes.count(DIM * DIM * 4) == LAYERS - 1


def test_full_parameter_held_by_python_is_reported(mesh: DeviceMesh) -> None:
    leaks = _leaks(Case(KeepsOne), "aot_eager")
    assert all(DIM * DIM * 4 in sizes for _, sizes in leaks), leaks
    kept.clear()
