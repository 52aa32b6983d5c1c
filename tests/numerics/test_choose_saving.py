"""``SchedulePolicy(auto=True)``: all ranks save what the first one chooses, and train as a backend
does that is told to by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import graphshard
from tests import ranks
from tests.models import GPT
from tests.numerics.compare import Twins, draw, num_graphs, sgd, whole

BUDGET_GB = 0.8e-3  # 1e-3 where all activations are saved
SLOW_US, FAST_US = 1e4, 1e-3
"""Of a node: compute that hides every gather, or none."""


def _batch(rng: Any) -> Tensor:
    return GPT.batch(rng, rows=16, length=24)


def _train(schedule: graphshard.SchedulePolicy, **options: Any) -> tuple[list[Tensor], Twins]:
    """Return losses and gradients of two steps, and the parameters behind them."""
    torch.manual_seed(0)
    twins = Twins(GPT(layers=2), schedule=schedule, **options)
    optimizers = [sgd(twins.model), sgd(twins.reference)]
    seen: list[Tensor] = []
    for step in range(2):
        seen.append(twins.backward(draw(_batch, step)))
        twins.check()
        params = list(twins.model.parameters())
        seen += [whole(p.grad) for p in params if p.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *map(whole, twins.model.parameters())], twins


def _choose(first_us: float) -> tuple[str, bool]:
    """Return the table of what was tried, and whether training by hand is bitwise the same."""
    own_us = first_us if dist.get_rank() == 0 else SLOW_US + FAST_US - first_us
    limits: dict[str, Any] = {"memory_budget_gb": BUDGET_GB, "node_cost": lambda _: own_us}
    ours, twins = _train(graphshard.SchedulePolicy(auto=True, **limits))
    assert num_graphs() == 1
    (graph,) = twins.backend._graphs
    saving = graph.settings.saving
    assert saving is not None
    by_hand = graphshard.SchedulePolicy(activation_memory_budget=saving.activations, **limits)
    theirs, _ = _train(by_hand, reshard_after_forward=not saving.all_params)
    return graph.tried, all(map(Tensor.equal, ours, theirs))


def test_ranks_save_what_the_first_one_chooses() -> None:
    """Compute is slow on one rank and fast on the other one, which alone would choose otherwise."""
    taken = set()
    for first_us in (SLOW_US, FAST_US):
        (one, same), (other, others) = ranks.run(2, _choose, first_us)
        assert same and others
        assert one == other
        taken |= {line for line in one.splitlines() if line.endswith("taken")}
    assert {line.split()[0] for line in taken} == {"75%"}
    assert {line.split()[1] for line in taken} == {"all", "those"}
