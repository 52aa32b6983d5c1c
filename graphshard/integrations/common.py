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

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch.dtensor import values_on_rank
from .._torch.nn import unflatten_state_dict, unnoticed_steps
from ..dynamo_backend import Backend, shard
from ..params.grad_sync import no_sync
from ..params.sharded_param import sharded_model_of, sharded_param_of
from ..params.state_dict import optimizer_by_name, optimizer_by_number, parameters_by_name
from ..params.trained_module import checked_module, is_first_rank

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
            f"{type(model).__name__} has no module that an integration has sharded: shard it first "
            "or, without an integration, call metrics() of its graphshard.Backend"
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

    Raises:
        ValueError: a parameter is on the meta device, or differs between ranks (experts that are
            not DTensors).
    """
    state = _state(model, optimizers, weights)
    # If an earlier checkpoint is overwritten and that is interrupted, it must not look complete. No
    # rank writes before the first one has planned.
    if is_first_rank(None):
        with contextlib.suppress(OSError):  # ``dcp.save`` then raises on all ranks
            (folder / ".metadata").unlink()
    dcp.save(state, checkpoint_id=folder)


def load_sharded(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights: bool = True
) -> None:
    """Load, in place, a checkpoint that :func:`save_sharded` wrote; all ranks must call this.

    Args:
        weights: whether to also load the model's parameters and buffers.

    Raises:
        ValueError: as :func:`save_sharded`, or ``folder`` has no complete checkpoint.
    """
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} is not a checkpoint of a sharded model: the model was saved unsharded, or "
            "without its optimizer (save_only_model), or the save was interrupted. To start from "
            "saved weights only, load them into the model before it is sharded"
        )
    state = _state(model, optimizers, weights)
    if optimizers:
        state["optim"] |= _saved_optim(folder, model, optimizers)
    dcp.load(state, checkpoint_id=folder)
    if weights:
        set_model_state_dict(model, state["model"])
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer_by_number(model, optimizer, state["optim"]))


def _state(model: nn.Module, optimizers: Sequence[Optimizer], weights: bool) -> dict[str, Any]:
    checked_module(model)
    # Not ``get_optimizer_state_dict``: it steps optimizers without state, leaves out parameters
    # that are frozen now, and mixes up empty param groups.
    state: dict[str, Any] = {"model": get_model_state_dict(model)} if weights else {}
    if optimizers:  # a frozen model, such as a teacher, has no optimizer
        by_name = [optimizer_by_name(model, optimizer) for optimizer in optimizers]
        state["optim"] = {
            "state": {name: values for one in by_name for name, values in one["state"].items()},
            "param_groups": [group for one in by_name for group in one["param_groups"]],
        }
    return state


def _saved_optim(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return tensors and None to load what ``folder`` has under the key ``optim`` into."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    paths = {k: path[1:] for k, path in metadata.planner_data.items() if path[0] == "optim"}
    saved = {path[1] for path in paths.values() if path[0] == "state"}
    params: dict[str, nn.Parameter] = {}
    made: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for optimizer in optimizers:
        its_params = parameters_by_name(model, optimizer)
        own = {name: param for name, param in its_params.items() if name in saved}
        made |= _made_by_step(model, optimizer, list(own.values()))
        params |= own
        for group in optimizer.param_groups:
            options |= group
    likes: dict[str, object] = {}
    for key, (kind, owner, *rest) in paths.items():
        if kind == "param_groups":
            likes[key] = options.get(rest[0])  # has the device of a learning rate
        elif owner in params and owner not in made:
            # State like a scalar parameter may be its step, on the host: the optimizer moves it.
            likes[key] = params[owner] if params[owner].ndim else None
    flat = {
        key: _uninitialized(metadata.state_dict_metadata[key], like) for key, like in likes.items()
    }
    empty: dict[str, Any] = unflatten_state_dict(flat, paths)
    state = {**empty.get("state", {}), **{name: made[name] for name in params if name in made}}
    return {**empty, "state": state}  # without "param_groups" if no optimizer was saved


def _made_by_step(
    model: nn.Module, optimizer: Optimizer, params: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """Return the state that an optimizer makes in a step with zero gradients, or {} if it raises.

    Keyed by parameter name. The optimizer and its parameters stay as they are: the step is undone.
    """
    state, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    everything = [param for group in groups for param in group["params"]]
    gradients = [param.grad for param in everything]
    # A step changes parameters even without gradients, by weight decay or averaging for example.
    values = [values_on_rank(param.detach()).clone() for param in everything]
    try:
        optimizer.state.clear()
        for param in everything:
            param.grad = None
        for param in params:
            param.grad = torch.zeros_like(param)
        with unnoticed_steps(optimizer):
            optimizer.step()
            made: dict[str, Any] = optimizer_by_name(model, optimizer)["state"]
    except Exception:  # such as a schedule-free optimizer outside of training
        made = {}
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups):
            group.clear()
            group.update(before)
        for param, gradient, value in zip(everything, gradients, values):
            param.grad = gradient
            values_on_rank(param.detach()).copy_(value)
    return made


def _uninitialized(metadata: object, like: object) -> torch.Tensor | None:
    if not isinstance(metadata, TensorStorageMetadata):
        return None  # replaced by the saved object
    dtype = metadata.properties.dtype
    if isinstance(like, torch.Tensor) and metadata.size == like.shape:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(metadata.size, dtype=dtype, device="cpu")
