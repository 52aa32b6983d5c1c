"""TRL's `SFTTrainer` with `ShardedTrainerMixin` trains like `SFTTrainer` under DDP.

The trainer keeps its defaults, which include bfloat16 and activation checkpointing. Its loss reads
the head's weight outside of the module, in eager Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from graphshard.integrations.transformers import ShardedTrainerMixin
from tests import ranks
from tests.numerics.compare import assert_rounded, whole

from .launched import as_by_torchrun, same, small_llama, updates
from .words import WORDS, tokenizer

STEPS = 4


class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer):
    """SFTTrainer with the mixin as its first base class."""


def _train(folder: str, kind: Any, bf16: bool = True, **more: Any) -> tuple[SFTTrainer, Tensor]:
    as_by_torchrun()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    lines = [{"text": " ".join(WORDS[i % 7 :] + WORDS[: i % 5])} for i in range(32)]
    arguments = SFTConfig(
        folder,
        use_cpu=True,
        bf16=bf16,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = kind(
        small_llama(),
        arguments,
        train_dataset=datasets.Dataset.from_list(lines),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == STEPS and all("mean_token_accuracy" in entry for entry in logs)
    return trainer, torch.tensor([entry["loss"] for entry in logs])


def _trained(trainer: SFTTrainer) -> dict[str, Tensor]:
    params = trainer.model.named_parameters()
    return {name.removeprefix("module."): whole(param) for name, param in params}


def compare_with_ddp(folder: str) -> tuple[float, bool]:
    """Return the largest relative difference of a loss from DDP's, and whether saving is exact."""
    sharded, ours = _train(folder, ShardedSFTTrainer, sharding={"compiler": "aot_eager"})
    plain, theirs = _train(folder, SFTTrainer)
    exact_plain, exact = _train(folder, SFTTrainer, bf16=False)
    assert_rounded("losses", *({"": losses} for losses in (ours, theirs, exact)))
    trained = _trained(sharded)
    weights = (updates(of) for of in (trained, _trained(plain), _trained(exact_plain)))
    assert_rounded("updates of weights", *weights)
    sharded.save_model(folder)
    dist.barrier()
    loss = float(((ours - theirs) / theirs).abs().max())
    return loss, same(trained, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.low_precision
def test_sft_trains_like_ddp(tmp_path: Path) -> None:
    assert all(saved for _, saved in ranks.run(2, compare_with_ddp, str(tmp_path)))
