from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

from graphshard.kinds import GraphKind
from graphshard.pipeline.verify import verify_lowered, verify_partition
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Plan
from tests.graph.builder import Builder, add, lowered, mul, overlapped, t

c10d = torch.ops._c10d_functional
GATHER, WAIT = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
LARGE = 1 << 19


def _lowered(group: str) -> tuple[fx.Graph, Plan]:
    """Return a graph that gathers two large parameters one after the other, and its plan."""
    build = Builder(group)
    first, second = (build.unshard(build.primal(rows // 8), rows) for rows in (LARGE, 2 * LARGE))
    gm = build.module(build.call(torch.ops.aten.cat.default, [first, second]))
    plan = lowered(gm, GraphKind.FORWARD, overlapped(ScheduleLimits(cap=1)))
    return gm.graph, plan


def _find(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def test_correct_graph_passes(group: str) -> None:
    verify_lowered(*_lowered(group))


def _leave_marker(graph: fx.Graph, plan: Plan) -> Plan:
    shard = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.graphshard.replicate.default, (shard, "0"))
    return plan


def _forget_to_wait(graph: fx.Graph, plan: Plan) -> Plan:
    wait = _find(graph, WAIT)[0]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    return plan


def _wait_twice(graph: fx.Graph, plan: Plan) -> Plan:
    gather = _find(graph, GATHER)[0]
    with graph.inserting_after(gather):
        graph.call_function(WAIT, (gather,))
    return plan


def _use_before_waiting(graph: fx.Graph, plan: Plan) -> Plan:
    gather = _find(graph, GATHER)[0]
    with graph.inserting_after(gather):
        graph.call_function(torch.ops.aten.neg.default, (gather,))
    return plan


def _other_order(graph: fx.Graph, plan: Plan) -> Plan:
    return dataclasses.replace(plan, buckets=plan.buckets[::-1])


def _one_more(graph: fx.Graph, plan: Plan) -> Plan:
    return dataclasses.replace(plan, buckets=(*plan.buckets, plan.buckets[0]))


def _one_less(graph: fx.Graph, plan: Plan) -> Plan:
    return dataclasses.replace(plan, buckets=plan.buckets[:1])


def _other_size(graph: fx.Graph, plan: Plan) -> Plan:
    grown = dataclasses.replace(plan.buckets[0], num_bytes=plan.buckets[0].num_bytes + 4)
    return dataclasses.replace(plan, buckets=(grown, *plan.buckets[1:]))


def _out_of_order(graph: fx.Graph, plan: Plan) -> Plan:
    gather, wait = _find(graph, GATHER)[0], _find(graph, WAIT)[0]
    gather.prepend(wait)
    return plan


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (_leave_marker, "were not lowered"),
        (_forget_to_wait, r"must have one user, its wait, but has \[(?!.*wait_tensor)"),
        (_wait_twice, r"must have one user, its wait, but has \[wait_tensor\w*, wait_tensor\w*\]"),
        (_use_before_waiting, r"must have one user, its wait, but has \[.*neg"),
        (_other_order, "the plan has .* but the graph has"),
        (_one_more, "the plan has .* but the graph has"),
        (_one_less, "the plan has .* but the graph has"),
        (_other_size, "the plan has .* but the graph has"),
        (_out_of_order, "before it has been defined"),
    ],
)
def test_broken_graph_is_refused(
    group: str, break_it: Callable[[fx.Graph, Plan], Plan], match: str
) -> None:
    graph, plan = _lowered(group)
    plan = break_it(graph, plan)
    with pytest.raises((AssertionError, RuntimeError), match=match):
        verify_lowered(graph, plan)


def test_user_collective_must_be_in_plan(group: str) -> None:
    graph, plan = _lowered(group)
    shard = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        reduced = graph.call_function(c10d.all_reduce.default, (shard, "sum", group))
    reduced.meta["val"] = shard.meta["val"]
    with pytest.raises(AssertionError, match=r"the graph has .*all_reduce in"):
        verify_lowered(graph, plan)


def _forward(group: str) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a forward graph that returns y and saves x, and the nodes that it must not save."""
    build = Builder(group)
    x, full = build.primal(8, 8), build.unshard(build.primal(1, 8), 8)
    turned = build.call(t, full)
    y = build.call(add, build.call(mul, x, turned), x)
    return build.module(y, x), [full, turned]


def _save(gm: fx.GraphModule, node: fx.Node) -> None:
    outputs = gm.graph.output_node()
    outputs.args = ((*outputs.args[0], node),)  # type: ignore[misc]


@pytest.mark.parametrize("position", [0, 1])
def test_saving_value_computed_from_parameters_is_refused(group: str, position: int) -> None:
    gm, derived = _forward(group)
    names = [node.name for node in derived]
    verify_partition(gm, names, 1)
    _save(gm, derived[position])
    with pytest.raises(AssertionError, match=rf"forward saves .*'{names[position]}'"):
        verify_partition(gm, names, 1)


def test_returned_parameter_does_not_count_as_saved(group: str) -> None:
    gm, derived = _forward(group)
    outputs = gm.graph.output_node()
    outputs.args = ((derived[0], *outputs.args[0]),)  # type: ignore[misc]
    verify_partition(gm, [node.name for node in derived], 2)
