"""A sharded model that one rank saves alone, as scripts for DDP do: that rank raises in seconds."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from tests import ranks

pytestmark = pytest.mark.alone


class Model(nn.Module):
    """A module with a ``save_pretrained`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), folder)


# What the other ranks do meanwhile.


def _barrier(model: Model) -> None:
    dist.barrier()


def _step(model: Model) -> None:
    model(torch.ones(2, 3)).backward()


def _end(model: Model) -> None:
    dist.destroy_process_group()


# How one rank saves.


def by_save_pretrained(model: Model, path: str) -> None:
    model.save_pretrained(path)


def by_full_state_dict(model: Model, path: str) -> None:
    torch.save(graphshard.full_state_dict(model), path)


def _save_alone(others: Any, alone: int, save: Any, path: str) -> str:
    """What the rank raises."""
    model = Model()
    graphshard.shard(model)
    if dist.get_rank() == alone:
        began = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            save(model, path)
        assert time.monotonic() - began < 8
        return str(raised.value)
    with contextlib.suppress(RuntimeError):  # it is released
        others(model)
    return ""


REMEDIES = {
    by_save_pretrained: "call: model.save_pretrained(folder) outside of any `if rank == 0:`",
    by_full_state_dict: "call: state = graphshard.full_state_dict(model) outside of any `if",
}


@pytest.mark.parametrize(
    ("others", "alone", "save"),
    [
        (_barrier, 0, by_save_pretrained),
        (_barrier, 1, by_save_pretrained),
        (_step, 0, by_save_pretrained),
        (_end, 0, by_save_pretrained),
        (_barrier, 0, by_full_state_dict),
    ],
)
def test_save_of_one_rank_is_an_error_at_once(
    others: Any, alone: int, save: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    error = ranks.run_fresh(2, _save_alone, others, alone, save, path)[alone]
    assert f"which all ranks have to {REMEDIES[save]}" in error, error
