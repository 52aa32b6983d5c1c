"""`benchmarks.offload_streams` applied to a profile written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.offload_streams import Launched, hidden_part, launches_of, violations
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Bucket, Plan, Problem

COMPUTE, COPY, NCCL = 7, 13, 20


def _event(cat: str, name: str, ts: float, dur: float, **args: int) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def _profile(gather_us: float) -> Any:
    """Return a profile of a copy (20 to 40 us), a kernel (30 to 60 us) and then a gather.

    A kernel launched by another thread runs at the same time.
    """
    return {
        "traceEvents": [
            _event("cpu_op", "graphshard::copy_to_device", 0, 4),
            _event("cpu_op", "aten::copy_", 1, 2),
            _event("cuda_runtime", "cudaMemcpyAsync", 2, 1, correlation=1),
            {**_event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=4), "tid": 2},
            _event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=2),
            _event("cpu_op", "_c10d_functional::all_gather_into_tensor", 7, 3),
            _event("cuda_runtime", "cudaLaunchKernelExC", 8, 1, correlation=3),
            _event("gpu_memcpy", "Memcpy HtoD", 20, 20, correlation=1, stream=COPY),
            _event("kernel", "gemm", 30, 30, correlation=2, stream=COMPUTE),
            _event("kernel", "gelu", 30, 10, correlation=4, stream=COMPUTE + 1),
            _event("kernel", "ncclDevKernel_AllGather", gather_us, 5, correlation=3, stream=NCCL),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ]
    }


def _plan() -> Plan:
    buckets = tuple(
        Bucket(kind, ((0,),), 64, "0", 2, launch=0, wait=0)
        for kind in (TransferKind.COPY_TO_DEVICE, TransferKind.ALL_GATHER)
    )
    return Plan((), Problem(GraphKind.FORWARD, ("mm",), (1.0,), (0,), (0, 0), ()), buckets)


def test_launch_is_gpu_work_of_its_operator() -> None:
    assert launches_of(_profile(gather_us=41)) == [
        Launched(TransferKind.COPY_TO_DEVICE, [(20, 40, str(COPY))]),
        Launched(TransferKind.ALL_GATHER, [(41, 46, str(NCCL))]),
    ]


def test_gather_that_begins_before_its_copy_ends_is_a_violation() -> None:
    assert violations([_plan()], launches_of(_profile(gather_us=41))) == (1, [])
    _, [violation] = violations([_plan()], launches_of(_profile(gather_us=38)))
    assert "all_gather (bucket 1) begins 2 us before copy_to_device (bucket 0) is done" in violation


def test_launch_without_gpu_work_is_an_error() -> None:
    profile = _profile(gather_us=41)
    profile["traceEvents"] = [e for e in profile["traceEvents"] if e["name"] != "Memcpy HtoD"]
    with pytest.raises(RuntimeError, match=r"graphshard::copy_to_device: .* has no GPU work"):
        launches_of(profile)


def test_launches_that_differ_from_plan_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the profile has 1 launches.*the plans have 2"):
        violations([_plan()], launches_of(_profile(gather_us=41))[:1])


def test_hidden_part_is_time_that_overlaps_kernels() -> None:
    profile = _profile(gather_us=58)
    copy, gather = launches_of(profile)
    assert hidden_part([copy], profile) == 0.5
    assert hidden_part([gather], profile) == pytest.approx(2 / 5)
    assert hidden_part([copy, gather], profile) == pytest.approx(12 / 25)
