"""Forward saves a copy of an input that it mutates, with the strides seen in the trace."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from graphshard.passes.saving import clone_mutated_inputs
from tests.graph.builder import CONTEXT, Builder, add, mul, output

aten = torch.ops.aten


def _saving(build: Builder, saved: fx.Node, total: fx.Node, new: fx.Node) -> fx.GraphModule:
    """Run the pass on a graph that returns `total`, saves `saved` and writes `new` to input 0."""
    first = next(iter(build.graph.nodes))
    build.call(aten.copy_.default, first, new)
    gm = build.module(total, saved)
    clone_mutated_inputs(gm, replace(CONTEXT, num_outputs=1))
    gm.graph.lint()
    gm.recompile()
    return gm


def test_saved_views_keep_their_strides(group: str) -> None:
    build = Builder(group)
    buffer, x = build.primal(4, 8), build.primal(8, 4)
    part = build.call(aten.slice.Tensor, build.call(aten.t.default, buffer), 0, 2, 7)
    total = build.call(add, build.call(aten.slice.Tensor, x, 0, 0, 5), part)
    gm = _saving(build, part, total, build.call(mul, buffer, 3.0))
    assert output(gm.graph, 1) is not part
    values, x_value = torch.randn(4, 8), torch.randn(8, 4)
    before, expected = values.clone(), values.t()[2:7].clone()
    _, saved = gm(values, x_value)
    torch.testing.assert_close(values, 3 * before)
    torch.testing.assert_close(saved, expected)
    assert saved.stride() == part.meta["val"].stride() == output(gm.graph, 1).meta["val"].stride()


def test_several_views_share_one_copy(group: str) -> None:
    build = Builder(group)
    buffer = build.primal(4, 8)
    halves = build.call(aten.split.Tensor, buffer, 4, 1)
    first, second = (build.call(operator.getitem, halves, i) for i in range(2))
    build.call(aten.copy_.default, buffer, build.call(mul, buffer, 3.0))
    gm = build.module(build.call(add, first, 1.0), first, second, buffer)
    clone_mutated_inputs(gm, replace(CONTEXT, num_outputs=1))
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=aten.clone.default)) == 1
    values = torch.randn(4, 8)
    before = values.clone()
    _, *saved = gm(values)
    for value, expected in zip(saved, (*before.split(4, 1), before), strict=True):
        torch.testing.assert_close(value, expected)
