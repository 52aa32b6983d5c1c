"""Inductor's code copies a bucket in by one call, which casts, pads and packs all its tensors and
reads them where they are."""

from __future__ import annotations

import ast
import re

import torch
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.kinds import TransferKind
from tests.graph.test_inductor_order import DIM, Deep, _train

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LAUNCH = re.compile(
    r"(all_gather_into_tensor|reduce_scatter_tensor)(_coalesced)?\.default\(\[?(\w+)"
)


def _copied(body: str) -> list[list[str]]:
    """The tensors that each call of ``copy_in`` reads, as text."""
    copied = []
    for line in body.splitlines():
        if "copy_in.default(" in line:
            (statement,) = ast.parse(line.strip()).body
            assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
            tensors = statement.value.args[0]
            assert isinstance(tensors, ast.List)
            copied.append([ast.unparse(tensor) for tensor in tensors.elts])
    return copied


def test_a_bucket_is_copied_in_by_one_call(mesh: DeviceMesh) -> None:
    schedule = graphshard.SchedulePolicy(bucket_cap_mb=4 * DIM * DIM * 4 / 1e6)
    backend = graphshard.backend(mesh, mp_policy=POLICY, schedule=schedule)
    model = torch.compile(Deep(), backend=backend, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(_train, model)
    assert len(codes) == len(backend.plans) == 2
    for code, plan in zip(codes, backend.plans):
        body = code[code.index("def call(") :]
        copied = _copied(body)
        assert len(copied) == len(LAUNCH.findall(body)) == len(plan.buckets)
        assert sum(map(len, copied)) == len(plan.problem.transfers)
        assert max(map(len, copied)) > 1
        shards = {name for names in copied for name in names if name.startswith("primals_")}
        gathers = [t for t in plan.problem.transfers if t.kind == TransferKind.ALL_GATHER]
        assert len(shards) == len(gathers) > 1
        # Nothing else is done to a shard: no kernel reads one.
        kernels = re.findall(r"cpp_fused\w*\((.*?)\)", body)
        assert kernels and not [args for args in kernels if shards & set(args.split(", "))]
