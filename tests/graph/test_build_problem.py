"""Normalising a graph twice is as good as once, and reading it as a problem changes nothing."""

from __future__ import annotations

from torch import fx

from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind
from graphshard.ops.markers import unshard
from graphshard.passes.activation_offload import raise_saved_views
from graphshard.passes.build_problem import build_problem
from graphshard.passes.normalise import normalise
from tests.graph.builder import Builder, mul, t, targets


def _two_layers(group: str) -> fx.Graph:
    build = Builder(group)
    x = build.primal(8, 8)
    first, second = (build.unshard(build.primal(1, 8), 8) for _ in range(2))
    turned = build.call(t, second)
    build.module(build.call(mul, build.call(mul, x, first), turned))
    return build.graph


def test_parameters_are_gathered_where_they_are_used_first(group: str) -> None:
    graph = _two_layers(group)
    assert targets(graph) == [unshard, unshard, t, mul, mul]
    for _ in range(2):
        normalise(graph)
        assert targets(graph) == [unshard, mul, unshard, t, mul]


def test_a_reading_leaves_the_graph_as_it_is(group: str) -> None:
    graph = _two_layers(group)
    normalise(graph)
    before = str(graph)
    cost_model = CostModel(HARDWARE["cpu"])
    first, second = (build_problem(graph, GraphKind.FORWARD, cost_model, {}) for _ in range(2))
    assert str(graph) == before and first.problem == second.problem
    assert [node.target for node in first.steps] == [mul, t]
    assert [node.name for node in first.steps] == list(first.problem.steps)
    assert [transfer.due for transfer in first.problem.transfers] == [0, 1]
    assert first.step_of[graph.output_node()] == 1


def test_saved_views_move_to_their_sources(group: str) -> None:
    build = Builder(group)
    x = build.primal(8, 8)
    product = build.call(mul, x, x)
    build.call(mul, product, x)
    view = build.call(t, product)
    build.module(view)
    assert raise_saved_views([view]) and product.next is view
    assert not raise_saved_views([view])
