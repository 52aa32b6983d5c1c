"""Caught errors within a graph: no collective stays in flight, and training continues."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

import graphshard
from graphshard._torch.distributed import num_registered_works, register_work
from graphshard.ops import in_flight
from graphshard.ops.host_copy import _HostCopy, _Launch
from tests import ranks
from tests.fallible import Fallible, fails_in, in_flight_then, passes_left
from tests.numerics.compare import compile_sharded
from tests.ranks import on_ranks

SMALL_BUCKETS = graphshard.SchedulePolicy(bucket_cap_mb=0.01)


def _batch() -> Tensor:
    return Fallible.batch(torch.Generator())


class _Views(Fallible):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        loss = super().forward(x)
        return loss.view(1, 1).t(), loss.view(1, 1, 1).transpose(0, 1)


def _train(compiled: Any) -> None:
    loss, *_ = tree_leaves(compiled(_batch()))
    loss.sum().backward()


@pytest.mark.parametrize(
    ("compiler", "make"), [("aot_eager", Fallible), ("inductor", Fallible), ("aot_eager", _Views)]
)
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_no_collective_stays_in_flight_after_error(
    where: str, compiler: str, make: type[Fallible]
) -> None:
    model = make(layers=3)
    compiled = compile_sharded(model, compiler=compiler, schedule=SMALL_BUCKETS)
    for _ in range(2):
        model.zero_grad()
        _train(compiled)
    expected = [param.grad.to_local() for param in model.parameters()]
    before = num_registered_works()
    for _ in range(3):
        fails_in.add(where)
        with pytest.raises(MemoryError):
            _train(compiled)
        fails_in.clear()
        assert num_registered_works() == before
    assert max(in_flight_then) > before
    model.zero_grad()
    _train(compiled)
    for param, grad in zip(model.parameters(), expected):
        assert torch.equal(param.grad.to_local(), grad)


def _fail_earlier_on_one_rank() -> tuple[float, int]:
    """Return the seconds until this rank raises, and the number of collectives in flight then.

    Rank 0 fails one layer later than rank 1, so it launches more collectives.
    """
    compiled, x = compile_sharded(Fallible(), schedule=SMALL_BUCKETS), _batch()
    compiled(x).backward()
    before = num_registered_works()
    fails_in.add("forward")
    passes_left.append(0 if dist.get_rank() == 1 else 1)
    start = time.monotonic()
    with mock.patch.object(in_flight, "LIMIT_S", 0.5), pytest.raises(MemoryError):
        compiled(x)
    seconds, stays = time.monotonic() - start, num_registered_works() - before
    dist.destroy_process_group()
    return seconds, stays


def test_wait_for_rank_that_failed_earlier_is_limited() -> None:
    (held_up, _), (at_once, stays_there) = ranks.run_fresh(2, _fail_earlier_on_one_rank)
    assert 0.5 <= held_up < 30 and at_once < 30
    assert stays_there == 0


class _Event:
    """A fake accelerator event, which is also used as a stream."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def wait_event(self, event: object) -> None:
        assert event is self
        self.waits.append("stream")

    def synchronize(self) -> None:
        self.waits.append("host")


def _copy(host_reads: bool, num_waits: int, num_tensors: int = 1) -> list[str]:
    before, event = num_registered_works(), _Event()
    launch = _Launch(event, torch.device("cpu"))  # type: ignore[arg-type]
    targets = [torch.ones(3) for _ in range(num_tensors)]
    with mock.patch.object(torch.accelerator, "current_stream", lambda device: event):
        for target in targets:
            register_work(target, _HostCopy(launch, target, torch.ones(3), host_reads))
        for _ in range(num_waits):
            for target in targets:
                torch.ops._c10d_functional.wait_tensor.default(target)
    assert num_registered_works() == before
    return event.waits


def test_host_waits_only_for_copies_that_it_reads() -> None:
    assert _copy(host_reads=False, num_waits=1) == ["stream"]
    assert _copy(host_reads=True, num_waits=2) == ["stream", "host"]


def test_error_completes_all_waits_of_a_copy() -> None:
    before, event = num_registered_works(), _Event()
    launch = _Launch(event, torch.device("cpu"))  # type: ignore[arg-type]
    target = torch.ones(3)
    with mock.patch.object(torch.accelerator, "current_stream", lambda device: event):
        register_work(target, _HostCopy(launch, target, torch.ones(3), host_reads=True))
        in_flight._wait_for([target])
    assert num_registered_works() == before
    assert event.waits == ["stream", "host"]


def test_copies_of_one_launch_share_their_waits() -> None:
    assert _copy(host_reads=True, num_waits=2, num_tensors=3) == ["stream", "host"]
