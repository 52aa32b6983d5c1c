"""A GPU that is there does as one that is not there said it would: kernels of a step, waits of the
host, memory, and CUDA graphs. See benchmarks/results/cuda.md."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from graphshard.kinds import TransferKind
from tests.gpu import claims
from tests.gpu.training import on_one_rank

pytestmark = pytest.mark.gpu
GATHERS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE)


def test_kernels_are_those_of_an_unsharded_model_and_one_for_each_copy() -> None:
    ours = on_one_rank("cuda", claims.profiled, "cuda", True)
    theirs = on_one_rank("cuda", claims.profiled, "cuda", False)
    collectives = sum(plan.count(kind) for plan in ours.plans for kind in GATHERS)
    assert theirs.kernels and collectives
    print(f"{ours.kernels} kernels, {theirs.kernels} unsharded, {collectives} collectives")
    assert ours.kernels <= 1.01 * theirs.kernels + 3 * collectives


def test_graphs_need_the_memory_that_their_plans_say() -> None:
    found = on_one_rank("cuda", claims.peaks, "cuda")
    for measured, planned in found:
        assert measured == pytest.approx(planned, rel=0.05), found


def _offloaded() -> claims.Profiled:
    return claims.profiled("cuda", True, offload_policy=CPUOffloadPolicy())


def test_the_host_waits_once_for_each_copy_of_gradients() -> None:
    found = on_one_rank("cuda", _offloaded)
    copies = sum(plan.count(TransferKind.COPY_TO_HOST) for plan in found.plans)
    assert copies and found.waits == ("cudaEventSynchronize",) * copies


def _stowed() -> claims.Profiled:
    peak = max(planned for _, planned in claims.peaks("cuda"))
    schedule = graphshard.SchedulePolicy(memory_budget_gb=0.7 * peak / 1e9)
    return claims.profiled("cuda", True, schedule=schedule)


def test_the_host_does_not_wait_for_stowed_activations() -> None:
    found = on_one_rank("cuda", _stowed)
    assert sum(plan.count(TransferKind.COPY_TO_HOST) for plan in found.plans)
    assert found.waits == ()


def test_cuda_graphs_are_off_with_a_warning() -> None:
    found = on_one_rank("cuda", claims.warnings_about_cuda_graphs, "cuda")
    assert found and "run without CUDA graphs" in found[0]


@pytest.mark.skipif(
    not hasattr(inductor_config, "cudagraph_policy"),
    reason=f"torch {torch.__version__} has no policies",
)
def test_a_policy_of_the_user_is_asked_for_each_graph() -> None:
    found = on_one_rank("cuda", claims.graphs_that_a_policy_captures, "cuda")
    assert found == 2
