"""Save and load a sharded model and its optimizers in one folder; each rank writes its shards.

The folder is a ``torch.distributed.checkpoint`` with the keys ``model`` and, if there are
optimizers, ``optim``. Any number of ranks can load it. ``python -m graphshard consolidate FOLDER
model.safetensors --key model`` converts it to a plain file.
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
    """Save the state of ``model`` and its optimizers; all ranks must call this.

    Args:
        weights: whether to save the model, too; False: the optimizers only.
    """
    dcp.save(_state(model, list(optimizers), weights), checkpoint_id=folder)


def load_sharded(
    folder: Path, model: nn.Module, optimizers: Iterable[Optimizer], *, weights: bool = True
) -> None:
    """Load in place what :func:`save_sharded` saved; all ranks must call this.

    Raises:
        ValueError: ``folder`` is not a checkpoint of :func:`save_sharded`.
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
    if optimizers:  # a frozen teacher has none
        state["optim"] = get_optimizer_state_dict(model, optimizers)
    return state
