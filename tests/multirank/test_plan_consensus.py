"""Ranks with different plans follow the first rank's plan, or all raise the same error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard.ranks.call_log import CallLog
from tests import ranks, recording
from tests.multirank.test_call_log import assert_same, mesh_of, message, run
from tests.numerics.compare import Twins, generator, num_graphs

DIM, LAYERS = 64, 6


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _fast_or_slow(rank: int) -> graphshard.SchedulePolicy:
    """Return a policy in which compute hides all collectives on rank 1, and none on rank 0."""
    return graphshard.SchedulePolicy(overlap=True, node_cost=lambda _: 1e5 if rank else 1e-3)


def _train(compiler: str, dynamic: bool) -> tuple[list[Any], int]:
    """Train with a larger batch on rank 1, where it grows again in the third step.

    Returns:
        The collectives of every step, and the number of buckets that this rank would plan for the
        first graph.
    """
    rank, schedule = dist.get_rank(), _fast_or_slow(dist.get_rank())
    twins = Twins(Chain(), compiler=compiler, schedule=schedule, dynamic=dynamic)
    sent = []
    for step in range(4):
        sizes = (2, 6 if step < 2 else 12)
        recording.clear()
        twins.backward([torch.randn(size, DIM, generator=generator(step)) for size in sizes])
        sent.append([(e.kind, e.bytes, e.num_tensors) for e in recording.collectives()])
        twins.check()
        twins.zero_grad()
    assert num_graphs() == (1 if dynamic or rank == 0 else 2)
    costs = schedule.cost_model(torch.device("cpu"))
    return sent, len(schedule.plan_buckets(twins.backend.plans[0].problem, costs))


@pytest.mark.parametrize(
    ("compiler", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_ranks_follow_plan_of_first_rank(compiler: str, dynamic: bool) -> None:
    # Costs and batches differ between ranks, and only rank 1 recompiles.
    (one, own), (other, others) = ranks.run(2, _train, compiler, dynamic, backend="recording")
    assert own != others
    assert one == other
    assert one[1] == one[2] == one[3]  # the first step also shards the model


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, use_first: bool) -> Tensor:
        return (self.first if use_first else self.second)(x).square().mean()


def _fork(group: dist.ProcessGroup, _: CallLog, overlap: bool) -> str:
    mesh = mesh_of(group)
    schedule = graphshard.SchedulePolicy(overlap=overlap)
    backend = graphshard.backend(mesh, compiler="aot_eager", schedule=schedule)
    model = torch.compile(Forked(), backend=backend, fullgraph=True)
    x = torch.ones(2, DIM)
    model(x, True).backward()
    # Dynamo appends lines to errors raised during compilation.
    return message(lambda: model(x, group.rank() == 0).backward()).splitlines()[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_different_graph_on_one_rank_is_an_error_on_all(overlap: bool) -> None:
    assert_same(run(2, _fork, overlap), "all_gather of first.", "all_gather of second.")


def _call_twice(model: Any, x: Tensor) -> None:
    model(x)
    model(x)


def _start_again(folder: Path) -> list[str]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    backend, x = graphshard.backend(compiler="aot_eager"), torch.ones(2, DIM)
    told = []
    for world in ("first", "same graphs", "rank 1 is a new process"):
        dist.destroy_process_group()
        path = f"file://{folder / world}"
        dist.init_process_group("gloo", init_method=path, rank=rank, world_size=num_ranks)
        if world.startswith("rank 1"):
            torch._dynamo.reset()
            backend = graphshard.backend(compiler="aot_eager") if rank == 1 else backend
        model: Any = torch.compile(Chain(), backend=backend, fullgraph=True)
        for _ in range(2):
            model(x).backward()
            with torch.no_grad():
                model(x)
        if world == "same graphs":
            assert len(backend.plans) == 3  # forward, backward and inference
        with torch.set_grad_enabled(rank == 1):
            told.append(message(_call_twice, model, x))
    return told


def test_new_group_of_the_same_name_is_compared_again(tmp_path: Path) -> None:
    for messages in zip(*ranks.run_fresh(2, _start_again, tmp_path)):
        assert_same(list(messages), "calls a graph for inference", "calls graphs for training")
