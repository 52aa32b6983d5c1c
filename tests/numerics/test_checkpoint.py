"""Checkpoints of `torch.distributed.checkpoint`: other numbers of ranks, interrupted saves."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.tools.consolidate import consolidate
from tests import ranks
from tests.models import GPT, MLP
from tests.numerics.compare import compile_sharded, draw, whole, world_mesh

States = dict[str, dict[str, Any]]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def _values(states: States) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = whole(value)
        elif isinstance(value, dict):
            for name, inner in value.items():
                visit(f"{path}/{name}", inner)

    visit("", states)
    return found


def _step(compiled: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    compiled(draw(MLP.batch, step)[dist.get_rank()]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_and_save(path: Path) -> dict[str, torch.Tensor]:
    """Train, and save in the background during another step; return the saved values."""
    model = MLP()
    compiled = compile_sharded(model)
    optimizer = _optimizer(model)
    for step in range(3):
        _step(compiled, optimizer, step)
    states = _states(model, optimizer)
    values = _values(states)
    # The save has its own group, so its collectives do not interleave with those of training.
    group = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save(states, checkpoint_id=path, process_group=group)
    _step(compiled, optimizer, 3)
    saving.result()
    assert any(not torch.equal(v, values[n]) for n, v in _values(_states(model, optimizer)).items())
    return values


def _load_and_save(path: Path, target: Path, kind: str, expected: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint of another world size, check values bitwise, and save again."""
    torch.manual_seed(77)
    model: Any = MLP()
    if kind == "graphshard":
        graphshard.shard(model, world_mesh())
    else:
        fully_shard(model, mesh=world_mesh())
    optimizer = _optimizer(model)
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=path)
    loaded = dict(zip(("model_state_dict", "optim_state_dict"), states.values()))
    set_state_dict(model, optimizer, **loaded)
    states = _states(model, optimizer)
    values = _values(states)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
    dcp.save(states, checkpoint_id=target)


def test_checkpoint_loads_on_fewer_ranks_with_fsdp2_and_then_on_more(tmp_path: Path) -> None:
    of_four, of_two, of_three = (tmp_path / name for name in ("four", "two", "three"))
    values = ranks.run(4, _train_and_save, of_four)[0]
    ranks.run(2, _load_and_save, of_four, of_two, "fsdp2", values)
    ranks.run(3, _load_and_save, of_two, of_three, "graphshard", values)


class Killed(dcp.FileSystemWriter):
    """Writer that kills its process after writing half of the items."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        half = dataclasses.replace(plan, items=plan.items[: len(plan.items) // 2])
        super().write_data(half, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def save_twice(folder: str) -> None:
    torch.manual_seed(0)
    model = graphshard.shard(GPT(), world_mesh())
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/step-1")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    dcp.save({"model": model.state_dict()}, storage_writer=Killed(f"{folder}/step-2"))


def _load_good(folder: Path) -> None:
    torch.manual_seed(0)
    expected = GPT().state_dict()
    torch.manual_seed(77)
    model = graphshard.shard(GPT(), world_mesh())
    state = {"model": model.state_dict()}
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=folder / "step-2")
    dcp.load(state, checkpoint_id=folder / "step-1")
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name


def test_interrupted_save_keeps_previous_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ranks.RankError, match="killed by SIGKILL"):
        ranks.run_fresh(1, save_twice, str(tmp_path))
    assert list((tmp_path / "step-2").glob("*.distcp"))
    ranks.run(2, _load_good, tmp_path)
    with pytest.raises(ValueError, match="step-2: not a checkpoint"):
        consolidate(tmp_path / "step-2", tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    consolidate(tmp_path / "step-1", tmp_path / "model.pt")
