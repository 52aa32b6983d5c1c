"""Lightning's Trainer and Fabric with graphshard, compared with their DDP."""

from __future__ import annotations

import copy
import csv
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader, DistributedSampler

import graphshard
from graphshard.integrations.lightning import (
    LogMetrics,
    ShardedFabricStrategy,
    ShardedStrategy,
    configure,
    metrics,
)
from graphshard.kinds import TransferKind
from graphshard.params.sharded_param import sharded_param_of
from graphshard.tools.consolidate import consolidate
from tests import ranks, recording
from tests.numerics.compare import relative_error, whole
from tests.ranks import on_ranks

from .launched import Kept, Texts, as_by_torchrun, same, small_llama

STEPS, MICROBATCHES = 4, 2
SHARDING: dict[str, Any] = {"compiler": "aot_eager"}


class Model(lightning.LightningModule):
    def __init__(self, sharded: bool, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.sharded, self.optimizer_name = small_llama(), sharded, optimizer
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.sharded:
            configure(self, self.net, **SHARDING)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.net(**batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.net(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer_name)(self.parameters(), 1e-2)


class Saves(lightning.Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step, self.weights = path, step, dict[str, torch.Tensor]()

    def on_train_batch_end(self, trainer: lightning.Trainer, owner: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.weights:
            self.weights = _weights(owner.net)
            trainer.save_checkpoint(self.path)


class SlowValidation(lightning.Callback):
    def on_validation_end(self, *_: Any) -> None:
        time.sleep(1)


def _fit(
    folder: str,
    model: Model,
    start: str | None = None,
    callbacks: Sequence[lightning.Callback] = (),
    validates: bool = False,
    **strategy: Any,
) -> lightning.Trainer:
    as_by_torchrun()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ShardedStrategy(**strategy) if model.sharded else "ddp",
        plugins=[TorchElasticEnvironment()],
        max_steps=STEPS,
        callbacks=list(callbacks),
        accumulate_grad_batches=MICROBATCHES,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=CSVLogger(folder, "logs") if model.sharded else False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=2,
        use_distributed_sampler=False,
    )
    # All epochs have the same two steps, since Lightning counts epochs differently after resuming.
    texts = Texts(2 * 2 * MICROBATCHES * dist.get_world_size())
    batches = DataLoader(texts, 2, sampler=DistributedSampler(texts, shuffle=False))
    held_out = DataLoader(Texts(8), 2) if validates else None
    trainer.fit(model, batches, held_out, ckpt_path=start)
    return trainer


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def compare_with_ddp(folder: str) -> float:
    recording.clear()
    ours, theirs = Model(True), Model(False)
    callbacks = [LogMetrics(tokens_per_step=10), SlowValidation()]
    trainer = _fit(folder, ours, callbacks=callbacks, validates=True)
    reduced = [e for e in recording.collectives() if e.kind == TransferKind.REDUCE_SCATTER]
    other = _fit(folder, theirs, validates=True)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert len(ours.losses) == STEPS * MICROBATCHES
    expected = _weights(theirs)
    assert all(relative_error(v, expected[n]) <= 1e-5 for n, v in _weights(ours).items())
    losses = [float(t.callback_metrics["val_loss"]) for t in (trainer, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(reduced) % STEPS == 0 and len(reduced) < STEPS * MICROBATCHES
    return max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses))


def test_lightning_fits_like_ddp_and_reduces_once_per_step(tmp_path: Path) -> None:
    ranks.run(2, compare_with_ddp, str(tmp_path), backend="recording")
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["graphshard/step_s"]]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert all(float(row["graphshard/tokens_per_s"]) > 0 for row in rows)
    assert float(rows[-1]["graphshard/measured_exposure"]) > 0
    assert float(rows[2]["graphshard/step_s"]) < 1  # without the validation before this step


def test_metrics_are_logged_if_validation_is_more_frequent() -> None:
    logger, callback = mock.Mock(), LogMetrics()
    trainer: Any = mock.Mock(global_step=0, log_every_n_steps=3, loggers=[logger])
    with mock.patch("graphshard.integrations.lightning.metrics", lambda *_, steps, **__: steps):
        callback.on_train_start(trainer)
        for _ in range(6):
            callback.on_train_batch_start(trainer, mock.Mock())
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, mock.Mock())
            if trainer.global_step % 2 == 0:
                callback.on_validation_end()
    assert logger.log_metrics.mock_calls == [mock.call(1, step=3), mock.call(2, step=6)]


def resume(folder: str) -> Kept:
    """Resume from shards saved midway, and save one file at the end; a plain model loads both."""
    through, again = Model(True, "AdamW"), Model(True, "AdamW")
    shards, end = Saves(f"{folder}/shards.ckpt", STEPS // 2), Saves(f"{folder}/end.ckpt", STEPS)
    _fit(folder, through, callbacks=[shards], save_distributed_checkpoint=True)
    dist.barrier()
    _fit(folder, again, shards.path, [end], save_distributed_checkpoint=False)
    rest = through.losses[-len(again.losses) :]
    assert len(rest) == STEPS * MICROBATCHES // 2
    resumed = again.losses == rest and same(_weights(again), _weights(through))
    file = f"{folder}/{dist.get_rank()}.safetensors"
    consolidate(shards.path, file, "state_dict", strip_prefix="net.")
    plain = small_llama()
    plain.load_state_dict(load_file(file))
    saved = same(shards.weights, plain)
    state = torch.load(end.path, weights_only=False)["state_dict"]
    plain.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    return Kept(saved and same(end.weights, plain), resumed)


def test_lightning_saves_and_resumes_bitwise(tmp_path: Path) -> None:
    assert ranks.run(2, resume, str(tmp_path)) == [Kept(True, True)] * 2


def _refuse_strategy(folder: str) -> None:
    # DDPStrategy stands for all strategies without a mesh; Lightning rejects FSDPStrategy on a CPU.
    owner = Model(True)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy="ddp", logger=False)
    with pytest.raises(ValueError, match="DDPStrategy, has no mesh: use strategy=ShardedStrategy"):
        trainer.fit(owner, DataLoader(Texts(4), 2))
    assert not any(map(sharded_param_of, owner.parameters()))


def test_other_lightning_strategy_is_refused(tmp_path: Path) -> None:
    ranks.run(1, _refuse_strategy, str(tmp_path))


class WithPlainParts(Model):
    def __init__(self) -> None:
        super().__init__(sharded=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.norm = torch.nn.BatchNorm1d(3)


@on_ranks(2)
def test_offloaded_parameters_stay_on_the_host() -> None:
    owner, strategy = WithPlainParts(), ShardedStrategy()
    graphshard.shard(owner.net, offload_policy=CPUOffloadPolicy())
    strategy.model = owner
    device = torch.device("meta")  # stands for a GPU
    with mock.patch.object(ShardedStrategy, "root_device", device):
        strategy.model_to_device()
    assert owner.device == owner.scale.device == owner.norm.running_mean.device == device
    assert all(param.device.type == "cpu" for param in owner.net.parameters())
    assert all(sharded_param_of(param) is not None for param in owner.net.parameters())


def test_fabric_strategy_takes_arguments_of_lightning_and_backend() -> None:
    timeout = timedelta(seconds=77)
    strategy: Any = ShardedFabricStrategy(timeout=timeout, process_group_backend="gloo", **SHARDING)
    assert strategy._timeout == timeout and strategy.process_group_backend == "gloo"
    assert strategy._options == SHARDING
    with pytest.raises(ValueError, match=r"reshard=False: neither .* accepts this argument"):
        ShardedFabricStrategy(reshard=False)


def _fabric(strategy: Any, folder: str) -> lightning.Fabric:
    as_by_torchrun()
    return lightning.Fabric(
        loggers=FabricLogger(folder, flush_logs_every_n_steps=1) if folder else None,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
    )


def _train_by_fabric(strategy: Any, folder: str = "", start: int = 0) -> tuple[list[float], Any]:
    """Train, and return losses and weights.

    Args:
        folder: folder for a checkpoint saved midway, and for the weights at that point; "" saves
            nothing.
        start: step at which to resume from that checkpoint; 0 starts from scratch.
    """
    fabric = _fabric(strategy, folder)
    fabric.launch()
    torch.manual_seed(0)
    net = small_llama()
    model, optim = fabric.setup(net, torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9))
    state = {"model": model, "optim": optim}
    if start:
        assert fabric.load(f"{folder}/saved", state) == {"step": start}
    loader = fabric.setup_dataloaders(DataLoader(Texts(2 * 2 * STEPS * MICROBATCHES), 2))
    losses = []
    for number, batch in enumerate(loader):
        step, micro = divmod(number, MICROBATCHES)
        if step < start:
            continue
        last = micro == MICROBATCHES - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(**batch).loss
            fabric.backward(loss)
        losses.append(loss.item())
        if last:
            fabric.clip_gradients(model, optim, max_norm=1.0)
            optim.step()
            optim.zero_grad()
            if folder and not start and step + 1 == STEPS // 2:
                fabric.save(f"{folder}/saved", {**state, "step": step + 1})
                torch.save(_weights(net), f"{folder}/weights{dist.get_rank()}.pt")
    if folder:
        fabric.log_dict(metrics(model), step=STEPS)
    return losses, _weights(net)


def compare_and_resume_by_fabric(folder: str) -> tuple[float, Kept]:
    """Return the largest relative difference of a loss from DDP's, and the results of resuming."""
    saving = {"save_distributed_checkpoint": False, **SHARDING}
    recording.clear()
    losses, weights = _train_by_fabric(ShardedFabricStrategy(**saving), folder)
    reduced = [e for e in recording.collectives() if e.kind == TransferKind.REDUCE_SCATTER]
    expected, values = _train_by_fabric("ddp")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(relative_error(weights[name], value) <= 1e-5 for name, value in values.items())
    assert len(reduced) % STEPS == 0 and 0 < len(reduced) < STEPS * MICROBATCHES
    loss = max(abs(a - b) / b for a, b in zip(losses, expected))
    rest, again = _train_by_fabric(ShardedFabricStrategy(**saving), folder, STEPS // 2)
    resumed = losses[-len(rest) :] == rest and same(again, weights)
    plain = small_llama()
    plain.load_state_dict(torch.load(f"{folder}/saved")["model"], strict=False)
    saved = same(torch.load(f"{folder}/weights{dist.get_rank()}.pt"), plain)
    return loss, Kept(saved, resumed)


def test_fabric_trains_like_ddp_and_resumes_bitwise(tmp_path: Path) -> None:
    found = ranks.run(2, compare_and_resume_by_fabric, str(tmp_path), backend="recording")
    assert [kept for _, kept in found] == [Kept(True, True)] * 2
    first = min(tmp_path.rglob("metrics.csv"))
    (row,) = csv.DictReader(first.read_text().splitlines())
    assert float(row["graphshard/measured_exposure"]) > 0


def test_deepcopy_of_backend_returns_same_backend() -> None:
    backend = graphshard.backend(compiler="aot_eager")
    assert copy.deepcopy({"backend": backend})["backend"] is backend
