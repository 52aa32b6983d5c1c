"""Faults of one rank: it raises, exits, is killed, or is stopped.

`GRAPHSHARD_FAULTS=all` tests many more combinations of faults and points.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from tests import ranks
from tests.numerics.compare import generator, relative_error, sgd

pytestmark = pytest.mark.alone

DIM, GLOBAL_BATCH, STEPS, FAULTY_STEP = 8, 6, 4, 2
TIMEOUT_S = 6.0  # shorter than ranks.GRACE_S, within which the others must end
IS_LONG = os.environ.get("GRAPHSHARD_FAULTS") == "all"
STOPS_S = {"stop": 3.0, "stop for too long": 20.0 if IS_LONG else 9.0}

IN_GRAPHS = ["in forward", "in backward"]
POINTS = ["before", "in a collective", "between", "after", "compile", "plans", "save", *IN_GRAPHS]
FAULTS = ["raise", "exit", "kill", "stop for too long"]
SOME = [
    ("kill", "in a collective", 1),
    ("raise", "compile", 1),
    ("exit", "plans", 0),
    ("kill", "save", 1),
    ("stop for too long", "in backward", 0),
]
ALL = [
    (fault, point, number % 2)
    for number, (fault, point) in enumerate(itertools.product(FAULTS, POINTS))
    if (fault, point) != ("raise", "in a collective")  # a thread blocked in a wait cannot raise
]
"""Faults to test, as (fault, point, rank of the victim)."""
SPLIT = [("kill", "in forward", 3), ("raise", "compile", 2)]
IN_A_CHECKPOINT = ["after", "save"]
"""Points after which the others enter a checkpoint's collectives, where torch raises the error."""
SOME_STOPS = ["in a collective"]

meets: list[Callable[[str], None]] = []
"""Functions to call at points within graphs."""


@torch.library.custom_op("graphshard_test::meet", mutates_args=())
def meet(x: Tensor, point: str) -> Tensor:
    for at in meets:
        at(point)
    return x.clone()


@meet.register_fake
def _(x: Tensor, point: str) -> Tensor:
    return torch.empty_like(x)


meet.register_autograd(lambda ctx, grad: (meet(grad, "in backward"), None))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(meet(torch.tanh(self.first(x)), "in forward")).square().mean()


def _net() -> Net:
    torch.manual_seed(7)
    return Net()


def _batch(step: int) -> Tensor:
    """Return the global batch; at the faulty step, a different length forces a recompile."""
    length = 3 if step == FAULTY_STEP else 2
    return torch.randn(GLOBAL_BATCH, length, DIM, generator=generator(step))


def _strike(fault: str) -> None:
    if fault == "raise":
        raise ZeroDivisionError("the victim's own error")
    if fault == "exit":
        os._exit(3)
    if fault in STOPS_S:
        subprocess.Popen(["sh", "-c", f"sleep {STOPS_S[fault]}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP if fault in STOPS_S else signal.SIGKILL)


class _Faulty:
    def __init__(self, fault: str, point: str, victim: int) -> None:
        self._fault, self._point = fault, point
        self._is_due = self._is_victim = dist.get_rank() == victim

    def at(self, point: str) -> None:
        """Cause the fault if it is due at `point`.

        For "in a collective", the other ranks are delayed, so the fault happens while the victim
        waits for them.
        """
        if point != self._point:
            return
        waits = point == "in a collective"
        if self._is_due and waits:
            threading.Timer(0.5, _strike, [self._fault]).start()
        elif self._is_due:
            _strike(self._fault)
        elif waits and not self._is_victim:
            time.sleep(1.0)
        self._is_due = False

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        targets: list[tuple[Any, str, str]] = [
            (sys.modules["graphshard.dynamo_backend"], "compile_traced", "compile"),
            (sys.modules["graphshard.ranks.plan_consensus"], "choose_on_first_rank", "plans"),
            (dcp.FileSystemWriter, "write_data", "save"),
        ]
        for owner, name, point in targets:
            patch.setattr(owner, name, self._striking(getattr(owner, name), point))

    def _striking(self, function: Callable[..., Any], point: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(point)
            return function(*args, **kwargs)

        return call


def _train(
    fault: str, point: str, folder: Path, steps: range, victim: int = 1, *, splits: bool = False
) -> list[Tensor]:
    """Train `steps`, and return the full parameters.

    Saves a checkpoint of the faulty step or, if `fault` is "none", of every step. A range that does
    not start at 0 resumes from the checkpoint of the preceding step. With `splits`, tensor
    parallelism is applied over pairs of four ranks.
    """
    faulty = _Faulty(fault, point, victim)
    with pytest.MonkeyPatch.context() as patch:
        faulty.watch(patch)
        return _train_by(faulty, fault == "none", folder, steps, splits)


def _split(model: Net) -> DeviceMesh:
    ranks_2d, timeout = torch.arange(4).view(2, 2), timedelta(seconds=TIMEOUT_S)
    dist.distributed_c10d._set_pg_timeout(timeout)  # default group, which all ranks use to agree
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0]
        for rows in (ranks_2d.t(), ranks_2d)
    ]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks_2d, mesh_dim_names=("dp", "tp"))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return mesh["dp"]


def _train_by(
    faulty: _Faulty, saves_all: bool, folder: Path, steps: range, splits: bool
) -> list[Tensor]:
    group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = _net()
    mesh = _split(model) if splits else DeviceMesh.from_group(group, "cpu")
    graphshard.shard(model, mesh, compiler="aot_eager")
    backend = graphshard.backend(mesh, compiler="aot_eager")
    compiled, optimizer = torch.compile(model, backend=backend, dynamic=False), sgd(model)
    if steps[0] > 0:
        checkpoint = {"model": model.state_dict()}
        dcp.load(checkpoint, checkpoint_id=folder / str(steps[0] - 1), process_group=group)
    for step in steps:
        at = faulty.at if step == FAULTY_STEP else _nowhere
        meets[:] = [at]
        at("before")
        at("in a collective")
        loss = compiled(_batch(step).chunk(mesh.size())[mesh.get_local_rank()])
        at("between")
        loss.backward()
        at("after")
        optimizer.step()
        optimizer.zero_grad()
        if saves_all or step == FAULTY_STEP:
            saved = folder / str(step)
            dcp.save({"model": model.state_dict()}, checkpoint_id=saved, process_group=group)
    return [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]


def _nowhere(point: str) -> None:
    pass


def _expected(steps: int) -> list[Tensor]:
    model = _net()
    optimizer = sgd(model)
    for step in range(steps):
        model(_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def _assert_trained(trained: list[list[Tensor]]) -> None:
    for ours, expected in zip(trained[0], _expected(STEPS), strict=True):
        assert relative_error(ours, expected) < 1e-5


@pytest.mark.parametrize(("fault", "point", "victim"), ALL if IS_LONG else SOME)
def test_fault_on_one_rank_ends_others_with_named_error(
    fault: str, point: str, victim: int, tmp_path: Path
) -> None:
    _assert_others_end(3, fault, point, tmp_path, victim)


@pytest.mark.parametrize(("fault", "point", "victim"), SPLIT)
def test_fault_on_one_rank_of_split_model_ends_others_with_named_error(
    fault: str, point: str, victim: int, tmp_path: Path
) -> None:
    # The rank diagonally opposite in the mesh shares no mesh group with the victim.
    _assert_others_end(4, fault, point, tmp_path, victim, splits=True)


def _assert_others_end(
    world: int, fault: str, point: str, folder: Path, victim: int, *, splits: bool = False
) -> None:
    train = (_train, fault, point, folder, range(STEPS), victim)
    with pytest.raises(ranks.RankError) as raised:
        ranks.run_fresh(world, *train, timeout_s=60, splits=splits)
    others = [failure for failure in raised.value.failures if failure.rank != victim]
    assert len(others) == world - 1
    for failure in others:
        assert "still running" not in failure.text and "died" not in failure.text, failure.text
        named = "BackendError: process group" in failure.text
        assert named or point in IN_A_CHECKPOINT, failure.text
    errors = {failure.text.strip().splitlines()[-1] for failure in others}
    assert len(errors) == 1 or point in IN_A_CHECKPOINT, errors


@pytest.mark.parametrize("point", POINTS if IS_LONG else SOME_STOPS)
def test_rank_stopped_briefly_continues_training(point: str, tmp_path: Path) -> None:
    _assert_trained(ranks.run_fresh(2, _train, "stop", point, tmp_path, range(STEPS)))


@pytest.mark.parametrize("world", [1, 3] if IS_LONG else [3])
def test_training_resumes_with_another_number_of_ranks(world: int, tmp_path: Path) -> None:
    ranks.run_fresh(2, _train, "none", "", tmp_path, range(FAULTY_STEP))
    with pytest.raises(ranks.RankError):
        ranks.run_fresh(2, _train, "kill", "save", tmp_path, range(FAULTY_STEP, STEPS))
    rest = range(FAULTY_STEP, STEPS)
    _assert_trained(ranks.run_fresh(world, _train, "none", "", tmp_path, rest))
