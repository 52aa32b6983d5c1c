"""Shard models in place, log metrics, and save and load checkpoints, for all integrations.

Modules are compiled in place: frameworks keep the module that they were given, look up its
attributes and save it under its parameter names, whereas ``torch.compile`` returns a different
object, whose names start with ``_orig_mod.``.

A checkpoint is a folder that ``torch.distributed.checkpoint`` writes, with the keys ``model`` and
``optim``. ``model`` is missing if only optimizers are saved, ``optim`` if there are none. Any
number of ranks can load it.
``python -m graphshard consolidate FOLDER model.safetensors --key model`` writes the model to a
plain file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
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

# The backend of each module that an integration has compiled.
_backends: WeakKeyDictionary[nn.Module, Backend] = WeakKeyDictionary()


def is_sharded(model: object) -> bool:
    """Return whether graphshard has sharded ``model``, or a module that contains it."""
    return isinstance(model, nn.Module) and sharded_model_of(model) is not None


def is_split(model: nn.Module) -> bool:
    """Return whether tensor or expert parallelism has split ``model``, sharded or not."""
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
    # Creating ``dynamo_backend`` exhausts ``ignored_params`` if it is an iterator.
    shard(model, **{**options, "ignored_params": dynamo_backend.options.ignored_params})
    model.compile(backend=dynamo_backend)
    _backends[model] = dynamo_backend
    model.no_sync = MethodType(no_sync, model)  # type: ignore[assignment]


def metrics(
    model: nn.Module, *, steps: int | None = None, tokens: int | None = None
) -> dict[str, float]:
    """Return the metrics of a model's backends (:meth:`graphshard.Backend.metrics`), for logging.

    Args:
        model: module that an integration has sharded, or one that contains such modules.
        steps: number of optimizer steps since the last call with ``steps``.
        tokens: number of tokens of all ranks in these steps.

    Returns:
        The metrics, with keys such as ``graphshard/step_s``. If ``model`` contains several sharded
        modules, keys include their names, as in ``graphshard/student/step_s``.

    Raises:
        ValueError: no module of ``model`` has been sharded by an integration; otherwise as
            :meth:`graphshard.Backend.metrics`.
    """
    sharded = {name: _backends[m] for name, m in model.named_modules() if m in _backends}
    if not sharded:
        raise ValueError(
            f"{type(model).__name__} has no module that an integration has sharded: call metrics() "
            "of the graphshard.Backend that compiles it instead"
        )
    return {
        "/".join(filter(None, ["graphshard", name if len(sharded) > 1 else "", key])): value
        for name, its_backend in sharded.items()
        for key, value in its_backend.metrics(steps=steps, tokens=tokens).items()
    }


def save_sharded(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights: bool = True
) -> None:
    """Save the state of ``model`` and its optimizers; all ranks must call this.

    Args:
        weights: whether to also save the model's parameters and buffers.
    """
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    state = _state(model, optimizers, weights)
    # torch creates missing state by a step with zero gradients: remove it, as training continues.
    for optimizer in fresh:
        optimizer.state.clear()
    if fresh:
        used = [optimizer for optimizer in optimizers if optimizer not in fresh]
        state["optim"]["state"] = get_optimizer_state_dict(model, used)["state"] if used else {}
    dcp.save(state, checkpoint_id=folder)


def load_sharded(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights: bool = True
) -> None:
    """Load a checkpoint that :func:`save_sharded` wrote, in place; all ranks must call this.

    Args:
        weights: whether to also load the model's parameters and buffers.

    Raises:
        ValueError: ``folder`` has no checkpoint written by :func:`save_sharded`.
    """
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} is not a checkpoint of a sharded model: the model was saved unsharded, or "
            "without its optimizer (save_only_model), or the save was interrupted. To start from "
            "saved weights only, load them into the model before it is sharded"
        )
    with _unused(model, optimizers):
        state = _state(model, optimizers, weights)
        if optimizers:
            _keep_saved(state["optim"]["state"], folder)
        dcp.load(state, checkpoint_id=folder)
        if weights:
            set_model_state_dict(model, state["model"])
        if optimizers:
            # Not strict: a parameter that has not had a gradient has no saved state.
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(model, optimizers, state["optim"], options=options)


@contextmanager
def _unused(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Hide gradients, and clear the optimizers' state, which is restored only after an error."""
    # torch creates state to load into only for an optimizer without state and gradients.
    gradients = {param: param.grad for param in model.parameters()}
    states = [dict(optimizer.state) for optimizer in optimizers]
    for param in gradients:
        param.grad = None
    for optimizer in optimizers:
        optimizer.state.clear()
    try:
        yield
    except BaseException:
        for optimizer, state in zip(optimizers, states):
            optimizer.state.clear()
            optimizer.state.update(state)
        raise
    finally:
        for param, gradient in gradients.items():
            param.grad = gradient


def _keep_saved(state: dict[str, Any], folder: Path) -> None:
    """Remove the entries of parameters whose state ``folder`` lacks."""
    paths = dcp.FileSystemReader(folder).read_metadata().planner_data.values()
    saved = {path[2] for path in paths if path[:2] == ("optim", "state")}
    for name in state.keys() - saved:
        del state[name]


def _state(model: nn.Module, optimizers: Sequence[Optimizer], weights: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)} if weights else {}
    if optimizers:  # a frozen model, such as a teacher, has no optimizer
        state["optim"] = get_optimizer_state_dict(model, optimizers)
    return state
