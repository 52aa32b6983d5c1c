"""Copy-in of a bucket: one call in Inductor's code, and the kernels that it runs."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard._torch.no_gpu.operators import num_kernels
from graphshard._torch.tensors import chunk_cat_
from graphshard.kinds import TransferKind
from graphshard.ops import bucket_copy
from tests.graph.test_inductor_order import DIM, Deep, _train

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LAUNCH = re.compile(
    r"(all_gather_into_tensor|reduce_scatter_tensor)(_coalesced)?\.default\(\[?(\w+)"
)


def _copied(body: str) -> list[list[str]]:
    """Return the source code of the tensors that each call of ``copy_in`` reads."""
    copied = []
    for line in body.splitlines():
        if "copy_in.default(" in line:
            (statement,) = ast.parse(line.strip()).body
            assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
            tensors = statement.value.args[0]
            assert isinstance(tensors, ast.List)
            copied.append([ast.unparse(tensor) for tensor in tensors.elts])
    return copied


def test_bucket_is_copied_in_by_one_call(mesh: DeviceMesh) -> None:
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
        # No other kernel reads a shard.
        kernels = re.findall(r"cpp_fused\w*\((.*?)\)", body)
        assert kernels and not [args for args in kernels if shards & set(args.split(", "))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunk_cat_matches_packing_by_copies(dtype: torch.dtype) -> None:
    # CUDA packs a bucket with one kernel, CPUs with copies; the kernel also runs on CPUs.
    world = 4
    shapes = [(8, 3), (5,), (1, 2, 2), (9, 2), (3, 0)]
    grads = [torch.randn(shape).to(dtype) for shape in shapes]
    grads.append(torch.randn(6, 7).to(dtype).t())  # dense, but not contiguous
    rows = [-(-grad.shape[0] // world) for grad in grads]
    dtypes = ["float32"] * len(grads)
    (expected,) = bucket_copy.copy_in(grads, rows, dtypes, [len(grads)], ["float32"], world)
    packed = torch.full_like(expected, torch.nan).view(world, -1)
    chunk_cat_(packed, [grad for grad in grads if grad.numel()])
    assert torch.equal(packed.view(-1), expected)


def test_num_kernels_matches_cuda_for_copies() -> None:
    aten = torch.ops.aten
    ours, theirs = [torch.zeros(4, 3) for _ in range(3)], [torch.ones(4, 3) for _ in range(3)]
    copy = aten._foreach_copy_.default
    assert num_kernels(copy, (ours, theirs), {}) == 1
    assert num_kernels(copy, (ours, [t.bfloat16() for t in theirs]), {}) == 1
    assert num_kernels(copy, (ours, [*theirs[1:], theirs[0].bfloat16()]), {}) == 3
    assert num_kernels(copy, (ours, [t.t().contiguous().t() for t in theirs]), {}) == 3
    gaps = list(torch.zeros(4, 9).split(3, 1))
    assert num_kernels(copy, (gaps, theirs), {}) == 3
    split = aten.split_with_sizes_copy
    assert num_kernels(split.out, (torch.zeros(4, 9), [3] * 3, 1), {"out": ours}) == 1
    assert num_kernels(split.default, (torch.zeros(4, 9), [3] * 3, 1), {}) == 3
    cat = aten._chunk_cat.out
    assert num_kernels(cat, (theirs, 0, 2), {"out": torch.zeros(2, 18)}) == 1
    assert num_kernels(cat, (gaps, 0, 2), {"out": torch.zeros(2, 18)}) == 6
