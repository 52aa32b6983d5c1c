"""Overlapping moves collectives but changes no value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard import SchedulePolicy
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.live_bytes import alive_bytes
from graphshard.planning.search import BudgetError
from tests import ranks
from tests.models import DeepGPT
from tests.numerics.compare import generator, sgd, world_mesh
from tests.ranks import on_ranks


def _backend(**options: Any) -> graphshard.Backend:
    schedule = SchedulePolicy(**options)
    return graphshard.backend(world_mesh(), compiler="aot_eager", schedule=schedule)


def _steps(model: nn.Module, overlap: bool) -> list[list[Tensor]]:
    compiled = torch.compile(model, backend=_backend(overlap=overlap))
    optimizer, found = sgd(model), []
    for step in range(2):
        loss = compiled(DeepGPT.batch(generator(step, dist.get_rank())))
        loss.backward()
        tensors = [t for p in model.parameters() for t in (p.grad, p)]
        found.append([loss.detach().clone(), *(t.to_local().detach().clone() for t in tensors)])
        optimizer.step()
        optimizer.zero_grad()
    return found


@on_ranks(2)
def test_overlap_changes_no_value() -> None:
    model = DeepGPT()
    ours, theirs = (_steps(copy.deepcopy(model), overlap) for overlap in (True, False))
    for step, pair in enumerate(zip(ours, theirs)):
        for one, other in zip(*pair, strict=True):
            assert torch.equal(one, other), step


def _plans(**options: Any) -> dict[str, Any]:
    """Return the plans of a wide GPT's graphs."""
    backend = _backend(**options)
    compiled = torch.compile(DeepGPT(dim=48), backend=backend)
    compiled(DeepGPT.batch(generator(dist.get_rank()))).backward()
    return {plan.graph: plan for plan in backend.plans}


def _smallest(graph: str) -> float:
    """Return the smallest budget in GB for ``graph``, taken from the error for a smaller one."""
    budget_gb = 1e-6
    while True:
        with pytest.raises(BudgetError, match="memory_budget_gb") as raised:
            _plans(memory_budget_gb=budget_gb)
        budget_gb = raised.value.needed / 1e9
        if graph in str(raised.value):
            return budget_gb


@on_ranks(2)
def test_budget_named_in_error_is_sufficient() -> None:
    budget_gb = _smallest(GraphKind.BACKWARD)  # needs more than forward
    for plan in _plans(memory_budget_gb=budget_gb).values():
        assert max(alive_bytes(plan.problem, plan.buckets)) <= round(budget_gb * 1e9)


def test_large_budget_keeps_parameters_unsharded() -> None:
    # With zero compute time, no all-gather is hidden, so all parameters used again are kept.
    plans = ranks.run(2, _plans, memory_budget_gb=1.0, node_cost=_nothing)[0]
    assert plans[GraphKind.BACKWARD].count(TransferKind.ALL_GATHER) == 0
    gathered = {t.param for t in plans[GraphKind.FORWARD].problem.transfers}
    used_again = {plans[GraphKind.FORWARD].params[i].fqn for i in plans[GraphKind.FORWARD].kept}
    assert used_again and len(plans[GraphKind.FORWARD].kept) < len(gathered)
    assert "blocks.0.qkv.weight" in used_again and "positions.weight" not in used_again


def _nothing(_: object) -> float:
    return 0.0
