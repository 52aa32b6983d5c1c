"""`reduce="exchange"`: gradients are sent in their own dtype and summed in a wider one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import Rate
from graphshard.kinds import TransferKind
from graphshard.planning.plan import Plan
from tests.models import MLP

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _backward(
    mesh: DeviceMesh,
    reduce: str,
    folder: Path,
    policy: MixedPrecisionPolicy = _BF16,
    **options: Any,
) -> tuple[Plan, str]:
    schedule = graphshard.SchedulePolicy(reduce=reduce, **options)  # type: ignore[arg-type]
    backend = graphshard.backend(
        mesh, compiler="aot_eager", mp_policy=policy, schedule=schedule, dump=folder
    )
    torch.compile(MLP(), backend=backend)(torch.ones(5, 7)).backward()
    return backend.plans[1], (folder / "00-backward.after.py").read_text()


def test_exchange_sends_half_the_bytes(mesh: DeviceMesh, tmp_path: Path) -> None:
    ring, ring_code = _backward(mesh, "ring", tmp_path / "ring")
    exchange, code = _backward(mesh, "exchange", tmp_path / "exchange")
    kind = TransferKind.REDUCE_SCATTER
    assert 2 * exchange.num_bytes(kind) == ring.num_bytes(kind) > 0
    assert "all_to_all_single" in code and "reduce_scatter" not in code
    assert "all_to_all_single" not in ring_code and "reduce_scatter" in ring_code
    reductions = [bucket for bucket in exchange.buckets if bucket.kind == kind]
    assert {exchange.wire_dtypes(bucket) for bucket in reductions} == {("bfloat16",)}
    # Without overlap, buckets do not depend on predicted times.
    in_order, code = _backward(mesh, "exchange", tmp_path / "in order", overlap=False)
    assert in_order.num_bytes(kind) == exchange.num_bytes(kind)
    assert "all_to_all_single" in code and "reduce_scatter" not in code


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["shard", "replicate and shard"])
def test_auto_exchanges_gradients_if_that_is_faster(
    mesh: DeviceMesh, tmp_path: Path, shape: Any
) -> None:
    mesh = init_device_mesh("cpu", shape)
    # The first machine has links without latency: all buckets are bound by their bytes.
    table, path = HARDWARE["H100"], tmp_path / "machine.json"
    slow = dataclasses.replace(table.intra, latency_us=0.0, hop_us=0.0, bus=_slow(table.intra.bus))
    path.write_text(dataclasses.replace(table, intra=slow).to_json())
    for hardware, op, other in (
        (str(path), "all_to_all_single", "reduce_scatter"),
        ("H100", "reduce_scatter", "all_to_all_single"),
    ):
        plan, code = _backward(mesh, "auto", tmp_path / other, hardware=hardware)
        assert op in code and other not in code
        reduced = [b for b in plan.buckets if b.kind == TransferKind.ALL_REDUCE_SHARDS]
        assert bool(reduced) == (len(shape) == 2)
        assert all(plan.wire_dtypes(bucket) == ("float32",) for bucket in reduced)


def _slow(bus: Mapping[str, Rate]) -> dict[str, Rate]:
    return {name: dataclasses.replace(rate, peak=1e6) for name, rate in bus.items()}


def test_gradients_in_reduction_dtype_are_not_exchanged(mesh: DeviceMesh, tmp_path: Path) -> None:
    _, code = _backward(mesh, "exchange", tmp_path, MixedPrecisionPolicy())
    assert "all_to_all_single" not in code


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule\.reduce='tree': must be"):
        graphshard.SchedulePolicy(reduce="tree")  # type: ignore[arg-type]
