"""Saving a sharded model on one rank, as in scripts for DDP, raises within seconds."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests import ranks
from tests.numerics.test_loading import save_in_thread
from tests.ranks import on_ranks

pytestmark = pytest.mark.alone


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), folder)


# Functions that the other ranks run meanwhile.


def _barrier(model: Model) -> None:
    dist.barrier()


def _step(model: Model) -> None:
    model(torch.ones(2, 3)).backward()


def _end(model: Model) -> None:
    dist.destroy_process_group()


# Ways to save on one rank.


def by_save_pretrained(model: Model, path: str) -> None:
    model.save_pretrained(path)


def by_full_state_dict(model: Model, path: str) -> None:
    torch.save(graphshard.full_state_dict(model), path)


def by_torch_save(model: Model, path: str) -> None:
    torch.save({"model": {name: value.cpu() for name, value in model.state_dict().items()}}, path)


def by_torch_save_of_optimizer(model: Model, path: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)


def _save_alone(others: Any, alone: int, save: Any, path: str) -> str:
    """Save on rank `alone` while the others run `others`; return its error, "" on the others."""
    model = Model()
    graphshard.shard(model)
    if dist.get_rank() == alone:
        began = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            save(model, path)
        assert time.monotonic() - began < 8
        return str(raised.value)
    with contextlib.suppress(RuntimeError):  # the saving rank's error ends the wait
        others(model)
    return ""


REMEDIES = {
    by_save_pretrained: "call: model.save_pretrained(folder) outside of any `if rank == 0:`",
    by_full_state_dict: "call: state = graphshard.full_state_dict(model) outside of any `if",
    by_torch_save: "call: each file has only the rows of its rank. For a single file, call `st",
    by_torch_save_of_optimizer: "call: each file has only the rows of its rank.",
}


@pytest.mark.parametrize(
    ("others", "alone", "save"),
    [
        (_barrier, 0, by_save_pretrained),
        (_step, 0, by_save_pretrained),
        (_barrier, 0, by_full_state_dict),
        (_step, 1, by_torch_save),
        (_end, 0, by_torch_save_of_optimizer),
    ],
)
def test_save_on_one_rank_is_an_error_at_once(
    others: Any, alone: int, save: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    error = ranks.run_fresh(2, _save_alone, others, alone, save, path)[alone]
    assert f"which all ranks have to {REMEDIES[save]}" in error, error


@on_ranks(2)
def test_save_on_all_ranks_is_allowed(tmp_path: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    model = graphshard.shard(Model(), mesh)
    state, own = model.state_dict(), tmp_path / f"{rank}.pt"
    time.sleep(2 * rank)
    torch.save(state, own)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    loaded = torch.load(own)
    model.load_state_dict(loaded)
    full = graphshard.full_state_dict(model)
    copied = copy.deepcopy(state)
    if rank == 0:
        torch.save(full, tmp_path / "full.pt")
        pickle.loads(pickle.dumps(state))
        save_in_thread(copied, tmp_path / "thread.pt")
        assert torch.load(tmp_path / "thread.pt").keys() == state.keys()
    dist.barrier()


def _save_after_fault(folder: Path) -> None:
    model = graphshard.shard(Model())
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="have to call"):
            by_full_state_dict(model, "")
    else:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt")  # like an error handler


def test_shards_can_be_saved_after_a_fault(tmp_path: Path) -> None:
    ranks.run_fresh(2, _save_after_fault, tmp_path)
