"""torchtitan's trainer with graphshard trains as with FSDP2 and resumes bitwise.

The trainer is started by `torchrun`, as usual.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .words import tokenizer

pytest.importorskip(
    "torchtitan.trainer",
    reason='needs torchtitan 0.3 and torch 2.13: pip install "graphshard[torchtitan]"',
    exc_type=ImportError,
)

from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from graphshard.integrations.torchtitan import llama3
from graphshard.integrations.torchtitan.configure import configure, parallelize

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 5, 3
FSDP2 = ("--parallelism.spmd_backend=partial_dtensor", "--training.disable_cuda_graphs")
OURS = ("--compile.backend=aot_eager",)
SETTINGS = (
    "--debug.seed=1",
    "--metrics.log_freq=1",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
)

FLOAT32 = "--training.mixed_precision_param=float32"
OUR_MODELS, EXPERTS = "graphshard.integrations.torchtitan", "qwen3_moe_debug"

Logged = list[tuple[int, float, float]]


def _train(folder: Path, module: str, config: str, *arguments: str, num_ranks: int = 2) -> Logged:
    """Train; return (step, loss, gradient norm) of each step, as logged by the first rank."""
    assets, losses = folder / "assets", folder / "losses.json"
    tokenizer().save_pretrained(assets)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "-m", "tests.zoo.torchtitan_on_cpu", str(losses)]
    command += ["--module", module, "--config", config]
    command += ["--hf_assets_path", str(assets), "--dump_folder", str(folder)]
    done = subprocess.run(
        [*command, *SETTINGS, f"--training.steps={STEPS}", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [tuple(entry) for entry in json.loads(losses.read_text())]


def _against_fsdp2(folder: Path, model: str, *arguments: str, num_ranks: int = 2) -> None:
    name, ranks = f"{model}_debugmodel", {"num_ranks": num_ranks}
    theirs = _train(folder, model, name, *FSDP2, *arguments, **ranks)
    logged = _train(folder, f"{OUR_MODELS}.{model}", name, *OURS, *arguments, **ranks)
    assert len(logged) >= STEPS and logged[0][1] > logged[-1][1]
    assert [step for step, _, _ in logged] == [step for step, _, _ in theirs]
    for (_, loss, norm), (_, expected, expected_norm) in zip(logged, theirs):
        assert (loss, norm) == pytest.approx((expected, expected_norm), rel=1e-5)


def test_llama_with_microbatches_and_validation_matches_fsdp2(tmp_path: Path) -> None:
    validation = ("--validator.enable", "--validator.freq=2", "--validator.steps=2")
    _against_fsdp2(tmp_path, "llama3", FLOAT32, "--training.global_batch_size=8", *validation)


def test_qwen_with_tied_embeddings_matches_fsdp2(tmp_path: Path) -> None:
    _against_fsdp2(tmp_path, "qwen3", FLOAT32)


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_tensor_parallelism_matches_fsdp2(tmp_path: Path, model: str) -> None:
    split = "--parallelism.tensor_parallel_degree=2"
    _against_fsdp2(tmp_path, model, FLOAT32, split, num_ranks=4)


def experts_against_fsdp2(
    folder: Path, whole_loss: bool, *arguments: str, num_ranks: int = 2
) -> tuple[float, float]:
    """Train a mixture of experts under graphshard and under FSDP2.

    Args:
        whole_loss: whether FSDP2 computes the loss in one piece, like graphshard.

    Returns:
        The largest relative differences of a loss and of a gradient norm.
    """
    piece, ranks = ("--whole_loss",) if whole_loss else (), {"num_ranks": num_ranks}
    theirs = _train(folder, "qwen3", EXPERTS, *piece, *FSDP2, FLOAT32, *arguments, **ranks)
    ours = _train(folder, f"{OUR_MODELS}.qwen3", EXPERTS, *OURS, FLOAT32, *arguments, **ranks)
    pairs = list(zip(ours, theirs, strict=True))
    losses, norms = (max(abs(a[i] - b[i]) / b[i] for a, b in pairs) for i in (1, 2))
    return losses, norms


def test_experts_with_checkpointing_match_fsdp2(tmp_path: Path) -> None:
    loss, _ = experts_against_fsdp2(tmp_path, whole_loss=True)
    assert loss <= 1e-7


def test_expert_parallelism_matches_fsdp2(tmp_path: Path) -> None:
    split = "--parallelism.expert_parallel_degree=2"
    assert max(experts_against_fsdp2(tmp_path, True, split, num_ranks=4)) <= 1e-5


def resumes(folder: Path) -> bool:
    module, name = f"{OUR_MODELS}.llama3", "llama3_debugmodel"
    saves = ("--checkpoint.enable", f"--checkpoint.interval={SAVED}")
    through = _train(folder, module, name, *OURS, *saves)
    again = _train(folder, module, name, *OURS, *saves, f"--checkpoint.load_step={SAVED}")
    return again == through[SAVED:]


def test_torchtitan_resumes_bitwise(tmp_path: Path) -> None:
    assert resumes(tmp_path)


def test_graphshard_config_changes_only_conflicting_settings() -> None:
    theirs, ours = llama3_debugmodel(), llama3.llama3_debugmodel()
    assert ours.loss == theirs.loss.loss_fn
    assert ours.parallelism.spmd_backend == "partial_dtensor"
    assert ours.training.disable_cuda_graphs
    assert ours.optimizer == theirs.optimizer and ours.dataloader == theirs.dataloader
    assert "llama3_8b" in dir(llama3) and not hasattr(llama3, "llama4")


def test_options_that_torchtitan_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="compiler, mesh: torchtitan's settings"):
        configure(llama3_debugmodel(), mesh=None, compiler="inductor")


@pytest.mark.parametrize(
    "degrees, settings, message",
    [
        ({"cp": 2}, {}, "parallelism.context_parallel_degree is more than 1"),
        ({"pp": 2}, {}, "parallelism.pipeline_parallel_degree is more than 1"),
        ({"dp_shard": 2}, {"spmd_backend": "full_dtensor"}, "parallelism.spmd_backend="),
        ({"dp_shard": 2}, {"spmd_backend": "spmd_types"}, "parallelism.spmd_backend="),
    ],
)
def test_other_parallelisms_are_refused(
    degrees: dict[str, int], settings: dict[str, Any], message: str
) -> None:
    of_one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    with pytest.raises(ValueError, match=message):
        parallelize(
            nn.Linear(2, 2),
            parallel_dims=ParallelDims(**{**of_one, **degrees}, world_size=2),
            training=TrainingConfig(),
            parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **settings}),
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
            options={},
        )
