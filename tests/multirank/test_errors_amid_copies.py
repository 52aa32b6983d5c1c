"""An error within a graph during host copies leaves no copy in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from graphshard._torch.distributed import num_registered_works, register_work
from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import TransferKind
from graphshard.ops import host_copy
from graphshard.pipeline.settings import CompileSettings
from graphshard.planning.simulate import simulate
from tests import fallible
from tests.fallible import DIM, Fallible, fails_in, in_flight_then, passes_left
from tests.numerics.compare import world_mesh
from tests.ranks import on_ranks

SHARDS, ACTIVATIONS = "shards", "activations"
LAYERS = 6


class _Copy(host_copy._HostCopy):
    """A CPU copy that counts as in flight until `wait` is called, like an accelerator's."""

    in_flight: set[int] = set()

    def wait(self, timeout: Any = None) -> bool:
        self.in_flight.discard(id(self._launch))
        return super().wait(timeout)


class _Stream:
    """A fake accelerator stream; also a fake event that is always complete."""

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _launch(
    targets: list[Tensor], sources: list[Tensor], device: torch.device, host_reads: bool
) -> None:
    launch = host_copy._Launch(_Stream(), device)  # type: ignore[arg-type]
    _Copy.in_flight.add(id(launch))
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
        register_work(target, _Copy(launch, target, source, host_reads))


@contextlib.contextmanager
def _as_on_a_device() -> Iterator[None]:
    with (
        mock.patch.object(host_copy, "_launch_copies", _launch),
        mock.patch.object(torch.accelerator, "current_stream", lambda device: _Stream()),
        mock.patch.object(CompileSettings, "may_offload_activations", True),
        mock.patch.object(fallible, "num_registered_works", lambda: len(_Copy.in_flight)),
    ):
        yield


def _compiled(model: Fallible, schedule: Any, policy: Any = None) -> tuple[Any, Any]:
    torch._dynamo.reset()
    backend = graphshard.backend(
        world_mesh(), compiler="aot_eager", schedule=schedule, offload_policy=policy
    )
    return torch.compile(model, backend=backend, fullgraph=True), backend


def _compiled_with_copies(model: Fallible, what: str, x: Tensor) -> Any:
    if what == SHARDS:
        small = graphshard.SchedulePolicy(bucket_cap_mb=0.01)
        return _compiled(model, small, CPUOffloadPolicy(pin_memory=False))[0]
    unlimited, backend = _compiled(Fallible(LAYERS), graphshard.SchedulePolicy())
    unlimited(x).backward()
    cpu = CostModel(HARDWARE["cpu"])
    most = max(simulate(p.problem, p.buckets, cpu).peak_bytes for p in backend.plans)
    limited = graphshard.SchedulePolicy(memory_budget_gb=0.9 * most / 1e9)
    compiled, backend = _compiled(model, limited)
    compiled(x).backward()
    assert backend.plans[1].count(TransferKind.COPY_TO_DEVICE)
    return compiled


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("what", [SHARDS, ACTIVATIONS])
@on_ranks(2)
def test_no_copy_stays_in_flight_after_error(what: str, where: str) -> None:
    model, x = Fallible(LAYERS), torch.randn(4 if what == SHARDS else 1000, DIM)
    with _as_on_a_device():
        compiled = _compiled_with_copies(model, what, x)
        for _ in range(2):
            model.zero_grad()
            compiled(x).backward()
        expected = [param.grad.to_local() for param in model.parameters()]
        before = num_registered_works()
        in_flight_then.clear()
        for layer in range(LAYERS):
            fails_in.add(where)
            passes_left[:] = [layer]
            with pytest.raises(MemoryError):
                compiled(x).backward()
            fails_in.clear()
            assert num_registered_works() == before
            assert not _Copy.in_flight
        assert max(in_flight_then) > 0
        model.zero_grad()
        compiled(x).backward()
    for param, grad in zip(model.parameters(), expected):
        assert torch.equal(param.grad.to_local(), grad)
