"""Resource usage does not grow with the number of steps or models.

GRAPHSHARD_SOAK_STEPS=5000 runs more steps.
"""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import graphshard
from graphshard._torch.distributed import num_registered_works
from tests import ranks
from tests.fallible import DIM, Fallible, fails_in
from tests.models import MLP
from tests.numerics.compare import generator, sgd, world_mesh

pytestmark = pytest.mark.alone

PERIOD = 20
"""Number of steps after which the sequence of events repeats."""

STEPS = int(os.environ.get("GRAPHSHARD_SOAK_STEPS", str(8 * PERIOD)))


@dataclass(frozen=True)
class Usage:
    """Resource usage of a process.

    Attributes:
        resident_mb: resident memory.
        objects: number of Python objects that the garbage collector tracks, after a collection.
        threads: number of threads.
        files: number of open file descriptors.
        works: number of collectives that have not been waited for.
        keys: number of keys in the store, from all ranks.
    """

    resident_mb: float
    objects: int
    threads: int
    files: int
    works: int
    keys: int


def _usage() -> Usage:
    gc.collect()
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    return Usage(
        resident_mb=pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        objects=len(gc.get_objects()),
        threads=len(list((process / "task").iterdir())),
        files=len(list((process / "fd").iterdir())),
        works=num_registered_works(),
        keys=_store().num_keys(),
    )


def _store() -> dist.Store:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


class _Training:
    def __init__(self, compiler: str) -> None:
        torch._dynamo.config.recompile_limit = 64
        self.model = Fallible(layers=3)
        schedule = graphshard.SchedulePolicy(bucket_cap_mb=0.01)
        backend = graphshard.backend(world_mesh(), compiler=compiler, schedule=schedule)
        self.compiled: Any = torch.compile(self.model, backend=backend, fullgraph=True)
        # SGD instead of AdamW: torch 2.11 caches the sharding of DTensor operators per scalar
        # argument, and AdamW's step size differs in each step.
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def step(self, number: int) -> None:
        turn = number % PERIOD
        self.model.layers[0].requires_grad_(turn < 15)
        if turn % 5 == 1:
            self._micro(turn, graphshard.no_sync(self.model))
        if turn % 4 == 2:
            self._micro(turn, _failing("forward" if turn < 10 else "backward"))
        self._micro(turn, nullcontext())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if turn % 10 == 3:
            with torch.no_grad():
                self.compiled(_batch(turn))
        if turn == 7:
            torch.save(self.model.state_dict(), io.BytesIO())

    def _micro(self, turn: int, context: Any) -> None:
        with context:
            self.compiled(_batch(turn)).backward()


def _batch(turn: int) -> Tensor:
    return torch.randn(2 + turn % 3, DIM, generator=generator(turn))


@contextmanager
def _failing(where: str) -> Iterator[None]:
    fails_in.add(where)
    try:
        yield
        raise AssertionError("it did not fail")
    except MemoryError:
        pass
    finally:
        fails_in.clear()


def _soak(steps: int, compiler: str) -> list[Usage]:
    threading.settrace(None)  # coverage keeps a tracer for every thread ever started
    training, usages = _Training(compiler), []
    for number in range(steps):
        training.step(number)
        if (number + 1) % (steps // 4) == 0:
            usages.append(_usage())
            dist.barrier()
    return usages


def test_resources_do_not_grow_over_steps() -> None:
    for usages in ranks.run_fresh(2, _soak, STEPS, "aot_eager", timeout_s=200 + STEPS):
        text = "\n".join(str(asdict(usage)) for usage in usages)
        print(text)
        _, half, _, end = usages
        assert end.resident_mb - half.resident_mb < 8, text
        assert end.objects - half.objects < 50, text
        assert (end.threads, end.files, end.works) == (half.threads, half.files, half.works), text
        assert end.keys - half.keys < 5, text


class _Sweep:
    def __init__(self, kind: str) -> None:
        self._kind, self._shared = kind, self._backend()

    def _backend(self) -> Any:
        return graphshard.backend(world_mesh(), compiler="aot_eager")

    def options(self) -> dict[str, Any]:
        return {
            "plain": {"backend": "aot_eager"},
            "named": {"backend": "graphshard", "options": {"compiler": "aot_eager"}},
            "shared": {"backend": self._shared},
            "own": {"backend": self._backend()},
        }[self._kind]

    def train(self) -> None:
        model = MLP()
        compiled, optimizer = torch.compile(model, **self.options()), sgd(model)
        for step in range(2):
            compiled(MLP.batch(generator(step))).backward()
            optimizer.step()
        torch._dynamo.reset()
        for _ in range(2000):  # torch's flight recorder keeps the code that called the last 2000
            dist.all_reduce(torch.ones(1))


def _sweep(kind: str) -> tuple[int, int]:
    """Return the number of remaining graph modules, and of objects that the last model added."""
    sweep, objects = _Sweep(kind), [0]
    for _ in range(4):
        sweep.train()
        objects.append(_usage().objects)
    num_graphs = sum(issubclass(type(thing), fx.GraphModule) for thing in gc.get_objects())
    return num_graphs, objects[-1] - objects[-2]


def test_reset_frees_graphs_and_objects_of_a_model() -> None:
    ((_, of_torch),) = ranks.run_fresh(1, _sweep, "plain")
    for kind in ("own", "shared", "named"):
        for num_graphs, num_objects in ranks.run_fresh(2, _sweep, kind):
            assert num_graphs == 0, kind
            # torch keeps some objects per guard.
            assert num_objects < 2 * of_torch, (kind, of_torch)
