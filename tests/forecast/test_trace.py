"""Traced steps are those that the backend compiles, and shallow ones deepen to them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard._torch.distributed import fake_ranks
from graphshard.cost.devices import find_hardware
from graphshard.forecast.changes import KEPT, find_changes
from graphshard.forecast.cluster import cluster
from graphshard.forecast.deepen import Layers, NotPeriodicError, deepen
from graphshard.forecast.planned_step import plan_step
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import Ranks, TracedStep, UntraceableError, trace
from graphshard.forecast.workload import recompute_layers

HARDWARE = find_hardware("H100")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks and a head; returns its loss."""

    def __init__(self, num_layers: int, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, 96, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _ids() -> Tensor:
    return torch.zeros((2, 32), dtype=torch.int64)


def trace_stack(num_layers: int, recipe: Recipe, ranks: int = 8) -> TracedStep:
    return trace(
        lambda: (Stack(num_layers), (_ids(),)),
        recipe.ranks(ranks),
        HARDWARE,
        recipe.traced_options(),
        recompute_layers if recipe.recompute else lambda model: None,
    )


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(dtype="fp8", recompute=True),
        Recipe("hsdp:4"),
        Recipe("hpz:2"),
        Recipe("ddp"),
    ],
    ids=lambda recipe: f"{recipe.strategy} {recipe.dtype}",
)
def test_a_deepened_step_equals_the_traced_one(recipe: Recipe) -> None:
    short, longer, deep = (trace_stack(n, recipe) for n in (3, 4, 7))
    made = deepen(short, longer, 4, Layers("blocks"))
    assert dataclasses.asdict(made.held) == pytest.approx(dataclasses.asdict(deep.held))
    for ours, theirs in zip(made.graphs, deep.graphs, strict=True):
        assert ours.num_flops == pytest.approx(theirs.num_flops)
        assert ours.input_bytes == theirs.input_bytes
        assert ours.problem.other_bytes == theirs.problem.other_bytes
        assert ours.problem.between_bytes == theirs.problem.between_bytes
        for name, us in theirs.compute_us.items():
            assert ours.compute_us[name] == pytest.approx(us)
        pairs = zip(ours.problem.transfers, theirs.problem.transfers, strict=True)
        for mine, traced in pairs:
            assert dataclasses.replace(mine, param=None) == dataclasses.replace(traced, param=None)
            if mine.param is not None and traced.param is not None:
                assert ours.params[mine.param].fqn == theirs.params[traced.param].fqn


def test_a_rank_that_is_alone_keeps_its_parameters_while_backward_runs() -> None:
    traced = trace_stack(3, Recipe(dtype="float32"), 1)
    backward = traced.graphs[1]
    assert not backward.problem.transfers and backward.input_bytes
    assert backward.problem.between_bytes[-1] == backward.input_bytes + traced.held.trained


def test_layers_that_differ_do_not_deepen() -> None:
    def uneven(num_layers: int) -> TracedStep:
        model = Stack(num_layers)
        for i, block in enumerate(model.blocks):
            block.up = nn.Linear(64, 64 * (i + 1), bias=False)
            block.down = nn.Linear(64 * (i + 1), 64, bias=False)
        recipe = Recipe()
        return trace(lambda: (model, (_ids(),)), Ranks(1, 8), HARDWARE, recipe.traced_options())

    with pytest.raises(NotPeriodicError, match="layer by layer"):
        deepen(uneven(3), uneven(4), 4, Layers("blocks"))


@pytest.mark.parametrize("strategy", ["zero3", "hsdp:4"])
def test_plans_are_those_of_the_backend(strategy: str) -> None:
    recipe = Recipe(strategy=strategy, dtype="float32")
    traced = trace_stack(3, recipe)
    planned = plan_step(traced, recipe, cluster("H100", 8))
    ranks = recipe.ranks(8)
    with fake_ranks(8):
        shape = tuple(ranks) if ranks.replicas > 1 else (ranks.shards,)
        mesh = dist.device_mesh.init_device_mesh("cpu", shape)
        schedule = graphshard.SchedulePolicy(hardware="H100")
        backend = graphshard.backend(mesh, schedule=schedule, sync_module_states=False)
        torch.compile(Stack(3), backend=backend, dynamic=False)(_ids()).backward()
    torch.compiler.reset()
    for ours, theirs in zip(planned.dumps, backend.plans, strict=True):
        groups = [(b.kind, b.num_bytes, b.world, b.launch, b.wait) for b in ours.plan.buckets]
        assert groups == [(b.kind, b.num_bytes, b.world, b.launch, b.wait) for b in theirs.buckets]
        assert ours.plan.problem.compute_us == pytest.approx(theirs.problem.compute_us)
        assert ours.plan.problem.other_bytes == theirs.problem.other_bytes
        assert ours.plan.problem.between_bytes == theirs.problem.between_bytes


def test_a_trace_leaves_nothing_behind() -> None:
    model, before = Stack(2), torch.get_rng_state()
    kinds = {name: type(param) for name, param in model.named_parameters()}
    forecast = graphshard.plan(model, (_ids(),), graphshard.cluster("H100", 8))
    assert forecast.time.step_us > 0 and forecast.fits
    assert not dist.is_initialized()
    assert kinds == {name: type(param) for name, param in model.named_parameters()}
    assert type(model) is Stack
    assert torch.equal(before, torch.get_rng_state())


class Experts(nn.Module):
    """Stacked experts, all of which a token takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,edh->bh", x, self.up).square().mean()


def test_padding_is_told_of() -> None:
    with torch.device("meta"):
        model = Experts()
    padded = graphshard.plan(model, (torch.zeros(8, 1024),), graphshard.cluster("H100", 8))
    assert padded.padding is not None and padded.padding in str(padded)
    assert "up has fewer rows (2) than the 8 ranks that share them" in padded.padding
    assert "a rank holds 4 MB of parameters, 4 times the even share of 1 MB" in padded.padding
    assert padded.padding.endswith("; hsdp:2 would send no padding of it")
    evenly = graphshard.plan(
        model, (torch.zeros(8, 1024),), graphshard.cluster("H100", 8), strategy="hsdp:2"
    )
    assert evenly.padding is None and evenly.memory.parameters == padded.memory.parameters


def test_values_of_tensors_are_refused() -> None:
    class Chooses(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * ids.nonzero().shape[0]

    with pytest.raises(UntraceableError, match="reads values of tensors"):
        graphshard.plan(Chooses(1), (_ids(),), graphshard.cluster("H100", 8))


def test_a_budget_is_kept_and_what_breaks_it_is_no_advice() -> None:
    machine, traced = cluster("H100", 8), trace_stack(4, Recipe())
    free = plan_step(traced, Recipe(), machine).memory
    tight = Recipe(budget_gb=free.allocated / 1e9)
    assert plan_step(traced, tight, machine).memory.allocated <= free.allocated
    plans = [find_changes(traced, recipe, machine) for recipe in (Recipe(), tight)]
    kept = [[change.memory_bytes for change in p if change.what == KEPT] for p in plans]
    assert kept[0] and all(bytes_ <= plans[1][0].memory_bytes for bytes_ in kept[1])
    with pytest.raises(ValueError, match="alone need"):
        plan_step(traced, Recipe(budget_gb=1e-5), machine)
