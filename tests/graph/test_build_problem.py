from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind
from graphshard.ops.markers import unshard
from graphshard.ops.nodes import memory_bytes
from graphshard.passes.build_problem import build_problem
from graphshard.passes.normalize import normalize
from graphshard.passes.saving import note_held_bytes
from graphshard.planning.plan import Problem
from tests.graph.builder import CONTEXT, Builder, add, mul, t, targets


def _two_layers(group: str) -> fx.Graph:
    build = Builder(group)
    x = build.primal(8, 8)
    first, second = (build.unshard(build.primal(1, 8), 8) for _ in range(2))
    turned = build.call(t, second)
    build.module(build.call(mul, build.call(mul, x, first), turned))
    return build.graph


def _normalize(graph: fx.Graph) -> None:
    assert graph.owning_module is not None
    normalize(graph.owning_module, CONTEXT)


def test_normalize_moves_gathers_to_first_use(group: str) -> None:
    graph = _two_layers(group)
    assert targets(graph) == [unshard, unshard, t, mul, mul]
    for _ in range(2):
        _normalize(graph)
        assert targets(graph) == [unshard, mul, unshard, t, mul]


def test_normalize_adds_value_of_random_op_without_inputs(group: str) -> None:
    # AOTAutograd stores no value for an operator wrapped in ``run_and_save_rng_state``.
    build = Builder(group)
    x = build.primal(8, 8)
    save_state = torch.ops.higher_order.run_and_save_rng_state
    arguments = (torch.ops.aten.rand.default, [4])
    noise = build.graph.call_function(save_state, arguments, {"device": torch.device("cpu")})
    build.module(build.call(mul, x, x))
    _normalize(build.graph)
    _, values = noise.meta["val"]
    assert isinstance(values, FakeTensor) and values.shape == (4,)
    build_problem(build.graph, GraphKind.FORWARD, CostModel(HARDWARE["cpu"]), {})


def test_build_problem_leaves_graph_unchanged(group: str) -> None:
    graph = _two_layers(group)
    _normalize(graph)
    before = str(graph)
    cost_model = CostModel(HARDWARE["cpu"])
    first, second = (build_problem(graph, GraphKind.FORWARD, cost_model, {}) for _ in range(2))
    assert str(graph) == before and first.problem == second.problem
    assert [node.target for node in first.steps] == [mul, t]
    assert [node.name for node in first.steps] == list(first.problem.steps)
    assert [transfer.due for transfer in first.problem.transfers] == [0, 1]
    assert first.step_of[graph.output_node()] == 1


def test_returned_views_move_to_their_sources(group: str) -> None:
    build = Builder(group)
    x = build.primal(8, 8)
    product = build.call(mul, x, x)
    build.call(mul, product, x)
    view = build.call(t, build.call(t, product))
    build.module(view)
    for _ in range(2):
        _normalize(build.graph)
        assert targets(build.graph) == [mul, t, t, mul] and product.next.next is view


MM, RELU = torch.ops.aten.mm.default, torch.ops.aten.relu.default
SIZE = 64 * 64 * 4
"""Bytes of a 64 x 64 float32 matrix, the tensor in most tests below."""


def _problem(build: Builder) -> Problem:
    _normalize(build.graph)
    return build_problem(build.graph, GraphKind.FORWARD, CostModel(HARDWARE["cpu"]), {}).problem


def test_only_values_used_later_are_alive_between_steps(group: str) -> None:
    build = Builder(group)
    x = build.primal(64, 64)
    first = build.call(MM, x, x)
    second = build.call(MM, first, first)
    gathered = build.unshard(build.primal(8, 64), 64)
    build.module(build.call(MM, second, gathered))
    graph = _problem(build)
    shard = SIZE // 8
    assert list(graph.fixed_bytes) == [3 * SIZE + shard, 3 * SIZE + shard]
    # x; x and `second`; x and the result; plus the shard each time.
    assert list(graph.fixed_boundary_bytes) == [SIZE + shard, 2 * SIZE + shard, 2 * SIZE + shard]


def test_parameter_is_freed_after_its_last_use_in_step(group: str) -> None:
    # The second product reuses the memory of the parameter.
    build = Builder(group)
    x = build.primal(64, 64)
    first = build.call(MM, x, build.unshard(build.primal(8, 64), 64))
    build.module(first, build.call(MM, first, first))
    assert _problem(build).fixed_bytes == (2 * SIZE + SIZE // 8,)


def test_each_operator_result_is_freed_after_its_last_use(group: str) -> None:
    # Nothing reads the indices that the operator also returns.
    build = Builder(group)
    both = build.call(torch.ops.aten.sort.default, build.primal(64, 64))
    ordered = build.call(operator.getitem, both, 0)
    build.module(build.call(MM, ordered, ordered))
    graph = _problem(build)
    assert graph.fixed_bytes == (2 * SIZE + 2 * SIZE,)
    assert graph.fixed_boundary_bytes == (SIZE, 2 * SIZE)


def test_saved_parameter_bytes_include_padding(group: str) -> None:
    # A parameter of five rows is padded to eight, one row per rank.
    forward, backward = Builder(group), Builder(group)
    saved = forward.call(t, forward.unshard(forward.primal(1, 64), 5))
    gm = forward.module(saved)
    kept = backward.tangent(64, 5)
    kept.name = saved.name
    other = backward.tangent(64, 64)
    context = replace(CONTEXT, backward=backward.module(backward.call(MM, other, kept)))
    note_held_bytes(gm, context)
    cost_model = CostModel(HARDWARE["cpu"])
    problem = build_problem(backward.graph, GraphKind.BACKWARD, cost_model, {}).problem
    assert problem.fixed_boundary_bytes[0] == SIZE + 64 * 8 * 4


def test_inputs_and_results_of_fused_kernel_are_alive_at_once(group: str) -> None:
    # The kernel reads the product and writes the result: both are alive while it runs.
    build = Builder(group)
    x = build.primal(64, 64)
    inside = build.call(RELU, build.call(MM, x, x))
    build.module(build.call(mul, inside, inside))
    assert _problem(build).fixed_bytes == (3 * SIZE,)


def test_kernels_delayed_by_late_matmul_run_before_graph_ends(group: str) -> None:
    # One kernel needs the second product, which is computed late; two more read its results.
    build = Builder(group)
    x = build.primal(64, 64)
    first = build.call(RELU, build.call(MM, x, x))
    mean = build.call(torch.ops.aten.mean.dim, first, [0])
    doubled = build.call(mul, mean, 2.0)
    both = build.call(add, first, build.call(MM, x, x))
    build.module(doubled, both)
    graph = _problem(build)
    assert graph.fixed_bytes[0] >= 3 * SIZE and graph.fixed_boundary_bytes[-1] == 2 * SIZE + 64 * 4


def test_replicated_parameter_in_another_dtype_is_a_copy(group: str) -> None:
    build = Builder(group)
    x = build.primal(64, 64, dtype=torch.bfloat16)
    weight = build.primal(64, 64)
    copied = build.replicate(weight, dtype=torch.bfloat16)
    build.module(build.call(MM, x, copied))
    graph = _problem(build)
    # x, the parameter, its copy of half the size, and the result.
    assert list(graph.fixed_bytes) == [SIZE // 2 + SIZE + SIZE // 2 + SIZE // 2]
    assert list(graph.fixed_boundary_bytes) == [SIZE // 2 + SIZE, SIZE // 2 + SIZE + SIZE // 2]


def test_expanded_tensor_takes_memory_of_one_element(group: str) -> None:
    build = Builder(group)
    x = build.primal(64, 64)
    key = build.primal(64, 64)
    key.meta["val"] = key.meta["val"][:1, :1].expand(64, 64)
    build.module(build.call(mul, x, key))
    graph = _problem(build)
    assert graph.fixed_bytes == (2 * SIZE + 4,)
    assert memory_bytes(torch.empty(3).expand(0, 3)) == memory_bytes(torch.empty(3, 0)) == 0
    assert memory_bytes(torch.empty(3).expand(2, 3)) == 12
