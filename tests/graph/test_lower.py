"""Markers become functional collectives: what is launched, in which order, with which bytes; and
the same of buckets, in which several parameters travel."""

from __future__ import annotations

import pytest
import torch

from graphshard import ops
from graphshard.passes import lower
from graphshard.passes.buckets import launch_marker, plan_buckets
from graphshard.plan import ALL_GATHER, ALL_REDUCE, BACKWARD, FORWARD, REDUCE_SCATTER
from graphshard.verify import verify_lowered
from tests.graph.builder import Builder, count, mul, output, targets

c10d = torch.ops._c10d_functional
GATHER, WAIT = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
SCATTER, REDUCE = c10d.reduce_scatter_tensor.default, c10d.all_reduce.default
SLICE = torch.ops.aten.slice.Tensor
LARGE = 1 << 19  # rows of 4 bytes: more than a bucket takes


def test_a_parameter_without_padding(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.unshard(build.primal(2, 3), 16))
    plan = lower(gm.graph, FORWARD)
    verify_lowered(gm.graph, plan)
    assert targets(gm.graph) == [GATHER, WAIT]
    (param,), (bucket,) = plan.params, plan.buckets
    assert (param.input, param.shape, param.padded_rows) == (0, (16, 3), 2)
    assert (bucket.kind, bucket.num_bytes, bucket.world) == (ALL_GATHER, 16 * 3 * 4, 8)
    assert output(gm.graph).meta["val"].shape == (16, 3)


def test_a_parameter_with_padding(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.unshard(build.primal(2, 3), 13))
    plan = lower(gm.graph, FORWARD)
    verify_lowered(gm.graph, plan)
    assert targets(gm.graph) == [GATHER, WAIT, SLICE]
    assert plan.buckets[0].num_bytes == 16 * 3 * 4
    assert output(gm.graph).meta["val"].shape == (13, 3)


@pytest.mark.parametrize("rows", [16, 13])
def test_a_gradient(group: str, rows: int) -> None:
    build = Builder(group)
    gm = build.module(build.reduce(build.tangent(rows, 3)))
    plan = lower(gm.graph, BACKWARD)
    verify_lowered(gm.graph, plan)
    assert targets(gm.graph)[-2:] == [SCATTER, WAIT]
    assert (plan.buckets[0].kind, plan.buckets[0].num_bytes) == (REDUCE_SCATTER, 16 * 3 * 4)
    (scatter,) = (node for node in gm.graph.nodes if node.target is SCATTER)
    assert scatter.args[1:] == ("avg", 8, group)
    assert scatter.args[0].meta["val"].shape == (16, 3)
    assert output(gm.graph).meta["val"].shape == (2, 3)


def test_a_transposed_gradient_is_made_contiguous(group: str) -> None:
    build = Builder(group)
    turned = build.call(torch.ops.aten.t.default, build.tangent(3, 16))
    gm = build.module(build.reduce(turned))
    lower(gm.graph, BACKWARD)
    (scatter,) = (node for node in gm.graph.nodes if node.target is SCATTER)
    assert scatter.args[0].meta["val"].is_contiguous()


def test_a_replicated_parameter(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.replicate(build.primal()))
    plan = lower(gm.graph, FORWARD)
    assert plan.buckets == () and len(plan.params) == 1
    assert plan.params[0].padded_rows is None
    assert targets(gm.graph) == [torch.ops.aten.clone.default]


def test_the_gradient_of_a_replicated_parameter(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.all_reduce(build.tangent(5)))
    plan = lower(gm.graph, BACKWARD)
    verify_lowered(gm.graph, plan)
    assert targets(gm.graph) == [REDUCE, WAIT, torch.ops.aten.div.Scalar]
    assert (plan.buckets[0].kind, plan.buckets[0].num_bytes) == (ALL_REDUCE, 20)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.int16, torch.int64, torch.bfloat16, torch.complex64],
)
def test_every_dtype_arrives_as_it_left(group: str, dtype: torch.dtype) -> None:
    build = Builder(group)
    gm = build.module(build.unshard(build.primal(2, 3, dtype=dtype), 13))
    verify_lowered(gm.graph, lower(gm.graph, FORWARD))
    value = output(gm.graph).meta["val"]
    assert (value.dtype, value.shape) == (dtype, (13, 3))
    (gather,) = (node for node in gm.graph.nodes if node.target is GATHER)
    assert gather.meta["val"].dtype in ops.ON_THE_WIRE


def test_gradients_are_named_by_the_input_they_belong_to(group: str) -> None:
    build = Builder(group)
    grads = [build.tangent(rows, 3) for rows in (9, 17)]
    last, first = (build.reduce(grad) for grad in grads)
    gm = build.module(None, first, None, last)
    plan = lower(gm.graph, BACKWARD)
    inputs = {param.shape: param.input for param in plan.params}
    assert inputs == {(17, 3): 1, (9, 3): 3}


def _lower_many(build: Builder, sizes: list[int]) -> list[tuple[str, int]]:
    """The collectives of a graph that uses parameters of these sizes one after the other."""
    x, *leaves = [build.primal(max(1, rows // 8)) for rows in (1, *sizes)]
    for leaf, rows in zip(leaves, sizes):
        x = build.call(mul, x, build.unshard(leaf, rows))
        x = build.call(torch.ops.aten.sum.dim_IntList, x, [0], True)
    gm = build.module(x)
    plan = lower(gm.graph, FORWARD)
    verify_lowered(gm.graph, plan)
    assert count(gm.graph, GATHER) == len(plan.buckets) == count(gm.graph, WAIT)
    assert sorted(i for bucket in plan.buckets for i in bucket.params) == list(range(len(sizes)))
    return [(bucket.kind, len(bucket.params)) for bucket in plan.buckets]


def test_small_parameters_travel_together_and_large_ones_alone(group: str) -> None:
    assert _lower_many(Builder(group), [8, 16, 24]) == [(ALL_GATHER, 3)]
    sizes = [8, 16, LARGE, 24]
    assert _lower_many(Builder(group), sizes) == [(ALL_GATHER, 3), (ALL_GATHER, 1)]
    assert _lower_many(Builder(group), [LARGE, LARGE]) == [(ALL_GATHER, 1)] * 2


def test_small_gradients_travel_together(group: str) -> None:
    build = Builder(group)
    reduced = [build.reduce(build.tangent(rows, 3)) for rows in (16, 13, 1)]
    gm = build.module(*reduced)
    plan = lower(gm.graph, BACKWARD)
    verify_lowered(gm.graph, plan)
    assert [len(bucket.params) for bucket in plan.buckets] == [3]
    assert plan.buckets[0].num_bytes == (16 + 16 + 8) * 3 * 4
    shapes = [tuple(output(gm.graph, i).meta["val"].shape) for i in range(3)]
    assert shapes == [(2, 3), (2, 3), (1, 3)]


def test_buckets_hold_one_dtype_and_respect_their_cap(group: str) -> None:
    build = Builder(group)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bool, torch.bfloat16]
    markers = [build.unshard(build.primal(1, 4, dtype=dtype), 8) for dtype in dtypes]
    together = plan_buckets(markers)
    assert [[markers.index(m) for m in bucket] for bucket in together] == [[0, 2], [1, 4], [3]]
    alone = plan_buckets(markers, cap_bytes=1)
    assert [len(bucket) for bucket in alone] == [1] * 5
    assert [launch_marker(bucket) for bucket in alone] == markers
    assert [len(bucket) for bucket in plan_buckets(markers, small_bytes=1)] == [1] * 5
