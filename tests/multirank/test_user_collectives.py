"""Collectives of the model itself, e.g. of tensor parallelism: same order on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.ranks.plan_consensus import collectives_text
from tests import ranks
from tests.multirank.test_call_log import assert_same, message
from tests.numerics.parallel import (
    assert_like_fsdp2,
    assert_trains_like_fsdp2,
    batches,
    mesh_2d,
    split,
    train,
    under_fsdp2,
)

DIM = 64


class Blocks(nn.Module):
    """Linears for tensor parallelism, and `sums` all-reduces that do not change results."""

    def __init__(self, sums: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(3)
        )
        self.sums, self._group = sums, ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        for _ in range(self.sums):
            x = x + 0 * funcol.all_reduce(x.detach(), "sum", self._group)
        return x.square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(4, DIM, generator=rng)

    def parallelize(self, tp: DeviceMesh) -> Blocks:
        self._group = tp.get_group().group_name
        for block in self.blocks:
            parallelize_module(block, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return self


def _policy() -> graphshard.SchedulePolicy:
    """Return a policy in which compute hides all collectives on ranks 0 and 1, none on others."""
    us = 1e5 if dist.get_rank() < 2 else 1e-3
    return graphshard.SchedulePolicy(overlap=True, bucket_cap_mb=0.01, node_cost=lambda _: us)


def _train() -> tuple[str, list[Any]]:
    """Train next to FSDP2; return the order of launches, and this rank's own schedules."""
    mesh = mesh_2d()
    model = split(Blocks, mesh)
    backend = graphshard.backend(mesh["dp"], compiler="aot_eager", schedule=_policy())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager, data = under_fsdp2(Blocks, mesh), batches(Blocks, mesh, 2)
    steps = zip(train(compiled, model, data), train(eager, eager, data), strict=True)
    for ours, theirs in steps:
        assert_like_fsdp2(ours, theirs)
    costs = _policy().cost_model(torch.device("cpu"))
    own = [_policy().plan_buckets(plan.problem, costs) for plan in backend.plans]
    text = collectives_text(backend.plans)
    for axis in ("dp", "tp"):  # groups along an axis differ only in name
        text = text.replace(f"group {mesh[axis].get_group().group_name}", f"group {axis}")
    return text, [[(b.launch, b.wait, b.num_bytes) for b in buckets] for buckets in own]


def test_ranks_with_different_costs_launch_in_order_of_first_rank() -> None:
    texts, own = zip(*ranks.run_fresh(4, _train), strict=True)
    assert own[0] != own[2]
    assert len(set(texts)) == 1
    forward, _, backward = texts[0].partition("backward graph")
    for text, num_users, kind in ((forward, 3, "all_gather"), (backward, 2, "reduce_scatter")):
        parts = text.split("user collective: all_reduce in group tp")
        assert len(parts) == num_users + 1
        assert any(kind in part for part in parts[1:-1])  # launches in between


def _sum(sums: list[int]) -> str:
    """Run a step with sums[rank] all-reduces; return user collectives per plan, or the error."""
    mesh = mesh_2d()
    model = Blocks(sums[dist.get_rank()]).parallelize(mesh["tp"])
    backend = graphshard.backend(mesh["dp"], compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.ones(4, DIM)
    if len(set(sums)) == 1:
        compiled(x).backward()
        return str([len(plan.problem.user_collectives) for plan in backend.plans])
    # Dynamo appends lines to errors raised during compilation.
    return message(lambda: compiled(x).backward()).splitlines()[0]


def test_user_collectives_of_forward_are_in_plan() -> None:
    assert set(ranks.run_fresh(4, _sum, [2] * 4)) == {"[5, 2]"}


def _train_in_equal_groups() -> None:
    mesh, equal = mesh_2d(), mesh_2d()
    torch.manual_seed(0)
    model = Blocks(2).parallelize(mesh["tp"])
    if dist.get_rank() < 2:
        model._group = equal["tp"].get_group().group_name
    backend = graphshard.backend(mesh["dp"], compiler="aot_eager", schedule=_policy())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager, data = under_fsdp2(Blocks, mesh), batches(Blocks, mesh, 2)
    assert_trains_like_fsdp2(compiled, model, eager, data)
    used = {user.group for plan in backend.plans for user in plan.problem.user_collectives}
    assert len(used) == 1 + (dist.get_rank() < 2)


def test_ranks_may_use_different_groups_of_same_ranks() -> None:
    ranks.run_fresh(4, _train_in_equal_groups)


def test_different_number_of_user_collectives_is_an_error_on_all() -> None:
    assert_same(ranks.run_fresh(4, _sum, [1, 1, 2, 2]), "user collectives of the forward graph: ")
