"""Optimizer state dicts in files: ranks load their own shards and refuse those of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import graphshard
from graphshard.integrations.common import load_sharded, save_sharded
from tests import ranks
from tests.numerics.compare import assert_plain, draw, world_mesh
from tests.numerics.test_loading import Even, save_in_thread
from tests.ranks import on_ranks


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.1)


def _trained(shape: tuple[int, ...]) -> torch.optim.Optimizer:
    model = graphshard.shard(Even(), init_device_mesh("cpu", shape))
    optimizer = _adam(model)
    model(draw(Even.batch, 0)[dist.get_rank()]).backward()
    optimizer.step()
    return optimizer


def _save_alone(path: Path, shape: tuple[int, ...]) -> None:
    state = _trained(shape).state_dict()
    if dist.get_rank() == 0:
        save_in_thread(state, path)
    dist.barrier()


def _load(path: Path, shape: tuple[int, ...], refused: str | None) -> None:
    optimizer = _trained(shape)
    before = copy.deepcopy(optimizer.state_dict())
    state = torch.load(path)
    if refused is None:
        optimizer.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=refused) as caught:
        optimizer.load_state_dict(state)
    assert "exp_avg of up.weight" in str(caught.value)
    _assert_equal(optimizer.state_dict(), before)


def _assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        for name, value in values.items():
            own = ours["state"][number][name]
            own, value = (v.to_local() if isinstance(v, DTensor) else v for v in (own, value))
            assert torch.equal(own, value), name


def _save_and_load_alone(path: Path, shape: tuple[int, ...]) -> None:
    _save_alone(path, shape)
    is_own = dist.get_rank() % shape[-1] == 0  # this rank or its replica saved
    _load(path, shape, None if is_own else "only one rank saved the file")


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_state_saved_by_one_rank_is_refused_by_others(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    ranks.run(torch.Size(shape).numel(), _save_and_load_alone, tmp_path / "optim.pt", shape)


def test_state_of_another_world_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "optim.pt"
    ranks.run(2, _save_alone, path, (2,))
    ranks.run(4, _load, path, (4,), r"over the ranks \[0, 1\].*over \[0, 1, 2, 3\]")


@on_ranks(2)
def test_each_rank_loads_its_own_file(tmp_path: Path) -> None:
    optimizer = _trained((2,))
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(optimizer.state_dict(), path)
    for loaded in (_trained((2,)), _adam(graphshard.shard(Even(), world_mesh()))):
        loaded.load_state_dict(torch.load(path))
        _assert_equal(loaded.state_dict(), optimizer.state_dict())
        loaded.step()


def _before_sharding(path: Path) -> None:
    _save_alone(path, (2,))
    model = Even()
    optimizer = _adam(model)
    optimizer.load_state_dict(torch.load(path))
    with pytest.raises(
        ValueError, match=r"Adam has loaded sharded state .* 'up.weight'.* before optimizer.load"
    ):
        graphshard.shard(model, init_device_mesh("cpu", (2,)))
    assert_plain(model)


def test_sharded_state_loaded_before_sharding_raises(tmp_path: Path) -> None:
    ranks.run(2, _before_sharding, tmp_path / "optim.pt")


@pytest.mark.parametrize("stepped", [(), ("up",), ("up", "down")])
@on_ranks(2)
def test_folder_has_exactly_the_state_of_stepped_parameters(tmp_path: Path, stepped: Any) -> None:
    model, other = (graphshard.shard(Even(), world_mesh()) for _ in range(2))
    optimizer, loaded = _adam(model), _adam(other)
    for name in stepped:
        for param in model.get_submodule(name).parameters():
            param.grad = torch.ones_like(param)
    if stepped:
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.5
    before = copy.deepcopy(optimizer.state_dict())
    save_sharded(tmp_path, model, [optimizer])
    _assert_equal(optimizer.state_dict(), before)
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    loaded.step()
    load_sharded(tmp_path, other, [loaded])
    _assert_equal(loaded.state_dict(), before)
    assert all(param.grad is not None for param in other.parameters())


@pytest.mark.parametrize("weights", [True, False])
@on_ranks(2)
def test_state_remains_if_folder_lacks_a_parameter(tmp_path: Path, weights: bool) -> None:
    save_sharded(tmp_path, graphshard.shard(torch.nn.Linear(3, 4), world_mesh()), [])
    model = graphshard.shard(Even(), world_mesh())
    optimizer = _adam(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointException, match="Missing key"):
        load_sharded(tmp_path, model, [optimizer], weights=weights)
    _assert_equal(optimizer.state_dict(), before)


def _sgd(model: torch.nn.Module, lrs: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer with a param group for each key, which lists its parameters."""
    groups = [
        {"params": [model.get_parameter(name) for name in names.split()], "lr": lr}
        for names, lr in lrs.items()
    ]
    return torch.optim.SGD(groups, momentum=0.9)


# Learning rates that the groups of a new optimizer get from those that were saved.
REGROUPED = {
    "fewer": {"up.weight": 0.125, "down.weight": 0.5},
    "more": {"up.bias": 0.25, "down.bias": 9.0, "down.weight": 0.5, "up.weight": 0.125},
    "joined": {"down.bias down.weight": 0.5, "up.weight": 0.125},
}


@pytest.mark.parametrize("as_lr", [float, torch.tensor])
@pytest.mark.parametrize("case", REGROUPED)
@on_ranks(2)
def test_groups_take_saved_settings_by_name(tmp_path: Path, case: str, as_lr: Any) -> None:
    model = graphshard.shard(Even(), world_mesh())
    saved = {"up.weight": 0.125, "up.bias": 0.25, "down.weight": 0.5}
    save_sharded(tmp_path, model, [_sgd(model, {k: as_lr(lr) for k, lr in saved.items()})])
    loaded = _sgd(model, dict.fromkeys(REGROUPED[case], as_lr(9.0)))
    torch.optim.lr_scheduler.OneCycleLR(loaded, 4.0, 10)  # adds settings that were not saved
    load_sharded(tmp_path, model, [loaded])
    for group, lr in zip(loaded.param_groups, REGROUPED[case].values(), strict=True):
        assert type(group["lr"]) is type(as_lr(lr)) and group["max_lr"] == 4
        assert group["lr"] == lr or lr == 9


class _Lookahead(torch.optim.SGD):
    """SGD that counts its steps, and halves all weights in every second one."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps % 2 == 0:
            for param in self.param_groups[0]["params"]:
                param.data.mul_(0.5)
        return super().step(closure)


@on_ranks(2)
def test_loading_calls_no_hooks_and_changes_only_state(tmp_path: Path) -> None:
    model = graphshard.shard(Even(), world_mesh())
    optimizer = _Lookahead(model.parameters(), 0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save_sharded(tmp_path, model, [optimizer])
    before, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    hook = mock.Mock(return_value=None)
    with (
        optimizer.register_step_pre_hook(hook),
        optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
    ):
        load_sharded(tmp_path, model, [optimizer], weights=False)
        assert not hook.called and optimizer.steps == 1
        _assert_equal(optimizer.state_dict(), state)
        for name, value in model.state_dict().items():
            assert torch.equal(value.to_local(), before[name].to_local()), name
        optimizer.step()
        assert hook.called and optimizer.steps == 2


class _Refusing(torch.optim.Adam):
    """Adam that, like schedule-free optimizers, steps only after ``train()``."""

    trains = False

    def step(self, closure: Any = None) -> Any:
        if not self.trains:
            raise RuntimeError("call train() first")
        return super().step(closure)

    def train(self) -> None:
        self.trains = True


def _empty_first_group(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": []}, {"params": [*model.parameters()]}], 0.1)


# Optimizers that ``torch.distributed.checkpoint.state_dict`` cannot load.
RESUMED: dict[str, tuple[Callable[[torch.nn.Module], torch.optim.Optimizer], bool]] = {
    "empty first group": (_empty_first_group, False),
    "frozen at load": (_adam, True),
    "refuses to step": (lambda model: _Refusing(model.parameters(), 0.1), False),
}


@pytest.mark.parametrize("case", RESUMED)
@on_ranks(2)
def test_resumed_optimizer_has_saved_state(tmp_path: Path, case: str) -> None:
    make, is_frozen = RESUMED[case]
    model, other = (graphshard.shard(Even(), world_mesh()) for _ in range(2))
    optimizer, loaded = make(model), make(other)
    if isinstance(optimizer, _Refusing):
        optimizer.train()
    for param in model.parameters():
        param.grad = torch.full_like(param, 2)
    optimizer.step()
    save_sharded(tmp_path, model, [optimizer])
    other.up.requires_grad_(not is_frozen)
    load_sharded(tmp_path, other, [loaded])
    _assert_equal(loaded.state_dict(), optimizer.state_dict())


@on_ranks(2)
def test_optimizers_without_state_resume(tmp_path: Path) -> None:
    model = graphshard.shard(Even(), world_mesh())
    parts = model.up, model.down
    optimizers = [torch.optim.SGD(part.parameters(), lr) for part, lr in zip(parts, (0.1, 0.2))]
    save_sharded(tmp_path, model, optimizers)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 1.0
    load_sharded(tmp_path, model, optimizers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1, 0.2]


@on_ranks(2)
def test_interrupted_overwrite_is_no_checkpoint(tmp_path: Path) -> None:
    model = graphshard.shard(Even(), world_mesh())
    save_sharded(tmp_path, model, [])
    with (
        mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("disk full")),
        pytest.raises(CheckpointException),
    ):
        save_sharded(tmp_path, model, [])
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_sharded(tmp_path, model, [])
