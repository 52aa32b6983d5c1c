"""Values inside fused kernels, which are never in memory."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx

from graphshard.cost.fusion import GraphValues, UnmaterializedValues, unmaterialized_values
from tests.plan.machines import Graph

aten = torch.ops.aten


def _unmaterialized(graph: Graph, *outputs: fx.Node) -> UnmaterializedValues:
    graph.graph.output(outputs)
    return unmaterialized_values(GraphValues(graph.graph))


def test_values_inside_kernel_are_not_in_memory() -> None:
    graph = Graph()
    first = graph(aten.relu.default, graph.input(10, 10))
    total = graph(aten.sum.dim_IntList, first, [-1], True)
    last = graph(aten.div.Tensor, first, total)
    found = _unmaterialized(graph, last)
    assert found.inside == {total} and found.inlined == {first}


def test_inputs_of_matmuls_and_outputs_are_in_memory() -> None:
    graph = Graph()
    first = graph(aten.relu.default, graph.input(10, 10))
    second = graph(aten.neg.default, first)
    product = graph(aten.mm.default, second, second)
    last = graph(aten.add.Tensor, product, second)
    found = _unmaterialized(graph, last)
    assert found.inlined == {first} and not found.inside


def test_value_read_by_several_kernels_is_recomputed_in_each() -> None:
    # Like float32 logits: cross entropy sums all of them, and reads a few again.
    graph = Graph()
    logits = graph(aten.mm.default, *(graph.input(8, 8, dtype=torch.bfloat16) for _ in range(2)))
    wide = graph(aten._to_copy.default, logits, dtype=torch.float32)
    rows = graph(aten.amax.default, wide, [-1], True)
    shifted = graph(aten.sub.Tensor, wide, rows)
    columns = graph(aten.sum.dim_IntList, shifted, [0])
    found = _unmaterialized(graph, rows, columns)
    assert found.inlined == {wide, shifted}


def test_value_is_recomputed_together_with_its_inputs() -> None:
    # As in a batch norm's backward, where both kernels subtract the mean in float32.
    graph = Graph()
    wide = graph(
        aten._to_copy.default, graph.input(8, 8, dtype=torch.bfloat16), dtype=torch.float32
    )
    centred = graph(aten.sub.Tensor, wide, graph.input(8, 8))
    columns = graph(aten.sum.dim_IntList, centred, [0])
    result = graph(aten.mul.Tensor, centred, columns)
    assert _unmaterialized(graph, columns, result).inlined == {wide, centred}


@pytest.mark.parametrize("num_reads", [4, 5])
def test_value_computed_from_many_reads_is_not_recomputed(num_reads: int) -> None:
    graph = Graph()
    inputs = [graph.input(8, 8) for _ in range(num_reads)]
    total = functools.reduce(functools.partial(graph, aten.add.Tensor), inputs)
    rows = graph(aten.amax.default, total, [-1])
    columns = graph(aten.amax.default, total, [0])
    found = _unmaterialized(graph, rows, columns)
    assert (total in found.inlined) == (num_reads <= 4)
    assert total not in found.inside


def test_zeros_and_rows_added_to_them_are_one_value() -> None:
    # As in an embedding's gradient, where the zeros are written to the result's memory.
    graph = Graph()
    index, rows = graph.input(4, dtype=torch.int64), graph.input(4, 8)
    zeros = graph(aten.full.default, [16, 8], 0.0)
    added = graph(aten.index_put.default, zeros, [index], rows, True)
    found = _unmaterialized(graph, added)
    assert zeros in found.inlined and added not in found.inlined | found.inside


def test_large_value_is_computed_in_full_before_a_part_is_read() -> None:
    # Like the gradient of gathered logits, of which each rank uses its part.
    graph = Graph()
    logits, total = graph.input(8, 8), graph.input(8, 1)
    small = graph(aten.sub.Tensor, logits, total)
    large = small
    for number in range(14):  # reads, operators and constants: 31
        large = graph(aten.add.Tensor, large, number)
    parts = [
        graph(aten.clone.default, graph(aten.slice.Tensor, value, 1, 0, 4))
        for value in (small, large)
    ]
    found = _unmaterialized(graph, *parts)
    assert large not in found.inlined | found.inside
    assert small in found.inlined
