"""Collectives that the model itself calls: their steps, and launches before and after them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from graphshard.kinds import GraphKind
from graphshard.pipeline.verify import verify_lowered
from graphshard.planning.plan import Plan, UserCollective
from tests.graph.builder import Builder, add, lowered, mul, targets

c10d = torch.ops._c10d_functional
GATHER, REDUCE, WAIT = (
    c10d.all_gather_into_tensor.default,
    c10d.all_reduce.default,
    c10d.wait_tensor.default,
)
ROWS = 1 << 17  # too large to share a bucket


def _lowered(group: str) -> tuple[fx.Graph, Plan]:
    """Lower a graph with an all-reduce between two parameters' uses; return it and its plan."""
    build = Builder(group)
    x = build.primal(ROWS, 4)
    first, second = (build.unshard(build.primal(ROWS // 8, 4), ROWS) for _ in range(2))
    product = build.call(mul, x, first)
    reduced = build.call(WAIT, build.call(REDUCE, product, "sum", group))
    gm = build.module(build.call(add, reduced, second))
    return gm.graph, lowered(gm, GraphKind.FORWARD)


def test_launch_and_wait_of_user_collective_begin_steps(group: str) -> None:
    graph, plan = _lowered(group)
    steps = plan.problem.steps
    assert steps == ("mul_tensor", "all_reduce_default", "wait_tensor_default", "add_tensor")
    kind = "all_reduce"
    (user,) = plan.problem.user_collectives
    assert user == UserCollective(kind, user.kind, ROWS * 16, group, 8, launch=1, wait=2)
    assert user.kind == kind
    assert targets(graph) == [GATHER, WAIT, mul, REDUCE, WAIT, GATHER, WAIT, add]
    assert plan.collectives_text().count("user collective: all_reduce in group") == 1


@pytest.mark.parametrize("too_early", ["gather", "all-reduce"])
def test_launch_on_wrong_side_of_user_collective_is_refused(group: str, too_early: str) -> None:
    graph, plan = _lowered(group)
    verify_lowered(graph, plan)
    gathers = graph.find_nodes(op="call_function", target=GATHER)
    (reduce,) = graph.find_nodes(op="call_function", target=REDUCE)
    if too_early == "gather":
        reduce.prepend(gathers[1])
    else:
        reduce.args = (graph.find_nodes(op="placeholder")[0], *reduce.args[1:])
        gathers[0].prepend(reduce)
    with pytest.raises(AssertionError, match=r"the plan has .* but the graph has"):
        verify_lowered(graph, plan)
