from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from graphshard.kinds import GraphKind, TransferKind
from graphshard.ops import collectives, host_copy
from graphshard.ops.host_copy import PAGEABLE
from graphshard.ops.marker_specs import UnshardSpec
from graphshard.planning.memory_budget import ScheduleLimits
from tests.graph.builder import Builder, lowered, mul, output, overlapped, targets, to_copy

c10d = torch.ops._c10d_functional
GATHER, WAIT = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
SCATTER, REDUCE = c10d.reduce_scatter_tensor.default, c10d.all_reduce.default
SLICE = torch.ops.aten.slice.Tensor
COALESCED = c10d.all_gather_into_tensor_coalesced.default
F32 = torch.float32
COPY_IN = torch.ops.graphshard.copy_in.default
LARGE = 1 << 19  # elements of 4 bytes: packing costs more than a separate buffer


def test_evenly_sharded_parameter_is_gathered_without_slice(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.unshard(build.primal(2, 3), 16))
    plan = lowered(gm, GraphKind.FORWARD)
    assert targets(gm.graph) == [GATHER, WAIT]
    (param,), (bucket,) = plan.params, plan.buckets
    assert (param.input, param.shape, param.padded_rows) == (0, (16, 3), 2)
    assert (bucket.kind, bucket.num_bytes, bucket.world) == (TransferKind.ALL_GATHER, 16 * 3 * 4, 8)
    assert output(gm.graph).meta["val"].shape == (16, 3)


def test_padded_parameter_is_sliced_after_gather(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.unshard(build.primal(2, 3), 13))
    plan = lowered(gm, GraphKind.FORWARD)
    assert targets(gm.graph) == [GATHER, WAIT, SLICE]
    assert plan.buckets[0].num_bytes == 16 * 3 * 4
    assert output(gm.graph).meta["val"].shape == (13, 3)


@pytest.mark.parametrize("rows", [16, 13])
def test_gradient_is_reduce_scattered(group: str, rows: int) -> None:
    build = Builder(group)
    gm = build.module(build.reduce(build.tangent(rows, 3)))
    plan = lowered(gm, GraphKind.BACKWARD)
    assert [t for t in targets(gm.graph) if t in (SCATTER, WAIT)] == [SCATTER, WAIT]
    assert (plan.buckets[0].kind, plan.buckets[0].num_bytes) == (
        TransferKind.REDUCE_SCATTER,
        16 * 3 * 4,
    )
    (scatter,) = (node for node in gm.graph.nodes if node.target is SCATTER)
    assert scatter.args[1:] == ("avg", 8, group)
    assert scatter.args[0].meta["val"].numel() == 16 * 3
    assert output(gm.graph).meta["val"].shape == (2, 3)
    (transfer,) = plan.problem.transfers
    assert transfer.copied_in == (COPY_IN in targets(gm.graph)) == (rows == 13)


def test_transposed_gradient_is_made_contiguous(group: str) -> None:
    build = Builder(group)
    turned = build.call(torch.ops.aten.t.default, build.tangent(3, 16))
    gm = build.module(build.reduce(turned))
    plan = lowered(gm, GraphKind.BACKWARD)
    (scatter,) = (node for node in gm.graph.nodes if node.target is SCATTER)
    assert scatter.args[0].meta["val"].is_contiguous()
    assert plan.problem.transfers[0].copied_in


def test_replicated_parameter_has_no_collective(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.replicate(build.primal()))
    plan = lowered(gm, GraphKind.FORWARD)
    assert plan.buckets == () and len(plan.params) == 1
    assert plan.params[0].padded_rows is None
    assert targets(gm.graph) == [torch.ops.aten.clone.default]


def test_gradient_of_replicated_parameter_is_all_reduced(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.all_reduce(build.tangent(5)))
    plan = lowered(gm, GraphKind.BACKWARD)
    # Fake groups average, like NCCL; gloo only sums, followed by a division.
    assert targets(gm.graph) == [REDUCE, WAIT]
    (reduction,) = (node for node in gm.graph.nodes if node.target is REDUCE)
    assert reduction.args[1] == "avg"
    assert (plan.buckets[0].kind, plan.buckets[0].num_bytes) == (TransferKind.ALL_REDUCE, 20)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.int16, torch.int64, torch.bfloat16, torch.complex64],
)
def test_every_dtype_can_be_gathered(group: str, dtype: torch.dtype) -> None:
    build = Builder(group)
    gm = build.module(build.unshard(build.primal(2, 3, dtype=dtype), 13))
    lowered(gm, GraphKind.FORWARD)
    value = output(gm.graph).meta["val"]
    assert (value.dtype, value.shape) == (dtype, (13, 3))
    (gather,) = (node for node in gm.graph.nodes if node.target is GATHER)
    assert gather.meta["val"].dtype in collectives.PORTABLE_DTYPES


def test_gradients_have_number_of_their_input(group: str) -> None:
    build = Builder(group)
    grads = [build.tangent(rows, 3) for rows in (9, 17)]
    last, first = (build.reduce(grad) for grad in grads)
    gm = build.module(None, first, None, last)
    plan = lowered(gm, GraphKind.BACKWARD)
    inputs = {param.shape: param.input for param in plan.params}
    assert inputs == {(17, 3): 1, (9, 3): 3}


def _gathers(build: Builder, markers: list[fx.Node], limits: ScheduleLimits) -> list[Any]:
    """Return the buffers of each bucket in a graph that uses ``markers`` one after another."""
    x = build.primal(1)
    for marker in markers:
        total = build.call(torch.ops.aten.sum.default, build.call(to_copy, marker, dtype=F32))
        x = build.call(mul, x, total)
    plan = lowered(build.module(x), GraphKind.FORWARD, overlapped(limits))
    assert sorted(i for b in plan.buckets for i in b.transfers) == list(range(len(markers)))
    return [bucket.buffers for bucket in plan.buckets]


def test_only_small_parameters_share_a_buffer(group: str) -> None:
    build = Builder(group)
    markers = [build.unshard(build.primal(rows), rows * 8) for rows in (1, 2, LARGE, 3)]
    assert _gathers(build, markers, ScheduleLimits()) == [((0, 1, 3), (2,))]
    assert targets(build.graph).count(COALESCED) == 1 and targets(build.graph).count(WAIT) == 2


def test_without_overlap_only_small_parameters_share_a_bucket(group: str) -> None:
    build = Builder(group)
    markers = [build.unshard(build.primal(rows), rows * 8) for rows in (1, 2, LARGE, 3)]
    gm = build.module(build.call(torch.ops.aten.cat.default, markers))
    buckets = lowered(gm, GraphKind.FORWARD).buckets
    assert [bucket.buffers for bucket in buckets] == [((0, 1, 3),), ((2,),)]
    assert all(bucket.launch == bucket.wait for bucket in buckets)


def test_buckets_respect_cap(group: str) -> None:
    build = Builder(group)
    markers = [build.unshard(build.primal(4), 32) for _ in range(4)]
    assert _gathers(build, markers, ScheduleLimits(cap=2 * 128)) == [((0, 1),), ((2, 3),)]


def test_small_gradients_share_a_bucket(group: str) -> None:
    build = Builder(group)
    reduced = [build.reduce(build.tangent(rows, 3)) for rows in (16, 13, 1)]
    gm = build.module(*reduced)
    plan = lowered(gm, GraphKind.BACKWARD)
    assert [bucket.buffers for bucket in plan.buckets] == [((0, 1, 2),)]
    assert plan.buckets[0].num_bytes == (16 + 16 + 8) * 3 * 4
    shapes = [tuple(output(gm.graph, i).meta["val"].shape) for i in range(3)]
    assert shapes == [(2, 3), (2, 3), (1, 3)]


def test_parameters_of_several_dtypes_share_a_byte_buffer(group: str) -> None:
    build = Builder(group)
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]
    markers = [build.unshard(build.primal(1, 4, dtype=dtype), 7) for dtype in dtypes]
    gm = build.module(*markers)
    plan = lowered(gm, GraphKind.FORWARD, overlapped(ScheduleLimits()))
    (bucket,) = plan.buckets
    assert bucket.buffers == ((0, 1, 2, 3),)
    assert plan.wire_dtypes(bucket) == ("float32", "bfloat16", "bool", "complex64")
    assert bucket.num_bytes == 8 * 4 * (4 + 2 + 1 + 8)
    values = [output(gm.graph, i).meta["val"] for i in range(4)]
    assert [(v.dtype, tuple(v.shape)) for v in values] == [(dtype, (7, 4)) for dtype in dtypes]


def test_gradients_of_two_dtypes_are_reduced_separately(group: str) -> None:
    build = Builder(group)
    grads = [build.tangent(16, 3), build.call(to_copy, build.tangent(16, 3), dtype=torch.bfloat16)]
    gm = build.module(*(build.reduce(grad) for grad in grads))
    assert [
        bucket.buffers
        for bucket in lowered(gm, GraphKind.BACKWARD, overlapped(ScheduleLimits())).buckets
    ] == [
        ((0,),),
        ((1,),),
    ]


def test_host_shards_are_copied_to_device_and_back(group: str) -> None:
    device = torch.device("cuda", 0)
    build = Builder(group, device="cuda:0")
    shards = [build.primal(rows, device="cpu") for rows in (2, 1)]
    full = [
        build.unshard(shard, rows, device=device)
        for shard, rows in zip(shards, (16, 7), strict=True)
    ]
    grads = [build.reduce(build.call(mul, w, w), host_memory=PAGEABLE) for w in full]
    gm = build.module(*grads)
    plan = lowered(gm, GraphKind.BACKWARD)
    kinds = [
        TransferKind.COPY_TO_DEVICE,
        TransferKind.ALL_GATHER,
        TransferKind.REDUCE_SCATTER,
        TransferKind.COPY_TO_HOST,
    ]
    assert [bucket.kind for bucket in plan.buckets] == kinds
    assert [bucket.num_bytes for bucket in plan.buckets] == [12, 96, 96, 12]
    (to_device,) = (node for node in gm.graph.nodes if node.target is host_copy.copy_to_device)
    (to_host,) = (node for node in gm.graph.nodes if node.target is host_copy.copy_to_host)
    assert to_device.args == (shards, device) and to_host.args[1] == PAGEABLE
    for position, rows in enumerate((2, 1)):
        value = output(gm.graph, position).meta["val"]
        assert (value.device.type, value.shape) == ("cpu", (rows,))
    on_device = [node for node in gm.graph.nodes if node.target in (GATHER, SCATTER, mul)]
    assert on_device and all(node.meta["val"].device == device for node in on_device)


def test_wire_dtypes_of_plan_match_graph(group: str) -> None:
    device, half = torch.device("cuda", 0), torch.bfloat16
    build = Builder(group, device="cuda:0")
    shard = build.primal(2, device="cpu")
    gather = UnshardSpec(shard, 16, group, group, dtype=half, device=device, host_memory=PAGEABLE)
    grad = build.call(to_copy, build.marker(gather), dtype=F32)
    reduced = build.reduce(grad, reduce_dtype=half, result_dtype=F32, host_memory=PAGEABLE)
    gm = build.module(reduced)
    plan = lowered(gm, GraphKind.BACKWARD)
    travel = (host_copy.copy_to_device, GATHER, SCATTER, host_copy.copy_to_host)
    sent = [node.args[0] for node in gm.graph.nodes if node.target in travel]
    nodes = [arg[0] if isinstance(arg, list) else arg for arg in sent]
    dtypes = [str(node.meta["val"].dtype).removeprefix("torch.") for node in nodes]
    assert dtypes == ["float32", "bfloat16", "bfloat16", "float32"]
    assert [name for bucket in plan.buckets for name in plan.wire_dtypes(bucket)] == dtypes


def test_host_shards_take_no_device_memory(group: str) -> None:
    peaks = []
    for device in (None, torch.device("cpu")):
        build = Builder(group)
        full = build.unshard(build.primal(1 << 10), 1 << 13, device=device)
        plan = lowered(build.module(build.call(mul, full, full)), GraphKind.FORWARD)
        peaks.append(max(plan.problem.fixed_bytes))
    assert peaks[0] - peaks[1] == 4 << 10
