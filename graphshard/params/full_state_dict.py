"""Full state dicts: of plain tensors, on the first rank of the mesh alone.

    shards ──gather──► full tensor ──► host of the first rank

One tensor at a time is gathered, so that the first rank never holds more than one parameter beside
its shards and the result. ``graphshard.params.load_full_state_dict`` goes the other way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.nn import COMPILED_PREFIX, set_versions, uncompiled, versions_of
from .agree import raise_if_different
from .eager_calls import agree_on_gathering
from .full_tensor import gather, plain
from .mesh_groups import MeshGroups
from .sharded_param import sharded_param_of

StateDict = OrderedDict[str, Any]
"""A module's state dict; torch has it carry more than its values."""
_Key = TypeVar("_Key", bound=Hashable)


@overload
def full_state_dict(model: nn.Module, *, names: Collection[str] | None = None) -> StateDict: ...


@overload
def full_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, *, names: Collection[str] | None = None
) -> tuple[StateDict, dict[str, Any]]: ...


def full_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    names: Collection[str] | None = None,
) -> StateDict | tuple[StateDict, dict[str, Any]]:
    """Return the unsharded state dict of ``model``, on the host of the mesh's first rank.

    All ranks of the mesh have to call it. Names are those of the module without ``torch.compile``;
    a plain model loads it by ``load_state_dict``, and so does a sharded one where all ranks have
    it; :func:`load_full_state_dict` needs it on the first rank alone.

    Args:
        optim: its state is wanted, too: with names of parameters, not numbers, as
            ``torch.distributed.checkpoint.state_dict`` has it, whose ``set_optimizer_state_dict``
            loads it into the optimizer of a plain model. States that torchao keeps in 8 bits are
            float32 here; an optimizer that has stepped loads them, rounded again to 8 bits.
        names: in the model's state dict, of what is wanted and gathered, the same on all ranks:
            adapters alone, say. None: of everything.

    Returns:
        The state dict; with ``optim``, that of the model and that of the optimizer. They are empty
        on all other ranks. Tied weights are one tensor.

    Raises:
        ValueError: ``model`` is no module, ``optim`` no optimizer of it, a parameter is on the
            meta device, or ``names`` has one that the state dict has not.
        BackendError: on all ranks, if ``names`` differs between them, or some do not call it.
    """
    root = checked_module(model, optim)
    groups = mesh_groups_of(root)
    if groups is not None:
        call = "graphshard.full_state_dict(model" + (")" if optim is None else ", optim)")
        remedy = f"state = {call} outside of any `if rank == 0:`"
        agree_on_gathering(groups, "full_state_dict", type(root).__name__, remedy)
    is_first = is_first_rank(groups)
    state = root.state_dict(keep_vars=True)
    if names is not None:
        state = _of_names(state, names, groups)
    full: StateDict = OrderedDict((plain_name(n), v) for n, v in _gathered(state, is_first).items())
    if is_first:
        set_versions(full, plain_versions(state))
    return full if optim is None else (full, _gathered_optimizer(root, optim, is_first))


def _of_names(
    state: Mapping[str, Any], names: Collection[str], groups: MeshGroups | None
) -> StateDict:
    """Return the entries of a state dict that are wanted, in its order, with its versions."""
    wanted = {names} if isinstance(names, str) else set(names)
    unknown = sorted(wanted - {plain_name(name) for name in state})
    fault = f"names has {unknown[0]!r}, which the state dict has not" if unknown else None
    if groups is not None:
        advice = "All ranks have to ask for the same names: is one chosen by rank?"
        raise_if_different(dict.fromkeys(wanted, "wanted"), groups, fault=fault, advice=advice)
    elif fault is not None:
        raise ValueError(fault)
    chosen: StateDict = OrderedDict((n, v) for n, v in state.items() if plain_name(n) in wanted)
    set_versions(chosen, versions_of(state))
    return chosen


def checked_module(
    model: nn.Module, optim: torch.optim.Optimizer | None, *, allow_meta: bool = False
) -> nn.Module:
    """Return the module itself, where ``torch.compile`` wrapped it."""
    root = uncompiled(model)
    if not isinstance(root, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module that is trained")
    if optim is not None and not isinstance(optim, torch.optim.Optimizer):
        raise ValueError(f"optim is a {type(optim).__name__}: give a torch.optim.Optimizer")
    for name, param in root.named_parameters():
        if param.is_meta and not allow_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: call model.to_empty(device=...) before"
            )
    return root


def mesh_groups_of(root: nn.Module) -> MeshGroups | None:
    """Return the groups of the mesh over which ``root`` is sharded; None: it is not."""
    sharded_params = (sharded_param_of(param) for param in root.parameters())
    return next((p.layout.groups for p in sharded_params if p is not None), None)


def is_first_rank(groups: MeshGroups | None) -> bool:
    """Return whether this is the first rank of the mesh; of all ranks, where there is no mesh."""
    if groups is not None:
        return int(groups.mesh.mesh.flatten()[0]) == dist.get_rank()
    return not dist.is_initialized() or dist.get_rank() == 0


def plain_name(name: str) -> str:
    """Return the name of a parameter, or of a module, without ``torch.compile``."""
    return name.replace(COMPILED_PREFIX, "")


def plain_versions(state_dict: Mapping[str, object]) -> dict[str, Any]:
    """Return the versions of modules in a state dict, by their names without ``torch.compile``."""
    return {plain_name(f"{n}.").removesuffix("."): v for n, v in versions_of(state_dict).items()}


def names_of(root: nn.Module, optim: torch.optim.Optimizer) -> list[list[str]]:
    """Return the first names of the parameters of ``optim``, by group.

    Raises:
        ValueError: it has a parameter that is none of ``root``.
    """
    names = {param: plain_name(name) for name, param in root.named_parameters()}
    groups = [group["params"] for group in optim.param_groups]
    if any(param not in names for group in groups for param in group):
        raise ValueError(
            "optim has a parameter that is none of the model's: give the optimizer of this model"
        )
    return [[names[param] for param in group] for group in groups]


# --- to the first rank ---------------------------------------------------------------------------


def _gathered(values: Mapping[_Key, object], is_first: bool) -> dict[_Key, Any]:
    """Return ``values`` with full tensors on the host; empty on all but the first rank."""
    full: dict[int, object] = {}
    # By name: ranks may have registered them in another order.
    for key in sorted(values, key=str):
        value = values[key]
        if id(value) not in full:  # tied parameters are one object
            full[id(value)] = _on_first_host(value, is_first)
    return {key: full[id(value)] for key, value in values.items()} if is_first else {}


def _on_first_host(value: object, is_first: bool) -> object:
    """Return ``value`` with its tensor in full on the host of the first rank, else None."""
    if isinstance(value, DTensor):
        full = gather(value)
        return full.to("cpu") if is_first and full is not None else None
    if not is_first:
        return None
    return plain(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _gathered_optimizer(
    root: nn.Module, optim: torch.optim.Optimizer, is_first: bool
) -> dict[str, Any]:
    """Return the state dict of ``optim`` with full tensors and the names of parameters."""
    names, state = names_of(root, optim), optim.state_dict()
    by_number = [name for group in names for name in group]
    values = {
        (by_number[number], key): value
        for number, of_param in state["state"].items()
        for key, value in of_param.items()
    }
    by_name: dict[str, Any] = {by_number[number]: {} for number in state["state"]}
    for (name, key), value in _gathered(values, is_first).items():
        by_name[name][key] = value
    groups = [{**group, "params": of} for group, of in zip(state["param_groups"], names)]
    return {"state": by_name, "param_groups": groups} if is_first else {}
