"""Casts move before gathers and into reductions where results stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from graphshard.kinds import GraphKind, TransferKind
from graphshard.ops import markers
from graphshard.ops.marker_specs import ReduceGradSpec, UnshardSpec
from graphshard.ops.nodes import REASON, value_of
from graphshard.passes.casts import cast_before_gather
from tests.graph.builder import Builder, add, count, lowered, mul, run, targets

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
convert = torch.ops.prims.convert_element_type.default
to_copy = torch.ops.aten._to_copy.default


def _cast(build: Builder, node: fx.Node, dtype: torch.dtype, op: Any = convert) -> fx.Node:
    return build.call(op, node, dtype) if op is convert else build.call(op, node, dtype=dtype)


@pytest.mark.parametrize("op", [convert, to_copy])
def test_parameter_is_gathered_in_dtype_of_its_uses(group: str, op: Any) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(2, 3), 13)
    gm = build.module(build.call(mul, *(_cast(build, full, BF16, op) for _ in range(2))))
    run(cast_before_gather, gm)
    gm.graph.lint()
    (marker,) = (node for node in gm.graph.nodes if node.target is markers.unshard)
    spec = UnshardSpec.of_node(marker)
    assert (spec.dtype, spec.reduce_dtype) == (BF16, None)
    assert marker.meta["val"].dtype == BF16
    assert count(gm.graph, op) == 0
    plan = lowered(gm, GraphKind.FORWARD)
    (transfer,) = plan.problem.transfers
    assert (transfer.dtype, transfer.num_bytes) == ("torch.bfloat16", 16 * 3 * 2)
    assert (transfer.casts, transfer.shard_bytes) == (True, 2 * 3 * 4)
    assert plan.params[0].dtype == "torch.float32"


def test_replicated_parameter_is_cast_once(group: str) -> None:
    build = Builder(group)
    gm = build.module(_cast(build, build.replicate(build.primal()), BF16))
    run(cast_before_gather, gm)
    lowered(gm, GraphKind.FORWARD)
    assert targets(gm.graph) == [convert]


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((BF16, None), "used as torch.bfloat16 and torch.float32"),
        ((BF16, FP16), "used as torch.bfloat16 and torch.float16"),
        ((FP64, FP64), None),
        ((FP32, FP32), None),
        ((torch.int32, None), None),
    ],
)
def test_parameter_without_common_narrower_dtype_is_not_cast(
    group: str, dtypes: tuple[torch.dtype | None, ...], reason: str | None
) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(2, 3), 13)
    uses = [build.call(mul, full, 2.0) if d is None else _cast(build, full, d) for d in dtypes]
    gm = build.module(*uses)
    run(cast_before_gather, gm)
    (marker,) = (node for node in gm.graph.nodes if node.target is markers.unshard)
    assert marker.meta["val"].dtype == FP32 and UnshardSpec.of_node(marker).dtype is None
    assert reason is None or reason in marker.meta[REASON]
    plan = lowered(gm, GraphKind.FORWARD)
    assert [why for _, why in plan.reasons] == ([] if reason is None else [marker.meta[REASON]])


@pytest.mark.parametrize(("reduce_dtype", "reduced"), [(None, FP32), (BF16, BF16), (FP32, FP32)])
def test_upcast_of_gradient_becomes_part_of_packing(
    group: str, reduce_dtype: torch.dtype | None, reduced: torch.dtype
) -> None:
    build = Builder(group)
    narrow = _cast(build, build.tangent(13, 3), BF16)
    wide = _cast(build, narrow, FP32)
    gm = build.module(build.reduce(wide, reduce_dtype=reduce_dtype, result_dtype=FP32))
    run(cast_before_gather, gm)
    (marker,) = (node for node in gm.graph.nodes if node.target is markers.reduce_grad)
    spec = ReduceGradSpec.of_node(marker)
    assert (spec.grad, spec.padded_rows, spec.group) == (narrow, 2, group)
    assert (spec.reduce_dtype, spec.result_dtype) == (reduced, FP32)
    assert count(gm.graph, convert) == 1
    plan = lowered(gm, GraphKind.BACKWARD)
    (transfer,) = plan.problem.transfers
    assert (transfer.kind, transfer.dtype) == (TransferKind.REDUCE_SCATTER, str(reduced))
    assert transfer.casts == (reduced is FP32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradient_that_was_rounded_to_fp8_is_sent_wide(group: str, dtype: torch.dtype) -> None:
    build = Builder(group)
    narrow = _cast(build, build.tangent(13, 3), dtype)
    gm = build.module(build.reduce(_cast(build, narrow, FP32), result_dtype=FP32))
    run(cast_before_gather, gm)
    (marker,) = (node for node in gm.graph.nodes if node.target is markers.reduce_grad)
    spec = ReduceGradSpec.of_node(marker)
    assert (value_of(spec.grad).dtype, spec.reduce_dtype) == (FP32, None)
    own = ReduceGradSpec(grad=narrow, padded_rows=2, group=group, reduce_dtype=FP32)
    assert own.exchange_dtype is None
    assert own.collective_input(exchanges=True).wire_dtype == FP32


def test_rounded_or_summed_gradient_is_left_unchanged(group: str) -> None:
    # Rounding changes values, and only one term of the sum is cast.
    build = Builder(group)
    grad = build.tangent(13, 3)
    rounded = build.reduce(_cast(build, grad, BF16), result_dtype=BF16)
    total = build.call(add, _cast(build, _cast(build, grad, BF16), FP32), grad)
    summed = build.reduce(total, result_dtype=FP32)
    gm = build.module(rounded, summed)
    before = str(gm.graph)
    run(cast_before_gather, gm)
    assert str(gm.graph) == before


@pytest.mark.parametrize("rows", [16, 13])
def test_bucket_is_cast_padded_and_packed_at_once(group: str, rows: int) -> None:
    build = Builder(group)
    grads = [_cast(build, build.tangent(rows, 3), BF16) for _ in range(3)]
    gm = build.module(*(build.reduce(g, reduce_dtype=FP32, result_dtype=FP32) for g in grads))
    plan = lowered(gm, GraphKind.BACKWARD)
    assert plan.count(TransferKind.REDUCE_SCATTER) == 1 and plan.count(TransferKind.ALL_GATHER) == 0
    assert count(gm.graph, torch.ops.graphshard.copy_in.default) == 1
    assert count(gm.graph, convert) == 3  # added by this test
