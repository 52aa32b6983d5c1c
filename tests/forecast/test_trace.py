"""Traced steps equal the backend's; steps extrapolated from few layers equal traced ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard._torch.distributed import fake_ranks
from graphshard.cost.devices import find_hardware
from graphshard.fake_mesh import Ranks
from graphshard.forecast.cluster import cluster
from graphshard.forecast.deepen import Layers, NotPeriodicError, deepen
from graphshard.forecast.derive import (
    Depth,
    ShallowCopies,
    on_host,
    trace_all_depths,
    trace_step,
)
from graphshard.forecast.estimate import bytes_by_kind, other_graph_bytes
from graphshard.forecast.largest import _Grower
from graphshard.forecast.planned_step import KEPT, _scaled_links, find_changes, plan_step
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.search import RESERVED, search
from graphshard.forecast.trace import TracedStep, trace
from graphshard.forecast.workload import Workload, recompute_layers, recomputed_layers
from graphshard.kinds import HOST_COPIES, TransferKind
from graphshard.planning.live_bytes import fixed_by_point

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


@functools.cache
def trace_stack(num_layers: int, recipe: Recipe, ranks: int = 8) -> TracedStep:
    return trace(
        lambda: (Stack(num_layers), (_ids(),)),
        recipe.ranks(ranks),
        HARDWARE,
        recipe.traced_options(),
        lambda model: recompute_layers(model, recipe.recompute),
    )


def assert_same_step(made: TracedStep, traced: TracedStep) -> None:
    assert dataclasses.asdict(made.held) == pytest.approx(dataclasses.asdict(traced.held))
    for ours, theirs in zip(made.graphs, traced.graphs, strict=True):
        assert 0 < ours.problem.peak_us == pytest.approx(theirs.problem.peak_us)
        assert ours.input_bytes == theirs.input_bytes
        assert ours.problem.fixed_bytes == theirs.problem.fixed_bytes
        assert ours.problem.fixed_boundary_bytes == theirs.problem.fixed_boundary_bytes
        for name, us in theirs.compute_us.items():
            assert ours.compute_us[name] == pytest.approx(us)
        pairs = zip(ours.problem.transfers, theirs.problem.transfers, strict=True)
        for mine, other in pairs:
            assert dataclasses.replace(mine, param=None) == dataclasses.replace(other, param=None)
            if mine.param is not None and other.param is not None:
                assert ours.params[mine.param].fqn == theirs.params[other.param].fqn


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe("hsdp:4", "fp8", recompute=True),
        Recipe("hpz:2"),
        Recipe("ddp"),
    ],
    ids=lambda recipe: f"{recipe.strategy} {recipe.dtype}",
)
def test_extrapolated_step_equals_traced_step(recipe: Recipe) -> None:
    short, longer, deep = (trace_stack(n, recipe) for n in (3, 4, 5))
    assert_same_step(deepen(short, longer, 2, Layers("blocks")), deep)


def test_extrapolated_step_with_two_kinds_of_layers_equals_traced_step() -> None:
    recipe = Recipe(recompute=0.5)
    workload = Workload("stack", lambda n: (Stack(n or 10), (_ids(),)), 64, num_layers=10)
    derived = trace_step(workload, recipe, cluster("H100", 8))
    (note,) = derived.notes
    assert note.startswith("6, 7 and 8 layers were traced")
    assert_same_step(derived, trace_stack(10, recipe))


@pytest.mark.parametrize(
    ("strategy", "num_layers", "gpus"),
    [
        ("zero3", 2, 8),  # shallow copies have at least three layers
        ("hsdp:4", 3, 20),  # on 20 shards, parameters are padded
    ],
)
def test_largest_batch_is_planned_for_own_layers_and_strategy(
    strategy: str, num_layers: int, gpus: int
) -> None:
    machine = cluster("H100", gpus, gpus // 4)
    workload = Workload("stack", lambda n: (Stack(n or 2), (_ids(),)), 64, num_layers=num_layers)
    grower = _Grower(lambda factor, size: workload, Recipe(), machine, 1, print)
    assert strategy in grower.strategies
    step = grower._own_step(workload, strategy)
    assert_same_step(step, trace_stack(num_layers, Recipe(strategy), gpus))


def test_recipe_code_recomputes_same_layers() -> None:
    recipe, by_hand, ours = Recipe(recompute=0.4), Stack(5), Stack(5)
    recompute_layers(ours, recipe.recompute)
    code = recipe.code(8, recomputed=recomputed_layers(by_hand, recipe.recompute))
    loop = "\n".join(line for line in code.splitlines() if line.startswith(("for ", "    ")))
    exec(loop, {"model": by_hand, "functools": functools, "checkpoint": checkpoint})
    recomputed = [
        [isinstance(b.forward, functools.partial) for b in m.blocks] for m in (by_hand, ours)
    ]
    assert recomputed == [[True, True, False, False, False]] * 2


@pytest.mark.parametrize("strategy", ["zero3", "hsdp:4"])
def test_on_host_equals_step_traced_with_offload(strategy: str) -> None:
    on_device = trace_stack(1, Recipe(strategy))
    assert_same_step(on_host(on_device), trace_stack(1, Recipe(strategy, offload=True)))


def test_offload_takes_host_memory_and_time() -> None:
    recipe, machine = Recipe(offload=True, accumulate=2), cluster("H100", 8)
    traced = trace_stack(3, recipe)
    planned = plan_step(traced, recipe, machine)
    memory, held = planned.memory, traced.held
    assert memory.parameters == memory.gradients == memory.optimizer == 0
    # Parameters, gradients of two microbatches, two states of Adam.
    assert memory.host == pytest.approx(5 * held.trained)
    # The optimizer takes seven passes over memory, adding two gradients takes three.
    host_us = machine.hardware.host_memory.us(10 * held.trained)
    assert planned.time.optimizer_us == pytest.approx(host_us)
    kinds = {bucket.kind for dump in planned.dumps for bucket in dump.plan.buckets}
    assert kinds.issuperset(HOST_COPIES)
    slow = dataclasses.replace(machine.hardware.host, peak=1e6)
    slower = dataclasses.replace(machine, hardware=dataclasses.replace(machine.hardware, host=slow))
    transfers = [t for graph in traced.graphs for t in graph.problem.transfers]
    # Shards are copied to the device for each gather, and back after each reduction.
    copied = sum(t.shard_bytes for t in transfers)
    exposed = plan_step(traced, recipe, slower).time.exposed_us - planned.time.exposed_us
    assert exposed == pytest.approx(2 * 1e6 * copied / slow.largest, rel=0.01)


def test_single_rank_holds_its_parameters_during_backward() -> None:
    traced = trace_stack(3, Recipe(dtype="float32"), 1)
    backward = traced.graphs[1]
    assert not backward.problem.transfers and backward.input_bytes
    assert backward.problem.fixed_boundary_bytes[-1] == backward.input_bytes + traced.held.trained


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("zero2")], ids=lambda r: r.strategy)
def test_activations_exclude_parameters_kept_unsharded(recipe: Recipe) -> None:
    traced = trace_stack(3, recipe)
    planned = plan_step(traced, recipe, cluster("H100", 8), keep_all=True)
    for graph, before in zip(planned.graphs, trace_stack(3, Recipe()).graphs, strict=True):
        kinds = bytes_by_kind(graph)
        fixed = [alive - graph.input_bytes for alive in fixed_by_point(before.problem)]
        assert kinds["activations"] == fixed and max(kinds["kept"]) > 0


def test_secondary_shards_are_kept_and_no_full_parameters() -> None:
    traced, slow = trace_stack(3, Recipe("hpz:2")), _scaled_links(cluster("H100", 8), rate=1e-4)
    planned = plan_step(traced, Recipe("hpz:2", budget_gb=70), slow)
    forward, backward = planned.graphs
    assert backward.problem.transfers == traced.graphs[1].problem.transfers
    gathers = [t for t in backward.problem.transfers if t.kind == TransferKind.ALL_GATHER]
    kept_bytes = sum(t.num_bytes for t in gathers) // 2
    assert forward.kept_bytes[-1] == backward.kept_bytes[0] == kept_bytes > 0
    zero3 = plan_step(trace_stack(3, Recipe()), Recipe(), slow)
    for graph, other in zip(planned.graphs, zero3.graphs):
        saved, expected = (bytes_by_kind(g)["activations"] for g in (graph, other))
        assert (saved[0], saved[-1]) == (expected[0], expected[-1]) and min(saved) >= 0


def test_different_layers_are_not_extrapolated() -> None:
    def uneven(num_layers: int) -> TracedStep:
        model = Stack(num_layers)
        for i, block in enumerate(model.blocks):
            block.up = nn.Linear(64, 64 * (i + 1), bias=False)
            block.down = nn.Linear(64 * (i + 1), 64, bias=False)
        recipe = Recipe()
        return trace(lambda: (model, (_ids(),)), Ranks(1, 8), HARDWARE, recipe.traced_options())

    with pytest.raises(NotPeriodicError, match="layer by layer"):
        deepen(uneven(3), uneven(4), 4, Layers("blocks"))


@pytest.mark.parametrize(
    "recipe",
    [Recipe(dtype="float32"), Recipe("hsdp:4", "float32"), Recipe(dtype="float32", offload=True)],
    ids=["zero3", "hsdp:4", "offload"],
)
def test_plans_equal_plans_of_backend(recipe: Recipe) -> None:
    traced = trace_stack(2, recipe)
    planned = plan_step(traced, recipe, cluster("H100", 8))
    ranks = recipe.ranks(8)
    with fake_ranks(8):
        mesh = dist.device_mesh.init_device_mesh("cpu", tuple(ranks.axes.values()))
        schedule = graphshard.SchedulePolicy(hardware="H100")
        options = {**recipe.options(), "schedule": schedule, "sync_module_states": False}
        backend = graphshard.backend(mesh, **options)
        torch.compile(Stack(2), backend=backend, dynamic=False)(_ids()).backward()
    torch.compiler.reset()
    for ours, theirs in zip(planned.dumps, backend.plans, strict=True):
        groups = [(b.kind, b.num_bytes, b.world, b.launch, b.wait) for b in ours.plan.buckets]
        assert groups == [(b.kind, b.num_bytes, b.world, b.launch, b.wait) for b in theirs.buckets]
        assert ours.plan.problem.compute_us == pytest.approx(theirs.problem.compute_us)
        assert ours.plan.problem.fixed_bytes == theirs.problem.fixed_bytes
        assert ours.plan.problem.fixed_boundary_bytes == theirs.problem.fixed_boundary_bytes


def test_trace_has_no_side_effects() -> None:
    model, before = Stack(2), torch.get_rng_state()
    kinds = {name: type(param) for name, param in model.named_parameters()}
    forecast = graphshard.plan(model, (_ids(),), graphshard.cluster("H100", 8))
    assert forecast.time.step_us > 0 and forecast.fits
    assert not dist.is_initialized()
    assert kinds == {name: type(param) for name, param in model.named_parameters()}
    assert type(model) is Stack
    assert torch.equal(before, torch.get_rng_state())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,edh->bh", x, self.up).square().mean()


def test_buffers_are_counted_once() -> None:
    class Buffered(nn.Linear):
        def __init__(self, num_rows: int) -> None:
            super().__init__(1024, 1024)
            self.register_buffer("table", torch.zeros(num_rows, 1024))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) + self.table.mean(0)).square().mean()

    large, small = (
        graphshard.plan(Buffered(n), (torch.zeros(8, 1024),), graphshard.cluster("H100", 8)).memory
        for n in (10_001, 1)
    )
    assert large.allocated - small.allocated == large.buffers - small.buffers == 10_000 * 4096


class Attention(nn.Module):
    def __init__(self, dropout: float, *, by_name: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.dropout, self.by_name = dropout, by_name

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if self.by_name:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, None, self.dropout, True)
        return out.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x) if self.by_name else checkpoint(self.attend, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("by_name", [True, False])
def test_dropout_of_attention_is_free_on_gpus(by_name: bool) -> None:
    def traced(dropout: float, device: str) -> TracedStep:
        model = Attention(dropout, by_name=by_name)
        options, inputs = Recipe().traced_options(), (torch.zeros(2, 512, 64),)
        return trace(lambda: (model, inputs), Ranks(1, 8), find_hardware(device), options)

    without, dropped = (traced(p, "H100") for p in (0.0, 0.1))
    assert_same_step(dropped, without)
    assert without.notes == ()
    assert dropped.notes == ("dropout of attention is free, since the flash kernel computes it",)
    without, dropped = (traced(p, "cpu") for p in (0.0, 0.1))
    (note,) = dropped.notes
    assert without.notes == () and note.startswith("attention with dropout holds all scores")
    times = [sum(sum(g.problem.compute_us) for g in t.graphs) for t in (without, dropped)]
    assert times[0] < times[1]


def test_padding_is_reported() -> None:
    with torch.device("meta"):
        model = Experts()
    padded = graphshard.plan(model, (torch.zeros(8, 1024),), graphshard.cluster("H100", 8))
    assert padded.padding is not None and padded.padding in str(padded)
    assert "up has fewer rows (2) than the 8 ranks that share them" in padded.padding
    assert "a rank holds 4 MB of parameters, 4 times the even share of 1 MB" in padded.padding
    assert padded.padding.endswith("; hsdp:2 would avoid this padding")
    evenly = graphshard.plan(
        model, (torch.zeros(8, 1024),), graphshard.cluster("H100", 8), strategy="hsdp:2"
    )
    assert evenly.padding is None and evenly.memory.parameters == padded.memory.parameters


def test_models_that_read_tensor_values_are_refused() -> None:
    class Chooses(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * ids.nonzero().shape[0]

    with pytest.raises(ValueError, match="size of a tensor depends on values"):
        graphshard.plan(Chooses(1), (_ids(),), graphshard.cluster("H100", 8))


class Broken(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        loss = super().forward(ids)
        torch._dynamo.graph_break()
        return loss * 2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))

    @torch.compiler.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class EagerEmbedding(Stack):
    @torch.compiler.disable
    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.look_up(ids)).square().mean()


class Halves(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x)).square().mean()


def test_parameters_kept_by_an_earlier_graph_are_counted() -> None:
    recipe = Recipe("zero2")
    model = Halves(2), (_ids(),)
    traced = trace(lambda: model, recipe.ranks(8), HARDWARE, recipe.traced_options())
    planned = plan_step(traced, recipe, cluster("H100", 8))
    first, _, *second = other_graph_bytes(planned.graphs)
    params = dict(model[0].blocks[0].named_parameters())
    del params["norm.bias"]  # backward does not need it
    kept_bytes = 2 * sum(param.numel() for param in params.values())  # in bfloat16
    assert first.kept == 0 and [other.kept for other in second] == [kept_bytes] * 2


def test_graph_breaks_are_noted() -> None:
    workload = Workload("broken", lambda n: (Broken(n or 9), (_ids(),)), 64, num_layers=9)
    broken, traced = trace_step(workload, Recipe(), cluster("H100", 8)).notes
    line = Broken.forward.__code__.co_firstlineno + 2
    assert broken.startswith(f"graph break at {__file__}:{line}: ")
    assert broken.endswith("; eager parts are not counted")
    assert traced.startswith("3 and 4 layers were traced")


def test_graph_that_runs_several_times_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a graph runs \d times .*\(forward of Blocks runs"):
        graphshard.plan(Blocks(), (torch.zeros(4, 64),), graphshard.cluster("H100", 8))


def test_parameters_read_outside_of_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reads a parameter, .*forward of Embedding"):
        graphshard.plan(EagerEmbedding(1), (_ids(),), graphshard.cluster("H100", 8))


def test_plan_keeps_budget_and_omits_changes_that_exceed_it() -> None:
    machine, traced = cluster("H100", 8), trace_stack(4, Recipe())
    free = plan_step(traced, Recipe(), machine).memory
    tight = Recipe(budget_gb=free.allocated / 1e9)
    assert plan_step(traced, tight, machine).memory.allocated <= free.allocated
    plans = [find_changes(traced, recipe, machine) for recipe in (Recipe(), tight)]
    kept = [[change.memory_bytes for change in p if change.what == KEPT] for p in plans]
    assert kept[0] and all(bytes_ <= plans[1][0].memory_bytes for bytes_ in kept[1])
    with pytest.raises(ValueError, match="outside of the graphs need"):
        plan_step(traced, Recipe(budget_gb=1e-5), machine)


def test_search_continues_after_recipes_that_exceed_budget() -> None:
    def make_workload(size: int) -> Workload:
        ids = torch.zeros((size, 64), dtype=torch.int64)
        return Workload("stack", lambda n: (Stack(n or 2, 256), (ids,)), 64 * size)

    machine = cluster("A100-40GB", 8)
    zero3 = plan_step(trace_step(make_workload(1), Recipe(), machine), Recipe(), machine)
    budget_gb = 1.02 * zero3.memory.allocated / 1e9
    found = search(make_workload, 1, Recipe(budget_gb=budget_gb), machine)
    over = [candidate for candidate in found.candidates if not candidate.fits]
    assert over and {candidate.recipe.strategy for candidate in over} == {"ddp"}
    assert all(candidate.memory_bytes > budget_gb * 1e9 for candidate in over)
    assert found.best.recipe.strategy != "ddp"


def test_reductions_are_exchanged_on_request() -> None:
    machine, traced = cluster("H100", 8), trace_stack(4, Recipe())
    for recipe in (Recipe(), Recipe(reduce="exchange"), Recipe(reduce="exchange", budget_gb=70)):
        dumps = plan_step(traced, recipe, machine).dumps
        buckets = [bucket for dump in dumps for bucket in dump.plan.buckets]
        reductions = [b.exchanges for b in buckets if b.kind == TransferKind.REDUCE_SCATTER]
        assert set(reductions) == {recipe.reduce == "exchange"}
        assert ('reduce="exchange"' in recipe.code(8)) == (recipe.reduce == "exchange")


def test_search_recomputes_as_few_layers_as_possible() -> None:
    def make_workload(size: int) -> Workload:
        ids = torch.zeros((size, 4096), dtype=torch.int64)
        return Workload("stack", lambda n: (Stack(n or 24, 1024), (ids,)), 4096, num_layers=24)

    traced: list[ShallowCopies] = []

    def trace_copies(*args: Any) -> ShallowCopies:
        traced.append(trace_all_depths(*args))
        return traced[-1]

    machine = cluster("A100-40GB", 8, memory_gb=2.3)
    with mock.patch("graphshard.forecast.search.trace_all_depths", trace_copies):
        found = search(make_workload, 1, Recipe(), machine)
    (copies,) = traced
    by_recipe = {
        (c.recipe.strategy, c.recipe.recompute, c.recipe.offload): c for c in found.candidates
    }
    none, every, offloaded = (
        by_recipe["zero3", *key] for key in ((0, False), (1, False), (0, True))
    )
    assert every.fits and not none.fits and none.traced is not None
    assert none.memory_bytes - offloaded.memory_bytes > none.traced.held.trained
    assert none.step_us < offloaded.step_us
    (part,) = (c for key, c in by_recipe.items() if key[0] == "zero3" and 0 < key[1] < 1)
    assert part.fits and none.step_us < part.step_us < every.step_us
    number = round(part.recipe.recompute * 24)
    fewer = Recipe(recompute=(number - 1) / 24)
    step = copies.at_depth(Depth(number - 1, 25 - number))
    needed = plan_step(step, fewer, machine, refine=False).memory.total
    assert needed > (1 - RESERVED) * machine.memory_bytes >= part.memory_bytes
