"""Costs of nodes and collectives, computed by hand for the machine of ``machines``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard.ops.markers  # noqa: F401  registers the markers
from graphshard.cost.devices import HARDWARE
from graphshard.cost.flops import ATTENTION_BACKWARD, ATTENTION_FORWARD
from graphshard.cost.hardware import COLLECTIVE_KINDS
from graphshard.cost.model import CostModel
from graphshard.kinds import TransferKind
from tests.plan.machines import COMPUTE, MACHINE, Graph, total_us

aten = torch.ops.aten


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "shapes", "flops"),
    [
        (aten.mm.default, ((4, 8), (8, 2)), 2 * 4 * 8 * 2),
        (aten.addmm.default, ((2,), (4, 8), (8, 2)), 2 * 4 * 8 * 2),
        (aten.bmm.default, ((3, 4, 8), (3, 8, 2)), 3 * 2 * 4 * 8 * 2),
        (aten.baddbmm.default, ((3, 4, 2), (3, 4, 8), (3, 8, 2)), 3 * 2 * 4 * 8 * 2),
        (aten.linear.default, ((3, 4, 8), (2, 8)), 3 * 2 * 4 * 8 * 2),
    ],
)
def test_matmul_time_is_bound_by_flops_or_bytes(
    op: Any, shapes: tuple[tuple[int, ...], ...], flops: int
) -> None:
    graph = Graph()
    node = graph(op, *(graph.input(*shape) for shape in shapes))
    num_bytes = 4 * (sum(map(math.prod, shapes)) + node.meta["val"].numel())
    assert graph.costs(node, on=COMPUTE)[node] == pytest.approx(flops / 1e3)
    assert CostModel(MACHINE).compute_us(graph.graph)[node] == pytest.approx(num_bytes + 1)


def test_matmul_rate_depends_on_dtype_of_operands() -> None:
    for dtype, per_us in ((torch.bfloat16, 4e3), (torch.float16, 1e3), (torch.float32, 1e3)):
        graph = Graph()
        a = graph.input(8, 8, dtype=dtype)
        node = graph(aten.mm.default, a, a)
        assert graph.costs(node, on=COMPUTE)[node] == pytest.approx(2 * 8**3 / per_us)
    graph = Graph()
    a = graph.input(16, 16, dtype=torch.float8_e4m3fn)
    node = graph(aten._scaled_mm.default, a, a, a, a, out=(16, 16))
    assert graph.costs(node, on=COMPUTE)[node] == pytest.approx(2 * 16**3 / 8e3)


def test_float32_matmul_runs_at_tf32_rate_if_enabled() -> None:
    graph = Graph()
    a = graph.input(100, 100)
    node = graph(aten.mm.default, a, a)
    plain, fast = (CostModel(COMPUTE, tf32=on).compute_us(graph.graph) for on in (False, True))
    assert plain[node] / fast[node] == pytest.approx(2)


HEADS, LENGTH, WIDTH = (2, 3), 256, 16
CAUSAL = (1 + 128 / 256) / 2  # the first of two query blocks attends to one key block


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", (0.0, True)),
        ("_scaled_dot_product_flash_attention", (0.0, True)),
        ("_scaled_dot_product_efficient_attention", (None, True, 0.0, True)),
        ("_scaled_dot_product_cudnn_attention", (None, True, 0.0, True)),
    ],
)
def test_attention_forward_costs_its_flops(name: str, more: tuple[Any, ...]) -> None:
    graph = Graph()
    q = graph.input(*HEADS, LENGTH, WIDTH)
    op = getattr(aten, name).default
    causal = graph(op, q, q, q, *more, out=(*HEADS, LENGTH, WIDTH))
    full = graph(op, q, q, q, *more[:-1], False, out=(*HEADS, LENGTH, WIDTH))
    costs = graph.costs(causal, full, on=COMPUTE)
    flops = 6 * 2 * LENGTH * LENGTH * 2 * WIDTH
    assert costs[full] == pytest.approx(flops / 1e3 / ATTENTION_FORWARD)
    assert costs[causal] == pytest.approx(costs[full] * CAUSAL)


@pytest.mark.parametrize(
    ("name", "before_causal"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu_backward", 3),
        ("_scaled_dot_product_flash_attention_backward", 7),
        ("_scaled_dot_product_efficient_attention_backward", 7),
        ("_scaled_dot_product_cudnn_attention_backward", 10),
    ],
)
def test_attention_backward_costs_its_flops(name: str, before_causal: int) -> None:
    graph = Graph()
    q = graph.input(*HEADS, LENGTH, WIDTH)
    more = (*(None for _ in range(before_causal)), True)
    op = getattr(aten, name).default
    node = graph(op, q, q, q, q, *more, out=(3, *HEADS, LENGTH, WIDTH))
    flops = 6 * 2 * LENGTH * LENGTH * 5 * WIDTH * CAUSAL
    assert graph.costs(node, on=COMPUTE)[node] == pytest.approx(flops / 1e3 / ATTENTION_BACKWARD)


def test_flex_attention_costs_all_scores() -> None:
    graph = Graph()
    q = graph.input(*HEADS, LENGTH, WIDTH)
    ops = torch.ops.higher_order
    forward = graph(ops.flex_attention, q, q, q, out=(*HEADS, LENGTH, WIDTH))
    backward = graph(ops.flex_attention_backward, q, q, q, q, out=(3, *HEADS, LENGTH, WIDTH))
    costs = graph.costs(forward, backward, on=COMPUTE)
    flops = 6 * 2 * LENGTH * LENGTH * WIDTH
    assert costs[forward] == pytest.approx(2 * flops / 1e3 / ATTENTION_FORWARD)
    assert costs[backward] == pytest.approx(5 * flops / 1e3 / ATTENTION_BACKWARD)


@pytest.mark.parametrize(
    ("weight", "transposed", "groups", "flops"),
    [
        ((6, 4, 3, 3), False, 1, 2 * (2 * 6 * 5 * 5) * (4 * 3 * 3)),
        ((6, 2, 3, 3), False, 2, 2 * (2 * 6 * 5 * 5) * (2 * 3 * 3)),
        ((4, 6, 3, 3), True, 1, 2 * (2 * 4 * 5 * 5) * (6 * 3 * 3)),
    ],
)
def test_convolutions_cost_their_flops(
    weight: tuple[int, ...], transposed: bool, groups: int, flops: int
) -> None:
    graph = Graph()
    x, w = graph.input(2, 4, 5, 5), graph.input(*weight)
    shared = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    out = graph(aten.convolution.default, x, w, None, *shared)
    both, one = (
        graph(aten.convolution_backward.default, out, x, w, None, *shared, [mask, True, False])
        for mask in (True, False)
    )
    costs = graph.costs(out, both, one, on=COMPUTE)
    assert [costs[n] * 1e3 for n in (out, both, one)] == pytest.approx([flops, 2 * flops, flops])


def test_unknown_op_reads_its_inputs_and_writes_its_outputs() -> None:
    graph = Graph()
    node = graph(aten.sort.default, graph.input(10, 10))  # results: values, and indices of 8 bytes
    assert graph.costs(node)[node] == 400 + (400 + 800) + 1


def test_embedding_reads_only_returned_rows() -> None:
    graph = Graph()
    table, ids = graph.input(1000, 8), graph.input(5, dtype=torch.int64)
    node = graph(aten.embedding.default, table, ids)
    assert graph.costs(node)[node] == 5 * 8 * 4 + 5 * 8 + 5 * 8 * 4 + 1


def test_markers_collectives_and_views_are_free() -> None:
    graph = Graph()
    x = graph.input(8, 4)
    full = graph(torch.ops.graphshard.unshard.default, x, 16, "0", True, out=(16, 4))
    gathered = graph(
        torch.ops._c10d_functional.all_gather_into_tensor.default, x, 2, "0", out=(16, 4)
    )
    waited = graph(torch.ops._c10d_functional.wait_tensor.default, gathered, out=(16, 4))
    turned = graph(aten.permute.default, waited, [1, 0])
    reduced = graph(torch.ops.graphshard.reduce_grad.default, full, 8, "0", out=(8, 4))
    costs = graph.costs(full, turned, reduced)
    assert list(costs) == list(graph.graph.nodes)
    assert set(costs.values()) == {0.0}


def _mlp(x: Tensor, w: Tensor) -> Tensor:
    return (x.view(-1, w.shape[0]) @ w).relu().sum(-1)


def _scaled_columns(x: Tensor) -> Tensor:
    return (x * x.shape[0]).sum(0)


def test_symbolic_sizes_are_priced_by_sizes_in_trace() -> None:
    args = torch.ones(6, 5, 8), torch.ones(8, 4)
    dynamic = make_fx(_mlp, tracing_mode="symbolic")(*args)
    val = next(n.meta["val"] for n in dynamic.graph.nodes if n.op == "placeholder")
    assert isinstance(val.shape[0], torch.SymInt)
    guards = len(val.shape[0].node.shape_env.guards)
    assert sum(CostModel(MACHINE).compute_us(dynamic.graph).values()) == total_us(_mlp, *args)
    assert len(val.shape[0].node.shape_env.guards) == guards
    x = torch.ones(6, 5)
    assert total_us(_scaled_columns, x, mode="symbolic") == total_us(_scaled_columns, x)


def test_ops_with_data_dependent_sizes_take_time() -> None:
    def chosen(x: Tensor) -> Tensor:
        return torch.relu(x[x > 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert total_us(chosen, torch.ones(10), mode="symbolic") > 1e3


def test_node_cost_sets_time_of_single_nodes() -> None:
    graph = Graph()
    x = graph.input(10, 10)
    product = graph(aten.mm.default, x, x)
    last = graph(aten.relu.default, product)
    graph.graph.output(last)
    costs = CostModel(MACHINE, lambda n: 7 if n is product else None).compute_us(graph.graph)
    assert costs[product] == 7.0
    assert costs[last] == 2 * 400 + 1


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf, "3", True])
def test_node_cost_that_is_not_a_time_is_refused(price: Any) -> None:
    graph = Graph()
    node = graph(aten.relu.default, graph.input(3))
    with pytest.raises(ValueError, match=f"{price!r} for {node.name}"):
        CostModel(MACHINE, lambda n: price if n is node else None).compute_us(graph.graph)


@pytest.mark.parametrize(
    ("kind", "world", "us"),
    [
        (TransferKind.ALL_GATHER, 1, 2 * 1000 + 1),  # a copy reads and writes
        (TransferKind.ALL_GATHER, 4, 10 + 3 * 1 + 1000 * 3 / 4),
        (TransferKind.REDUCE_SCATTER, 4, 10 + 3 * 1 + 1000 * 3 / 4),
        (TransferKind.ALL_REDUCE, 4, 10 + 2 * (3 * 1 + 1000 * 3 / 4)),
        (TransferKind.ALL_GATHER, 8, 100 + 6 * 1 + 1 * 5 + 10000 * 7 / 8),
        (TransferKind.ALL_REDUCE, 16, 100 + 2 * (12 * 1 + 3 * 5 + 10000 * 15 / 16)),
    ],
)
def test_collective_times_match_hand_computation(kind: str, world: int, us: float) -> None:
    assert CostModel(MACHINE).collective_us(kind, 1000, world) == pytest.approx(us)
    assert CostModel(MACHINE).copy_us(500) == 2 * 500 + 1


@pytest.mark.parametrize(
    ("world", "stride", "us"),
    [
        (2, 2, 10 + 1 * 1 + 1000 * 1 / 2),  # two groups in one node
        (4, 2, 100 + 2 * 1 + 1 * 5 + 2 * 10000 * 3 / 4),  # two groups over two nodes
        (4, 4, 100 + 3 * 5 + 4 * 10000 * 3 / 4),  # a group for each rank of a node
        (4, 8, 100 + 3 * 5 + 4 * 10000 * 3 / 4),
    ],
)
def test_groups_share_network_of_their_nodes(world: int, stride: int, us: float) -> None:
    cost_model, kind = CostModel(MACHINE), TransferKind.ALL_GATHER
    assert cost_model.collective_us(kind, 1000, world, stride) == pytest.approx(us)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "world", "says"),
    [
        ("broadcast", 1, 2, "broadcast"),
        (TransferKind.ALL_GATHER, 1, 0, "world=0"),
        (TransferKind.ALL_GATHER, -1, 2, "=-1"),
    ],
)
def test_invalid_collectives_are_refused(kind: str, num_bytes: int, world: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel(MACHINE).collective_us(kind, num_bytes, world)


@given(
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from(COLLECTIVE_KINDS),
    st.integers(1, 4096),
    st.integers(0, 1 << 36),
    st.integers(0, 1 << 36),
)
def test_more_bytes_never_take_less_time(
    name: str, kind: str, world: int, one: int, other: int
) -> None:
    cost_model, (less, more) = CostModel(HARDWARE[name]), sorted((one, other))
    less_us, more_us = (cost_model.collective_us(kind, size, world) for size in (less, more))
    assert 0 < less_us <= more_us
    assert cost_model.copy_us(less) <= cost_model.copy_us(more)


@given(st.sampled_from(sorted(HARDWARE)), st.lists(st.integers(1, 4096), min_size=4, max_size=4))
def test_larger_matmuls_never_take_less_time(name: str, sizes: list[int]) -> None:
    m, k, n, more = sizes
    times = []
    for rows in (m, m + more):
        graph = Graph()
        node = graph(aten.mm.default, graph.input(rows, k), graph.input(k, n))
        times.append(graph.costs(node, on=HARDWARE[name])[node])
    assert 0 < times[0] <= times[1]
