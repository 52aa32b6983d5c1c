from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.plan.machines import MACHINE, Graph, total_us

aten = torch.ops.aten


def test_chain_of_pointwise_nodes_is_one_kernel() -> None:
    graph = Graph()
    x, y = graph.input(100), graph.input(100)
    first = graph(aten.relu.default, x)
    second = graph(aten.add.Tensor, first, y)
    last = graph(aten.mul.Tensor, second, x)
    costs = graph.costs(last)
    assert costs[last] == 3 * 400 + 1  # reads x and y, writes the result
    assert costs[first] == costs[second] == 0


def test_intermediate_value_with_other_users_is_written() -> None:
    graph = Graph()
    first = graph(aten.relu.default, graph.input(100))
    last = graph(aten.neg.default, first)
    assert graph.costs(first, last)[last] == 3 * 400 + 1


def test_matmul_does_not_fuse_with_its_neighbors() -> None:
    graph = Graph()
    x = graph.input(10, 10)
    first = graph(aten.relu.default, x)
    product = graph(aten.mm.default, first, first)
    last = graph(aten.add.Tensor, product, first)
    costs = graph.costs(last)
    assert costs[first] == 2 * 400 + 1
    assert costs[product] == 2 * 400 + 1  # both operands are the same value
    assert costs[last] == 3 * 400 + 1


def test_views_are_free_and_only_their_bytes_are_read() -> None:
    graph = Graph()
    x, row = graph.input(10, 10), graph.input(1, 10)
    half = graph(aten.slice.Tensor, x, 0, 0, 5)
    wide = graph(aten.expand.default, row, [5, 10])
    last = graph(aten.add.Tensor, half, wide)
    flat = graph(aten.view.default, last, [50])
    costs = graph.costs(flat)
    assert costs[last] == 200 + 40 + 200 + 1
    assert costs[half] == costs[wide] == costs[flat] == 0


def test_reduction_over_rows_fuses_with_its_user() -> None:
    graph = Graph()
    x = graph.input(10, 10)
    total = graph(aten.sum.dim_IntList, x, [-1], True)
    last = graph(aten.div.Tensor, x, total)
    assert graph.costs(last)[last] == 400 + 400 + 1


def test_reduction_over_columns_fuses_only_with_its_producer() -> None:
    graph = Graph()
    x = graph.input(10, 10)
    squared = graph(aten.mul.Tensor, x, x)
    total = graph(aten.sum.dim_IntList, squared, [0])
    after = graph(aten.neg.default, total)
    costs = graph.costs(after)
    assert costs[squared] == 0
    assert costs[total] == 400 + 40 + 1
    assert costs[after] == 40 + 40 + 1


def test_reduction_over_columns_rereads_value_with_other_users() -> None:
    graph = Graph()
    doubled = graph(aten.add.Tensor, graph.input(10, 10), 1)
    total = graph(aten.sum.dim_IntList, doubled, [0])
    everything = graph(aten.sum.default, doubled)
    costs = graph.costs(doubled, total, everything)
    assert costs[doubled] == 400 + 400 + 1
    assert costs[total] == 0  # fused with the other reduction of the same input
    assert costs[everything] == 400 + 40 + 4 + 1


def test_special_functions_may_take_longer_than_memory_accesses() -> None:
    slow = dataclasses.replace(MACHINE, special_per_s=1e3)
    graph = Graph()
    exp, relu = (graph(op, graph.input(100)) for op in (aten.exp.default, aten.relu.default))
    costs = graph.costs(exp, relu, on=slow)
    assert (costs[exp], costs[relu]) == (100 / 1e3 * 1e6 + 1, 2 * 400 + 1)


def test_layer_norm_is_one_kernel() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * weight

    assert total_us(norm, torch.ones(10, 20), torch.ones(20)) == 800 + 80 + 800 + 1
