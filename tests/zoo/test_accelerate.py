"""Accelerate with `graphshard.integrations.accelerate.prepare`, compared with Accelerate's DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.integrations.accelerate import (
    ShardedAccelerator,
    metrics,
    prepare,
)
from tests import ranks
from tests.numerics.compare import assert_rounded, relative_error, whole
from tests.numerics.parallel import MLP, mesh_2d, split
from tests.ranks import on_ranks

from .launched import Kept, Texts, as_by_torchrun, same, scalars, small_llama, updates

OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
STEPS, MICROBATCHES = 6, 2


class Training:
    def __init__(self, by: str, optimizer: str = "AdamW", **kwargs: Any) -> None:
        as_by_torchrun()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES, **kwargs)
        torch.manual_seed(0)
        model: nn.Module = small_llama()
        optim = OPTIMIZERS[optimizer](model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.1, total_iters=STEPS)
        loader = torch.utils.data.DataLoader(Texts(2 * STEPS * MICROBATCHES * 2), 2)
        if by == "graphshard":
            prepared = prepare(
                self.accelerator, model, optim, loader, schedule, compiler="aot_eager"
            )
        else:
            prepared = self.accelerator.prepare(model, optim, loader, schedule)
        self.model, self.optim, self.loader, self.schedule = prepared

    def train(self, start: int = 0, end: int | None = None) -> tuple[list[float], list[float]]:
        losses, norms = [], []
        accelerator = self.accelerator
        loader = accelerator.skip_first_batches(self.loader, start * MICROBATCHES)
        for number, batch in enumerate(loader, start * MICROBATCHES):
            if number == (end or STEPS) * MICROBATCHES:
                break
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    norms.append(float(whole(norm)))
                self.optim.step()
                self.schedule.step()
                self.optim.zero_grad()
        return losses, norms

    def weights(self) -> dict[str, torch.Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return {name: whole(param) for name, param in model.named_parameters()}


@on_ranks(2)
def test_trigger_sync_in_backward_reduces_gradients_of_no_sync() -> None:
    grads = []
    for by in ("graphshard", "ddp"):
        training = Training(by)
        accelerator, batches = training.accelerator, iter(training.loader)
        if by == "graphshard":  # with DDP, hooks also get unreduced gradients
            for param in training.model.parameters():
                param.register_post_accumulate_grad_hook(lambda p: p.add_(p.grad, alpha=-0.1))
        with accelerator.no_sync(training.model):
            first, last = (training.model(**next(batches)).loss for _ in range(2))
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(training.model):
            accelerator.backward(last)
        model = accelerator.unwrap_model(training.model)
        grads.append({name: whole(param.grad) for name, param in model.named_parameters()})
    ours, theirs = grads
    assert all(relative_error(ours[name], grad) <= 1e-5 for name, grad in theirs.items())


def _numbers(by: str, mixed_precision: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    training = Training(by, "SGD", mixed_precision=mixed_precision)
    losses, norms = map(torch.tensor, training.train())
    return losses, norms, training.weights()


def compare_with_ddp() -> tuple[float, float, float]:
    (*ours, trained), (*theirs, expected) = (_numbers(by, "no") for by in ("graphshard", "ddp"))
    losses, norms = (float(((a - b) / b).abs().max()) for a, b in zip(ours, theirs))
    return losses, norms, max(relative_error(trained[n], value) for n, value in expected.items())


def test_accelerate_trains_like_ddp() -> None:
    for errors in ranks.run(2, compare_with_ddp):
        assert max(errors) <= 1e-5


@pytest.mark.low_precision
@on_ranks(2)
def test_accelerate_trains_like_ddp_in_bfloat16() -> None:
    runs = [("graphshard", "bf16"), ("ddp", "bf16"), ("ddp", "no")]
    losses, norms, weights = zip(*(_numbers(*run) for run in runs))
    assert_rounded("losses", *({"": of} for of in losses))
    assert_rounded("norms", *({"": of} for of in norms))
    assert_rounded("updates of weights", *map(updates, weights))


def save_and_resume(folder: str) -> Kept:
    path = Path(folder)
    first = Training("graphshard", log_with="tensorboard", project_dir=folder)
    first.accelerator.init_trackers("run")
    teacher = _add_teacher(first)
    first.train(0, 3)
    first.accelerator.save_state(str(path / "state"))
    before = first.weights()
    first.accelerator.save_model(first.model, str(path / "model"))
    rest = first.train(3)
    first.accelerator.log(metrics(first.model), step=STEPS)
    for tracker in first.accelerator.trackers:
        tracker.finish()
    again = Training("graphshard")
    other = _add_teacher(again)
    with torch.no_grad():
        other.weight.zero_()
    again.accelerator.load_state(str(path / "state"))
    assert torch.equal(whole(other.weight), whole(teacher.weight))
    resumed = again.train(3) == rest and same(again.weights(), first.weights())
    plain = small_llama()
    plain.load_state_dict(load_file(path / "model" / "model.safetensors"), strict=False)
    return Kept(same(before, plain), resumed)


def _add_teacher(training: Training) -> nn.Linear:
    teacher = nn.Linear(3, 5).requires_grad_(False)
    prepare(training.accelerator, teacher, compiler="aot_eager")
    return teacher


def test_accelerate_saves_and_resumes_bitwise(tmp_path: Path) -> None:
    assert ranks.run(2, save_and_resume, str(tmp_path)) == [Kept(True, True)] * 2
    assert scalars(tmp_path)["graphshard/measured_exposure"][0] > 0


def _refuse(folder: str) -> None:
    model: nn.Module = nn.Linear(3, 4)
    as_by_torchrun()
    with pytest.raises(ValueError, match="Linear has no module that an integration has sharded"):
        metrics(model)
    with pytest.raises(ValueError, match="others contains a ReLU: prepare one model per call"):
        prepare(Accelerator(cpu=True), model, nn.ReLU())
    with pytest.raises(ValueError, match=r"model is a SGD: pass the nn\.Module to train"):
        prepare(Accelerator(cpu=True), torch.optim.SGD(model.parameters()))
    as_by_torchrun()
    with pytest.raises(ValueError, match="dynamo_backend=INDUCTOR, but graphshard compiles"):
        prepare(Accelerator(cpu=True, dynamo_backend="inductor"), model)
    as_by_torchrun()
    with mock.patch.dict(os.environ):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        with pytest.raises(ValueError, match="distributed_type=FSDP, but graphshard shards"):
            prepare(accelerator, model)
    as_by_torchrun()
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="compiler='gcc'"):
        prepare(accelerator, model, compiler="gcc")
    assert not isinstance(accelerator, ShardedAccelerator) and not accelerator._models
    prepare(accelerator, model, compiler="aot_eager")
    with pytest.raises(ValueError, match="No input_dir"):
        accelerator.load_state()
    with pytest.raises(ValueError, match="is not a checkpoint of a sharded model"):
        accelerator.load_state(folder)


@on_ranks(2)
def test_split_model_is_refused() -> None:
    as_by_torchrun()
    mesh = mesh_2d(dp=1)
    model = split(MLP, mesh)
    for _ in range(2):  # the model is sharded in the second call
        with pytest.raises(ValueError, match="tensor or expert parallelism has split MLP"):
            prepare(Accelerator(cpu=True), model, mesh=mesh["dp"], compiler="aot_eager")
        graphshard.shard(model, mesh["dp"])


def test_bad_input_is_refused_without_changes(tmp_path: Path) -> None:
    ranks.run(2, _refuse, str(tmp_path))


@on_ranks(2)
def test_model_of_failed_prepare_can_be_prepared_for_ddp() -> None:
    as_by_torchrun()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="matches no parameter"):
        prepare(accelerator, model, overrides={"head": {"shard": False}})
    assert not accelerator._models and "forward" not in vars(model)
    assert type(accelerator.prepare(model)) is nn.parallel.DistributedDataParallel


@on_ranks(2)
def test_accelerator_clips_by_norm_of_parameters_on_all_meshes() -> None:
    as_by_torchrun()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    dp, overrides = mesh["efsdp", "ep"]._flatten("dp"), {"1": {"mesh": mesh["efsdp"]}}
    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model = prepare(accelerator, model, mesh=dp, overrides=overrides)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    # Both ranks together have the 16 elements of one linear; each has its own 25 of the other.
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert float(norm) == pytest.approx((16 + 2 * 25) ** 0.5)
