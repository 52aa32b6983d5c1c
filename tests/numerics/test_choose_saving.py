"""``SchedulePolicy(auto=True)`` on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from tests import ranks
from tests.models import GPT
from tests.numerics.compare import (
    Twins,
    draw,
    generator,
    graphshard_warnings,
    num_graphs,
    whole,
)

from .test_equal_layers import CASES, DIM, Model

BUDGET_GB = 0.7e-3  # saving all activations of 256 rows takes 0.77e-3
SLOW_US, FAST_US = 1e4, 1e-3
"""Node times with which compute hides every gather, or none."""


class Wide(nn.Module):
    def __init__(self, dim: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()

    @staticmethod
    def batch(rng: torch.Generator, rows: int = 256) -> Tensor:
        return torch.randn(rows, 64, generator=rng)


def _train(schedule: graphshard.SchedulePolicy, **options: Any) -> tuple[list[Tensor], Twins]:
    torch.manual_seed(0)
    twins = Twins(Wide(), schedule=schedule, **options)
    seen: list[Tensor] = []
    for step in range(2):
        seen.append(twins.backward(draw(Wide.batch, step)))
        twins.check()
        params = list(twins.model.parameters())
        seen += [whole(p.grad) for p in params if p.grad is not None]
        twins.step()
    return [*seen, *map(whole, twins.model.parameters())], twins


def _choose(first_us: float) -> tuple[str, bool]:
    """Train with automatic settings, then with the same settings given explicitly.

    Returns:
        Table of the tried settings, and whether both runs are bitwise equal.
    """
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


def test_all_ranks_save_what_first_rank_chooses() -> None:
    # Compute is slow on one rank and fast on the other, so their own choices differ.
    taken = set()
    for first_us in (SLOW_US, FAST_US):
        (one, same), (other, others) = ranks.run(2, _choose, first_us)
        assert same and others
        assert one == other
        taken |= {line for line in one.splitlines() if line.endswith("chosen")}
    assert {line.split()[0] for line in taken} == {"75%"}
    assert {line.split()[1] for line in taken} == {"all", "if"}


# Saving all activations takes 0.77e-3 for 256 rows of `Wide`, and 0.66e-3 for 16 rows of tokens.
ROWS_GB = 0.85e-3


def _tokens(rng: torch.Generator, rows: int) -> Tensor:
    return GPT.batch(rng, rows, length=24)


def _train_on(twins: Twins, step: int, rows: tuple[int, int], batch: Any = _tokens) -> None:
    twins.zero_grad()
    twins.backward([batch(generator(step, rank), rows=n) for rank, n in enumerate(rows)])
    twins.check()


def _grow(dynamic: bool | None) -> tuple[list[str], str]:
    """Train on batches of changing sizes; return the choice for each graph, and the summary."""
    torch.manual_seed(0)
    schedule = graphshard.SchedulePolicy(
        auto=True, memory_budget_gb=ROWS_GB, node_cost=lambda _: SLOW_US
    )
    twins = Twins(Wide(), schedule=schedule, dynamic=dynamic)
    # The third batch has a new size on the first rank only. With static sizes, that rank recompiles
    # and must gather the same as its peer, which runs its first graph.
    for step, rows in enumerate([(256, 256), (384, 384), (192, 256), (384, 384)]):
        _train_on(twins, step, rows, Wide.batch)
    for graph in twins.backend._graphs:
        assert max(dump.totals.peak_bytes for dump in graph.dumps) <= ROWS_GB * 1e9
    savings = [str(graph.settings.saving) for graph in twins.backend._graphs]
    return savings, twins.backend.summary()


def test_larger_batch_saves_less() -> None:
    # Ranks make the same choice for every batch size.
    (ours, static), (theirs, _) = ranks.run(2, _grow, False)
    small, large, smaller = ours
    assert small == smaller != large and theirs == [small, large]
    (ours, dynamic), (theirs, _) = ranks.run(2, _grow, None)
    assert ours == theirs == [small, large]
    for summary in (static, dynamic):
        assert "for inputs of 256x64, within" in summary
        assert "for inputs of 384x64, within" in summary
    assert "The graph accepts other input sizes" not in static
    assert dynamic.count("The graph accepts other input sizes") == 1


class OutOfMemory(RuntimeError):
    pass


def _fail_at_first() -> str:
    """Make the first rank fail once while trying settings, then train; return the error."""
    raised = []

    def node_cost(_: object) -> float:
        if not raised and dist.get_rank() == 0:
            raised.append(1)
            raise OutOfMemory("out of memory")
        return SLOW_US

    schedule = graphshard.SchedulePolicy(
        auto=True, memory_budget_gb=ROWS_GB, node_cost=node_cost, regions=True
    )
    twins = Twins(GPT(layers=2), schedule=schedule)
    with pytest.raises(Exception) as caught:
        _train_on(twins, 0, (16, 16))
    _train_on(twins, 0, (8, 8))
    assert all(plan.regions.num_calls for plan in twins.backend.plans)
    return str(caught.value)


def test_error_while_trying_settings_is_raised_on_all_ranks() -> None:
    # After the error, a smaller batch trains, with layers compiled once as regions.
    first, other = ranks.run(2, _fail_at_first)
    assert "out of memory" in first
    assert "the first rank could not plan what forward saves: OutOfMemory('out of" in other


def _train_layers_with_literals() -> None:
    torch.manual_seed(0)
    schedule = graphshard.SchedulePolicy(auto=True, memory_budget_gb=1)
    make_layers, _ = CASES["literals"]
    twins = Twins(Model(make_layers()), schedule=schedule)
    twins.train(lambda rng: torch.randn(4, DIM, generator=rng), steps=1)
    (graph,) = twins.backend._graphs
    assert graph.tried and not graph.num_shared_layers


def test_layers_that_cannot_share_a_trace_are_inlined_on_all_ranks() -> None:
    ranks.run(2, _train_layers_with_literals)


def _uneven() -> tuple[list[str], str]:
    """Train on batches of two sizes, with a larger batch on the second rank.

    Returns:
        The choice for each graph, and the error for a batch that does not fit.
    """
    torch.manual_seed(0)
    schedule = graphshard.SchedulePolicy(
        auto=True, memory_budget_gb=ROWS_GB, node_cost=lambda _: SLOW_US
    )
    twins = Twins(GPT(), schedule=schedule, dynamic=False)
    with pytest.raises(Exception) as caught:
        _train_on(twins, 0, (12, 200))
    for step, rows in enumerate([(12, 24), (12, 32), (12, 24)]):
        _train_on(twins, step, rows)
    with pytest.raises(Exception, match="no strategy that auto=True tries fits"):
        _train_on(twins, 0, (200, 200))
    _train_on(twins, 0, (12, 24))  # runs the earlier graphs
    for graph in twins.backend._graphs:
        assert max(dump.totals.peak_bytes for dump in graph.dumps) <= ROWS_GB * 1e9
    return [str(g.settings.saving) for g in twins.backend._graphs], str(caught.value)


def test_rank_with_larger_batch_saves_less() -> None:
    # Only the rank with the larger batch recompiles, and it gathers the same as its peer. Smaller
    # batches train even after one that does not fit.
    (ours, error), (theirs, own_error) = ranks.run(2, _uneven)
    assert len(ours) == 1 and len(theirs) == len({*ours, *theirs}) - 1 == 2
    assert all("all_params=True" in saving for saving in [*ours, *theirs])
    assert "on another rank, with a larger batch, nothing fits into the budget" in error
    assert "no strategy that auto=True tries fits" in own_error


WIDE_GB = 0.18e-3
"""Memory budget that suffices to keep all parameters with 16 rows, but not with 64."""


def _keep_fewer(steps: list[tuple[int, int]]) -> tuple[list[bool], list[str]]:
    """Train on batches of ``steps[i][rank]`` rows.

    Returns:
        For each graph, whether all parameters are kept unsharded; and graphshard's warnings.
    """
    torch.manual_seed(0)
    schedule = graphshard.SchedulePolicy(
        auto=True, memory_budget_gb=WIDE_GB, node_cost=lambda _: SLOW_US
    )
    twins = Twins(Wide(), schedule=schedule, dynamic=False)
    with graphshard_warnings() as texts:
        for step, rows in enumerate(steps):
            _train_on(twins, step, rows, Wide.batch)
    savings = [graph.settings.saving for graph in twins.backend._graphs]
    return [saving is not None and saving.all_params for saving in savings], texts


def test_fewer_parameters_are_kept_if_recomputing_is_not_enough() -> None:
    # The first graph keeps fewer if any rank must, a later graph only if all ranks must.
    (ours, _), (theirs, texts) = ranks.run(2, _keep_fewer, [(16, 64)])
    assert ours == theirs == [False]
    assert "of this rank needs 0.000229 GB, because its gathers are planned" in texts[-1]
    # The graphs for 16 rows, which keep more, are then replaced: with batches of different sizes,
    # ranks would gather different parameters.
    steps = [(16, 16), (64, 64), (16, 64), (16, 16)]
    (ours, _), (theirs, texts) = ranks.run(2, _keep_fewer, steps)
    assert ours == theirs == [True, False, False] and not texts
