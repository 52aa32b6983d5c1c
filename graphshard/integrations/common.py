"""Shard models in place, and save and load sharded checkpoints, for all integrations.

Modules are compiled in place: frameworks keep the module that they were given, look up its
attributes and save it under its parameter names, whereas ``torch.compile`` returns a different
object, whose names start with ``_orig_mod.``.

A checkpoint is a folder of ``torch.distributed.checkpoint`` with the keys ``model`` and, if there
are optimizers, ``optim``. Any number of ranks can load it. ``python -m graphshard consolidate
FOLDER model.safetensors --key model`` converts it to a plain file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..dynamo_backend import Backend, shard
from ..params.grad_sync import no_sync
from ..params.sharded_param import sharded_model_of, sharded_param_of


def is_sharded(model: object) -> bool:
    """Return whether graphshard has sharded ``model``, or a module that contains it."""
    return isinstance(model, nn.Module) and sharded_model_of(model) is not None


def is_split(model: nn.Module) -> bool:
    """Return whether tensor parallelism has split a parameter of a plain or sharded model."""
    for param in model.parameters():
        sharded = sharded_param_of(param)
        tp_mesh = sharded.spec.groups.tp_mesh if sharded is not None else None
        if tp_mesh is not None or (sharded is None and isinstance(param, DTensor)):
            return True
    return False


def may_be_moved(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether a framework may move ``model`` to its device before it is sharded."""
    # False if shards are offloaded to the host, or a parameter is on the meta device.
    stays = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    return not stays and not any(param.is_meta for param in model.parameters())


def shard_and_compile(
    model: nn.Module, dynamo_backend: Backend, options: Mapping[str, Any]
) -> None:
    """Shard ``model`` and compile it in place.

    This adds a ``no_sync`` method like DDP's, which frameworks call to accumulate gradients.

    Args:
        dynamo_backend: ``graphshard.backend(**options)``. Callers create it before they change
            anything, since it raises for invalid options.
    """
    shard(model, **options)
    model.compile(backend=dynamo_backend)
    model.no_sync = MethodType(no_sync, model)  # type: ignore[assignment]


def save_sharded(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights: bool = True
) -> None:
    """Save the state of ``model`` and its optimizers; all ranks must call this.

    Args:
        weights: whether to save the model in addition to the optimizers.
    """
    dcp.save(_state(model, optimizers, weights), checkpoint_id=folder)


def load_sharded(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights: bool = True
) -> None:
    """Load a checkpoint that :func:`save_sharded` wrote, in place; all ranks must call this.

    Raises:
        ValueError: ``folder`` has no checkpoint written by :func:`save_sharded`.
    """
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} is not a checkpoint of a sharded model: the model was saved unsharded, or "
            "without its optimizer (save_only_model), or the save was interrupted. To start from "
            "its weights only, load them into the model before it is sharded"
        )
    state = _state(model, optimizers, weights)
    dcp.load(state, checkpoint_id=folder)
    if weights:
        set_model_state_dict(model, state["model"])
    if optimizers:
        set_optimizer_state_dict(model, optimizers, state["optim"])


def _state(model: nn.Module, optimizers: Sequence[Optimizer], weights: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)} if weights else {}
    if optimizers:  # a frozen model, such as a teacher, has no optimizer
        state["optim"] = get_optimizer_state_dict(model, optimizers)
    return state
