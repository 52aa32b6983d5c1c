"""`reduce="exchange"`: gradients travel in their own dtype and are summed in a wider one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.kinds import TransferKind
from graphshard.planning.plan import Plan
from tests.models import MLP

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _backward(
    mesh: DeviceMesh, reduce: str, folder: Path, policy: MixedPrecisionPolicy = _BF16
) -> tuple[Plan, str]:
    """Return the plan and the code of a backward graph."""
    schedule = graphshard.SchedulePolicy(reduce=reduce)  # type: ignore[arg-type]
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
    dtypes = {(t.dtype, t.summed_in) for t in exchange.problem.transfers if t.kind == kind}
    assert dtypes == {("torch.bfloat16", "torch.float32")}


def test_gradients_of_the_reduction_dtype_are_not_exchanged(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    _, code = _backward(mesh, "exchange", tmp_path, MixedPrecisionPolicy())
    assert "all_to_all_single" not in code


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule\.reduce='tree': must be"):
        graphshard.SchedulePolicy(reduce="tree")  # type: ignore[arg-type]
