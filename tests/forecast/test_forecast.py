"""Pure functions of forecasts: memory by kind, clusters, recipes, and Pareto fronts."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.cost.devices import HARDWARE, TABLE
from graphshard.fake_mesh import Ranks
from graphshard.forecast.cluster import cluster
from graphshard.forecast.command import gigabytes
from graphshard.forecast.deepen import Layers
from graphshard.forecast.derive import Depth, ShallowCopies
from graphshard.forecast.estimate import (
    PlannedGraph,
    bytes_by_kind,
    outside_of_graphs,
    peak_of_step,
)
from graphshard.forecast.largest import largest_that_fits
from graphshard.forecast.planned_step import keep_unsharded
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.report import bytes_by_step
from graphshard.forecast.search import (
    PlannedRecipe,
    _dtypes,
    _Search,
    microbatches,
    pareto_front,
    search,
)
from graphshard.forecast.trace import HeldMemory
from graphshard.forecast.workload import BatchShape, Workload
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.live_bytes import alive_by_point
from graphshard.planning.plan import Problem
from graphshard.planning.search import schedule_without_overlap
from tests.plan.problems import problem, problems, reduction

GIB = 1 << 30


@given(problems())
def test_memory_by_kind_adds_up(problem: Problem) -> None:
    buckets = schedule_without_overlap(problem)
    parts = bytes_by_kind(PlannedGraph(problem, buckets, input_bytes=7))
    total = [sum(kinds) + 7 for kinds in zip(*parts.values())]
    assert total == alive_by_point(problem, buckets)
    assert all(value >= 0 for name in ("gathered", "gradients") for value in parts[name])


@given(problems())
def test_memory_by_step_includes_peak(problem: Problem) -> None:
    graph = PlannedGraph(problem, schedule_without_overlap(problem), input_bytes=7)
    at_peak, by_step = (
        list(map(sum, zip(*of.values()))) for of in (bytes_by_kind(graph), bytes_by_step(graph))
    )
    assert len(by_step) == problem.num_steps and max(by_step) == max(at_peak)


def test_accumulated_gradients_are_counted_once() -> None:
    # With a graph break, the second backward graph runs first.
    pair = (
        PlannedGraph(dataclasses.replace(problem([1.0], []), graph=GraphKind.FORWARD), (), 0),
        PlannedGraph(problem([1.0], [reduction(0, 400, 0, 1)]), (), 0),
    )
    held = HeldMemory(parameters=200, trained=200, buffers=0, num_params=100, params_bytes=800)
    outside = outside_of_graphs(held, Recipe(optimizer="sgd"), GIB)
    for accumulate, gradients in ((1, 200), (2, 200)):
        assert peak_of_step(pair * 2, outside, accumulate=accumulate).gradients == gradients


@given(problems(), st.data())
def test_kept_parameters_take_memory_instead_of_a_gather(
    problem: Problem, data: st.DataObject
) -> None:
    gathers = [i for i, t in enumerate(problem.transfers) if t.kind == TransferKind.ALL_GATHER]
    kept = data.draw(st.lists(st.sampled_from(gathers), unique=True) if gathers else st.just([]))
    pairs = {i: problem.transfers[i] for i in kept}
    forward, backward = keep_unsharded(problem, problem, pairs)
    assert len(backward.transfers) == len(problem.transfers) - len(kept)
    assert forward.transfers == problem.transfers
    held = sum(t.num_bytes for t in pairs.values())
    assert forward.fixed_boundary_bytes[-1] == problem.fixed_boundary_bytes[-1] + held
    assert backward.fixed_boundary_bytes[0] == problem.fixed_boundary_bytes[0] + held


candidates = st.builds(
    PlannedRecipe,
    recipe=st.just(Recipe()),
    microbatch=st.just(1),
    step_us=st.floats(1, 1e6),
    memory_bytes=st.integers(1, 100),
    fits=st.just(True),
)


@given(st.lists(candidates, min_size=1))
def test_no_candidate_beats_the_pareto_front(candidates: list[PlannedRecipe]) -> None:
    front = pareto_front(candidates)
    for candidate in candidates:
        assert any(
            f.step_us <= candidate.step_us and f.memory_bytes <= candidate.memory_bytes
            for f in front
        )
    pairs = itertools.pairwise(front)
    assert all(a.step_us < b.step_us and a.memory_bytes > b.memory_bytes for a, b in pairs)


def test_partial_recomputation_is_derived_from_zero3() -> None:
    def make_workload(size: int) -> Workload:
        return Workload("stack", lambda n: None, 64, num_layers=8)  # type: ignore[arg-type, return-value]

    searching = _Search(make_workload, 1, Recipe(), cluster("H100", 8), str, ("bf16",), [])
    for strategy, recompute, step_us, fits in (
        ("zero3", 0.0, 9.0, False),
        ("hsdp:4", 0.0, 3.0, False),
        ("hsdp:4", 1.0, 5.0, True),
    ):
        recipe = Recipe(strategy, recompute=recompute)
        searching.candidates.append(PlannedRecipe(recipe, 1, step_us, GIB, fits))
    with (
        mock.patch(
            "graphshard.forecast.search.trace_all_depths", side_effect=KeyboardInterrupt
        ) as trace,
        pytest.raises(KeyboardInterrupt),
    ):
        searching.add_partial_recomputation("bf16")
    assert trace.call_args.args[1].strategy == "zero3"


def test_search_tries_a_single_microbatch_even_if_smaller_ones_do_not_fit() -> None:
    tried = []

    def add(self: _Search, base: Recipe, microbatch: int) -> list[PlannedRecipe]:
        tried.append(microbatch)
        return [PlannedRecipe(base, microbatch, 1.0, GIB, fits=microbatch in (1, 8))]

    with mock.patch.object(_Search, "add", add):
        search(mock.Mock(), 8, Recipe(), cluster("H100", 8), dtypes=["bf16"])
    assert tried == [1, 2, 8] * 2  # without and with recomputation


@given(st.integers(1, 4096))
def test_microbatches_divide_the_batch(size: int) -> None:
    sizes = microbatches(size)
    assert sizes[0] == 1 and sizes[-1] == size and all(size % part == 0 for part in sizes)


def test_cluster_sets_bandwidth_and_latency_of_its_network() -> None:
    h100 = cluster("H100", 64)
    assert (h100.num_nodes, h100.memory_bytes) == (8, 80 * GIB)
    halves = cluster("H100", 64, nodes=16)
    kind = TransferKind.ALL_GATHER
    assert halves.hardware.inter.bus[kind].peak == h100.hardware.inter.bus[kind].peak / 2
    wide = cluster("H100", 64, nodes=2).hardware  # more network cards than a node can use
    assert wide.inter.bus[kind].largest <= wide.intra.bus[kind].largest
    linked = cluster("H100", 16, link="100Gb/s,5us").hardware
    assert linked.inter.bus[kind].peak == pytest.approx(8 * 100e9 / 8)
    assert linked.inter.hop_us == 5
    assert cluster("H100", 16, link="0.1Tb/s").hardware.inter.bus == linked.inter.bus
    mine = dataclasses.replace(HARDWARE["H100"], name="mine")
    assert cluster(mine, 8, memory_gb=3).memory_bytes == 3e9


@pytest.mark.parametrize(("gpus", "nodes"), [(4, 1), (8, 1), (12, 2), (9, 3), (20, 4)])
def test_nodes_have_equal_sizes_by_default(gpus: int, nodes: int) -> None:
    found = cluster("H100", gpus)  # up to 8 in a node
    assert found.num_nodes == nodes
    assert nodes == 1 or found == cluster("H100", gpus, nodes)


@pytest.mark.parametrize("device", TABLE["gpus"])
@pytest.mark.parametrize("gpus", [1, 4, 32])
def test_link_of_device_is_the_default(device: str, gpus: int) -> None:
    link = f"{TABLE['gpus'][device]['network_gbit_per_s']}Gb/s"
    assert cluster(device, 2 * gpus, 2) == cluster(device, 2 * gpus, 2, link=link)


def test_measured_network_scales_with_node_size() -> None:
    kind, measured = TransferKind.ALL_GATHER, dataclasses.replace(HARDWARE["H100"], name="mine")
    peaks = [
        cluster(measured, 8 * gpus, 8, memory_gb=1).hardware.inter.bus[kind].peak
        for gpus in (1, 8, 64)
    ]
    assert 8 * peaks[0] == peaks[1] <= peaks[2] < 2 * peaks[1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": "V100", "gpus": 8}, "V100.*must be one of"),
        ({"device": "H100", "gpus": 0}, "gpus=0"),
        ({"device": "H100", "gpus": 10**12}, "must be an integer from 1 to 1000000"),
        ({"device": "H100", "gpus": 11}, "gpus=11: cannot be divided into equal nodes of 2 to 8 "),
        ({"device": "H100", "gpus": 8, "nodes": 3}, "divides gpus=8"),
        ({"device": "H100", "gpus": 8, "link": "fast"}, "100Gb/s,5us"),
        ({"device": "H100", "gpus": 8, "link": "0Gb/s"}, "link='0Gb/s': the bandwidth must be"),
        ({"device": "cpu", "gpus": 2}, "memory of 'cpu' is not known"),
        ({"device": "H100", "gpus": 8, "memory_gb": -1}, "memory_gb=-1"),
    ],
)
def test_invalid_clusters_are_refused(arguments: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        cluster(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "hsdp:4", "hpz:2", "ddp"])
def test_recipe_code_imports_all_names_it_uses(strategy: str) -> None:
    recipe = Recipe(strategy, "bf16" if strategy == "ddp" else "fp8", recompute=True)
    part = Recipe(strategy, recompute=0.5, offload=strategy != "ddp", tp=2)
    assert "memory_budget_gb=0.049)" in recipe.code(16, memory_budget_gb=0.0499)
    recomputed = ["model.layers[:2]", "model[1].layers[:3]"]
    for code in (recipe.code(16, memory_budget_gb=12.3), part.code(16, recomputed=recomputed)):
        tree, imported = ast.parse(code), dict[str, object](model=None)
        lines = [
            ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        exec("\n".join(lines), imported)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in names} - stored <= set(imported)
        assert set(imported) - {"__builtins__"} <= {node.id for node in names}
    assert recipe.ranks(16) == (Ranks(4, 4) if strategy == "hsdp:4" else Ranks(1, 16))


@pytest.mark.parametrize(
    ("device", "tp", "tried", "obstacle"),
    [
        ("H100", 1, ["bf16", "fp8"], ""),
        ("H100", 2, ["bf16"], "split"),
        ("A10G", 1, ["bf16"], "A10G"),
    ],
)
def test_search_tries_precisions_of_device(
    device: str, tp: int, tried: list[str], obstacle: str
) -> None:
    refused: list[str] = []
    assert _dtypes(Recipe(tp=tp), cluster(device, 8), refused) == tried
    assert len(refused) == 2 - len(tried) and all(obstacle in text for text in refused)


def test_invalid_recipes_and_batches_are_refused() -> None:
    for arguments in ({"strategy": "zero4"}, {"dtype": "int4"}, {"optimizer": "lion"}):
        with pytest.raises(ValueError, match=next(iter(arguments.values()))):
            Recipe(**arguments)
    with pytest.raises(ValueError, match="cannot use fp8"):
        Recipe("ddp", "fp8")
    with pytest.raises(ValueError, match=r"recompute=1\.5: must be a number"):
        Recipe(recompute=1.5)
    with pytest.raises(ValueError, match="stay on the GPU; use a strategy that shards"):
        Recipe("ddp", offload=True)
    for budget_gb in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be a positive number of GB"):
            Recipe(budget_gb=budget_gb)
    with pytest.raises(ValueError, match="is unknown; use bf16"):
        Recipe(dtype="fp8", offload=True)
    with pytest.raises(ValueError, match="3 must divide the number of GPUs, 16"):
        Recipe("hsdp:3").ranks(16)
    assert BatchShape.parse("2x8192") == BatchShape(2, 8192) and BatchShape.parse(
        "64"
    ) == BatchShape(64)
    for text in ("2x8192", "64"):
        assert str(BatchShape.parse(text)) == text
    for text in ("2x", "0x5", "1x2x3", "many"):
        with pytest.raises(ValueError, match="samples x tokens"):
            BatchShape.parse(text)
    assert gigabytes("--budget", "72.5GB") == 72.5
    with pytest.raises(ValueError, match="72GB"):
        gigabytes("--budget", "lots")


@pytest.mark.parametrize(("layers", "nearest"), [(3, 20), (25, 20), (26, 26), (31, 26)])
def test_nearest_depth_adds_whole_periods(layers: int, nearest: int) -> None:
    copies = ShallowCopies([], Layers("layers", period=6), Depth(0, 20))
    assert copies.nearest(Depth(0, layers)) == Depth(0, nearest)


def test_shifted_changes_layer_number() -> None:
    layers = Layers("model.layers")
    assert layers.shifted("model.layers.3.mlp.0.weight", 9) == "model.layers.12.mlp.0.weight"
    assert layers.shifted("model.norm.weight", 9) == "model.norm.weight"


@given(
    st.integers(1, 50),
    st.integers(0, 1000),
    st.integers(0, 3000),
    st.integers(1, 8),
    st.integers(0, 200),
)
def test_largest_that_fits_is_maximal_within_limit(
    slope: int, offset: int, spare: int, least: int, more: int
) -> None:
    def memory_of(number: int) -> int:
        return offset + slope * number + number * number // 7

    limit = offset + spare
    found = largest_that_fits(memory_of, limit, least, least + more)
    if found is None:
        assert memory_of(least) > limit
    else:
        assert least <= found <= least + more and memory_of(found) <= limit
        assert found == least + more or memory_of(found + 1) > limit
