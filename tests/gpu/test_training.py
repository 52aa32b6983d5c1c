"""The helper functions of this folder's GPU tests, run on CPU tensors over gloo."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from benchmarks.models import DeepMLP
from tests import ranks
from tests.gpu import claims
from tests.gpu.shared import collectives
from tests.gpu.training import (
    Trainer,
    agree,
    agree_under_tensor_parallelism,
    by_ddp,
    by_torch_compile,
    cosines_in_fp8,
    on_one_rank,
)
from tests.numerics.compare import NEEDS_FP8, whole
from tests.numerics.test_float8 import MIN_COSINE, quick_products
from tests.ranks import on_ranks


def test_one_rank_agrees_with_torch_compile() -> None:
    on_one_rank("cpu", agree, by_torch_compile, "cpu", "aot_eager")


def test_several_ranks_agree_with_ddp() -> None:
    losses = ranks.run(2, agree, by_ddp, "cpu", "aot_eager")
    assert losses[0] != losses[1]  # batches differ by rank


def test_tensor_parallelism_agrees_with_fsdp2() -> None:
    losses = ranks.run(4, agree_under_tensor_parallelism, "cpu", "aot_eager")
    assert losses[0] == losses[1] != losses[2]  # ranks along tp share batches


def _cosines() -> list[float]:
    with quick_products():
        return cosines_in_fp8("cpu", "aot_eager", "tensorwise")


@NEEDS_FP8
@pytest.mark.low_precision
def test_fp8_gradients_have_direction_of_float32_gradients() -> None:
    [found] = ranks.run(1, _cosines)
    assert min(found) > MIN_COSINE


@on_ranks(2)
def test_trainer_steps_on_cpu() -> None:
    model = DeepMLP(16, 4)
    before = whole(next(model.parameters()))
    trainer = Trainer(model, "cpu", compiler="aot_eager", reshard_after_forward=False)
    for _ in range(2):
        trainer.step()
    assert not torch.equal(whole(next(model.parameters())), before)


def _claims() -> None:
    ours, theirs = (claims.profiled("cpu", sharded) for sharded in (True, False))
    assert ours.plans and not theirs.plans and ours.kernels == 0
    assert all(planned for _, planned in claims.peaks("cpu"))
    assert claims.warnings_about_cuda_graphs("cpu") == []  # there are no CUDA graphs on a CPU
    if hasattr(inductor_config, "cudagraph_policy"):
        assert claims.graphs_that_a_policy_captures("cpu") == 0


def test_one_rank_helpers_run_on_cpu() -> None:
    on_one_rank("cpu", _claims)


def _claims_of_the_documentation() -> None:
    calls, error = claims.error_of_regions("cpu")
    assert calls and error < 1e-5
    assert claims.devices_of_an_offloaded_model("cpu") == ({"cpu"}, {"cpu"})


def test_documentation_claims_run_on_cpu() -> None:
    on_one_rank("cpu", _claims_of_the_documentation)


def test_collectives_run_over_gloo() -> None:
    ranks.run(2, collectives, "cpu")
