"""The state of a sharded model and its optimizers in a folder, each rank writing its shards.

It is a checkpoint of ``torch.distributed.checkpoint`` with the keys ``model`` and, where there are
optimizers, ``optim``. Any number of ranks loads it, and ``python -m graphshard consolidate FOLDER
model.safetensors --key model`` makes a plain file of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


def save_sharded(
    folder: Path, model: nn.Module, optimizers: Iterable[Optimizer], *, weights: bool = True
) -> None:
    """Write the state of ``model`` and of its optimizers; all ranks have to call it.

    Args:
        weights: False: the optimizers alone.
    """
    dcp.save(_state(model, list(optimizers), weights), checkpoint_id=folder)


def load_sharded(
    folder: Path, model: nn.Module, optimizers: Iterable[Optimizer], *, weights: bool = True
) -> None:
    """Load in place what :func:`save_sharded` wrote; all ranks have to call it.

    Raises:
        ValueError: there is no such checkpoint.
    """
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} is no checkpoint of a sharded model: it was saved unsharded, or without its "
            "optimizer (save_only_model), or the save was interrupted. To begin with its weights "
            "alone, load them into the plain model"
        )
    optimizers = list(optimizers)
    state = _state(model, optimizers, weights)
    dcp.load(state, checkpoint_id=folder)
    if weights:
        set_model_state_dict(model, state["model"])
    if optimizers:
        set_optimizer_state_dict(model, optimizers, state["optim"])


def _state(model: nn.Module, optimizers: Sequence[Optimizer], weights: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)} if weights else {}
    if optimizers:  # a teacher has none
        state["optim"] = get_optimizer_state_dict(model, optimizers)
    return state
