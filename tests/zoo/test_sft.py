"""TRL's `SFTTrainer` with `ShardedTrainerMixin` before it trains as it does by DDP, by its
defaults: bfloat16 and checkpointing. Dynamo leaves its head, which reads another module's weight,
to Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from graphshard.integrations.transformers import ShardedTrainerMixin
from tests import ranks
from tests.numerics.compare import relative_error, whole

from .launched import as_by_torchrun, same, small_llama
from .words import WORDS, tokenizer

STEPS = 4


class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer):
    """The mixin before another trainer."""


def _train(folder: str, kind: Any, **more: Any) -> tuple[SFTTrainer, list[list[float]]]:
    """Return the trainer with its losses and token accuracies."""
    as_by_torchrun()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    lines = [{"text": " ".join(WORDS[i % 7 :] + WORDS[: i % 5])} for i in range(32)]
    arguments = SFTConfig(
        folder,
        use_cpu=True,
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
    return trainer, [[e["loss"] for e in logs], [e["mean_token_accuracy"] for e in logs]]


def beside_ddp(folder: str) -> tuple[float, bool]:
    """The largest relative difference of a loss, and whether a plain model loads what is saved."""
    ours, numbers = _train(folder, ShardedSFTTrainer, sharding={"compiler": "aot_eager"})
    theirs, expected = _train(folder, SFTTrainer)
    for mine, other in zip(numbers, expected, strict=True):
        assert len(other) == STEPS and mine == pytest.approx(other, rel=1e-2)
    trained = {n: whole(p.detach()) for n, p in ours.model.named_parameters()}
    for name, value in theirs.model.named_parameters():
        name = name.removeprefix("module.")
        assert relative_error(trained[name], value.detach()) <= 1e-2, name
    ours.save_model(folder)
    dist.barrier()
    loss = max(abs(a - b) / b for a, b in zip(numbers[0], expected[0]))
    return loss, same(trained, AutoModelForCausalLM.from_pretrained(folder))


def test_sft_trains_as_by_ddp(tmp_path: Path) -> None:
    assert all(saved for _, saved in ranks.run(2, beside_ddp, str(tmp_path)))
