"""Overlap moves collectives and changes no value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphshard
from graphshard import SchedulePolicy
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.live_bytes import alive_bytes
from graphshard.planning.search import BudgetError
from tests import ranks
from tests.models import GPT, MLP, ConvNet, DeepGPT, Trainable
from tests.numerics.compare import generator, sgd, world_mesh
from tests.ranks import on_ranks

WIDE = {"dim": 48, "layers": 2}


def _steps(model: Any, backend: graphshard.Backend, kind: Trainable) -> list[list[Tensor]]:
    compiled, optimizer, found = torch.compile(model, backend=backend), sgd(model), []
    for step in range(2):
        loss = compiled(kind.batch(generator(step, dist.get_rank())))
        loss.backward()
        tensors = [t for p in model.parameters() for t in (p.grad, p)]
        found.append([loss.detach().clone(), *(t.to_local().detach().clone() for t in tensors)])
        optimizer.step()
        optimizer.zero_grad()
    return found


def _both(kind: Trainable, arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = kind(**arguments)
    plain, overlapped = (
        graphshard.backend(world_mesh(), compiler="aot_eager", schedule=schedule)
        for schedule in (SchedulePolicy(overlap=False), SchedulePolicy(**options))
    )
    ours, theirs = (_steps(copy.deepcopy(model), of, kind) for of in (overlapped, plain))
    for step, pair in enumerate(zip(ours, theirs)):
        for one, other in zip(*pair, strict=True):
            assert torch.equal(one, other), step
    return {plan.graph: plan for plan in overlapped.plans}


@pytest.mark.parametrize("kind", [MLP, DeepGPT, ConvNet])
def test_overlap_changes_no_value(kind: Trainable) -> None:
    ranks.run(2, _both, kind, {}, {})


def _smallest(graph: str) -> float:
    """Return the smallest budget in GB for ``graph``, taken from the error for a smaller one."""
    budget_gb = 1e-6
    while True:
        with pytest.raises(BudgetError, match="memory_budget_gb") as raised:
            _both(GPT, WIDE, {"memory_budget_gb": budget_gb})
        budget_gb = raised.value.needed / 1e9
        if graph in str(raised.value):
            return budget_gb


@on_ranks(2)
def test_budget_named_in_error_is_sufficient() -> None:
    budget_gb = _smallest(GraphKind.BACKWARD)  # needs more than forward
    for plan in _both(GPT, WIDE, {"memory_budget_gb": budget_gb}).values():
        assert max(alive_bytes(plan.problem, plan.buckets)) <= round(budget_gb * 1e9)


def test_large_budget_keeps_parameters_unsharded() -> None:
    # With compute of zero time, no gather is hidden, so all parameters used again are kept.
    options = {"memory_budget_gb": 1.0, "node_cost": _nothing}
    plans = ranks.run(2, _both, GPT, WIDE, options)[0]
    assert plans[GraphKind.BACKWARD].count(TransferKind.ALL_GATHER) == 0
    gathered = {t.param for t in plans[GraphKind.FORWARD].problem.transfers}
    used_again = {plans[GraphKind.FORWARD].params[i].fqn for i in plans[GraphKind.FORWARD].kept}
    assert used_again and len(plans[GraphKind.FORWARD].kept) < len(gathered)
    assert "blocks.0.qkv.weight" in used_again and "positions.weight" not in used_again


def _nothing(_: object) -> float:
    return 0.0
