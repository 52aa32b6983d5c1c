"""Verify results of the simulated GPU and claims in docs/ on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from graphshard.kinds import TransferKind
from tests import ranks
from tests.gpu import claims
from tests.gpu.training import on_one_rank

pytestmark = pytest.mark.gpu
GATHERS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE)


def test_sharding_adds_one_kernel_per_bucket_copy() -> None:
    ours = on_one_rank("cuda", claims.profiled, "cuda", True)
    theirs = on_one_rank("cuda", claims.profiled, "cuda", False)
    collectives = sum(plan.count(kind) for plan in ours.plans for kind in GATHERS)
    assert theirs.kernels and collectives
    print(f"{ours.kernels} kernels, {theirs.kernels} unsharded, {collectives} collectives")
    assert ours.kernels <= 1.01 * theirs.kernels + 3 * collectives


def test_graphs_need_no_more_memory_than_planned() -> None:
    found = on_one_rank("cuda", claims.peaks, "cuda")
    for measured, planned in found:
        # A kernel may overwrite its input, which saves one of eleven activations here.
        assert 0.88 * planned <= measured <= 1.01 * planned, found


def _offloaded() -> claims.Profiled:
    return claims.profiled("cuda", True, offload_policy=CPUOffloadPolicy())


def test_host_waits_once_for_each_copy_of_gradients() -> None:
    found = on_one_rank("cuda", _offloaded)
    copies = sum(plan.count(TransferKind.COPY_TO_HOST) for plan in found.plans)
    assert copies and found.waits == ("cudaEventSynchronize",) * copies


def _offload_activations() -> claims.Profiled:
    peak = max(planned for _, planned in claims.peaks("cuda"))
    schedule = graphshard.SchedulePolicy(memory_budget_gb=0.7 * peak / 1e9)
    return claims.profiled("cuda", True, schedule=schedule)


def test_host_does_not_wait_for_offloaded_activations() -> None:
    found = on_one_rank("cuda", _offload_activations)
    assert sum(plan.count(TransferKind.COPY_TO_HOST) for plan in found.plans)
    assert found.waits == ()


def test_cuda_graphs_are_disabled_with_warning() -> None:
    found = on_one_rank("cuda", claims.warnings_about_cuda_graphs, "cuda")
    assert found and "run without CUDA graphs" in found[0]


@pytest.mark.skipif(
    not hasattr(inductor_config, "cudagraph_policy"),
    reason=f"torch {torch.__version__} has no CUDA graph policies",
)
def test_user_policy_is_asked_for_each_graph() -> None:
    found = on_one_rank("cuda", claims.graphs_that_a_policy_captures, "cuda")
    assert found == 2


def test_regions_do_not_change_losses() -> None:
    calls, error = on_one_rank("cuda", claims.error_of_regions, "cuda")
    assert calls and error < 1e-4


def test_saved_code_avoids_compilation(tmp_path: Path) -> None:
    path = tmp_path / "compiled"

    def run(folder: str, function: Callable[..., Any]) -> Any:
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        [found] = ranks.run_fresh(1, function, "cuda", path, backend="nccl", import_env=env)
        return found

    saved = run("here", claims.save)
    losses, misses = run("there", claims.load)
    assert torch.equal(losses, saved) and misses == 0


def test_buffers_of_offloaded_model_are_on_gpu() -> None:
    found = on_one_rank("cuda", claims.devices_of_an_offloaded_model, "cuda")
    assert found == ({"cpu"}, {"cuda"})
