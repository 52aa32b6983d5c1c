"""Lightning's Trainer and Fabric with tensor parallelism, compared with FSDP2 in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler

import graphshard
from graphshard.integrations.lightning import ShardedFabricStrategy, ShardedStrategy, configure
from tests.numerics.compare import whole
from tests.numerics.parallel import MLP, mesh_2d, under_fsdp2
from tests.ranks import on_ranks

from .launched import as_by_torchrun
from .test_lightning import Saves

EPOCHS, STEPS, MICROBATCHES, ROWS = 2, 2, 2, 5
MAX_NORM = 0.01


def parallelize(model: Any, mesh: DeviceMesh) -> Any:
    return model.parallelize(mesh["tensor_parallel"])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)


def _data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2 * STEPS * MICROBATCHES * ROWS, 6)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def _by_fsdp2(epochs: int = EPOCHS) -> dict[str, Tensor]:
    mesh = mesh_2d()
    model = under_fsdp2(MLP, mesh)
    optim, data = _optimizer(model), _data()
    sampler = DistributedSampler(data, 2, mesh["dp"].get_local_rank(), shuffle=False)
    for _ in range(epochs):
        for number, batch in enumerate(DataLoader(data, ROWS, sampler=sampler)):
            (model(batch) / MICROBATCHES).backward()
            if number % MICROBATCHES == MICROBATCHES - 1:
                graphshard.clip_grad_norm_(model.parameters(), MAX_NORM)
                optim.step()
                optim.zero_grad()
    return _weights(model)


class Model(lightning.LightningModule):
    def __init__(self, parallelize_fn: Any = parallelize) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.parallelize_fn = MLP(), parallelize_fn

    def configure_model(self) -> None:
        configure(self, self.net, parallelize_fn=self.parallelize_fn, compiler="aot_eager")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.net)


ON_CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 4}


def _fit(
    folder: Path,
    model: Model,
    steps: int,
    start: str | None = None,
    callbacks: Sequence[lightning.Callback] = (),
) -> None:
    as_by_torchrun()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        **ON_CPU,
        **dict.fromkeys(quiet, False),
        strategy=ShardedStrategy(tensor_parallel_size=2),
        plugins=[TorchElasticEnvironment()],
        max_steps=steps,
        callbacks=list(callbacks),
        accumulate_grad_batches=MICROBATCHES,
        gradient_clip_val=MAX_NORM,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    # Lightning's default sampler shuffles; Fabric's does not.
    sampler = DistributedSampler(_data(), 2, dist.get_rank() // 2, shuffle=False)
    trainer.fit(model, DataLoader(_data(), ROWS, sampler=sampler), ckpt_path=start)


@on_ranks(4)
def test_lightning_fits_and_resumes_like_fsdp2(tmp_path: Path) -> None:
    first, resumed, saves = Model(), Model(), Saves(str(tmp_path / "saved"), STEPS)
    _fit(tmp_path, first, EPOCHS * STEPS, callbacks=[saves])
    _fit(tmp_path, resumed, EPOCHS * STEPS, start=saves.path)
    expected = _by_fsdp2()
    torch.testing.assert_close(_weights(first.net), expected)
    torch.testing.assert_close(_weights(resumed.net), expected)


@on_ranks(4)
def test_fabric_trains_like_fsdp2() -> None:
    as_by_torchrun()
    strategy = ShardedFabricStrategy(parallelize, tensor_parallel_size=2, compiler="aot_eager")
    fabric = lightning.Fabric(**ON_CPU, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    torch.manual_seed(0)
    net = MLP()
    model, optim = fabric.setup(net, _optimizer(net))
    for number, batch in enumerate(fabric.setup_dataloaders(DataLoader(_data(), ROWS))):
        is_last = number % MICROBATCHES == MICROBATCHES - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(batch) / MICROBATCHES)
        if is_last:
            fabric.clip_gradients(model, optim, max_norm=MAX_NORM)
            optim.step()
            optim.zero_grad()
    torch.testing.assert_close(_weights(net), _by_fsdp2(epochs=1))


@on_ranks(4)
def test_model_that_is_not_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2, but MLP is not split"):
        _fit(tmp_path, Model(parallelize_fn=None), 1)
    with pytest.raises(ValueError, match="parallelize_fn returned a Linear: it must split the MLP"):
        _fit(tmp_path, Model(parallelize_fn=lambda model, mesh: model.out), 1)
