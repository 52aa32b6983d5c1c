"""Full state dicts: plain tensors, on the first rank of the mesh only.

    shards ──gather──► full tensor ──► host of the first rank

Tensors are gathered one at a time, so the first rank never holds more than one full tensor on top
of its shards and the result. ``graphshard.params.load_full_state_dict`` is the inverse.
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
from .full_tensor import gather, plain
from .mesh import MeshGroups, agree_on_gathering
from .sharded_param import sharded_param_of

StateDict = OrderedDict[str, Any]
"""A module's state dict; torch attaches module versions to it as ``_metadata``."""
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
    """Gather the unsharded state dict of ``model`` on the host of the mesh's first rank.

    All ranks of the mesh have to call it. Names have no ``torch.compile`` prefix. A plain model
    loads the result with ``load_state_dict``, and so does a sharded one if all ranks have it;
    :func:`load_full_state_dict` needs it on the first rank only.

    Args:
        optim: optimizer of ``model`` whose state to gather, too. Like that of
            ``torch.distributed.checkpoint.state_dict``, its state dict has names of parameters
            instead of numbers; ``set_optimizer_state_dict`` of that module loads it into a plain
            model's optimizer. 8-bit states of torchao are converted to float32; an optimizer that
            has stepped quantizes them again when it loads them.
        names: names in the model's state dict to gather, such as those of adapters, the same on all
            ranks; None gathers everything. The optimizer's state is always gathered in full.

    Returns:
        The state dict; with ``optim``, a pair of the model's and the optimizer's. Empty on all
        other ranks. Tied weights are one tensor.

    Raises:
        ValueError: ``model`` is not a module, ``optim`` is not its optimizer, a parameter is on the
            meta device, or the state dict lacks one of ``names``.
        BackendError: on all ranks, if ``names`` differs between them or some do not call it.
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
    """Return the entries of a state dict in ``names``, in its order and with its versions.

    Raises:
        ValueError: it lacks one of them, or ranks ask for different ones.
    """
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
    """Check the arguments; return ``model`` without the wrapper of ``torch.compile``.

    Raises:
        ValueError: ``model`` is not a module or is on the meta device, or ``optim`` is not an
            optimizer.
    """
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
    """Return the groups of the mesh that ``root`` is sharded over; None if it is not sharded."""
    sharded_params = (sharded_param_of(param) for param in root.parameters())
    return next((p.spec.groups for p in sharded_params if p is not None), None)


def is_first_rank(groups: MeshGroups | None) -> bool:
    """Return whether this is the first rank of the mesh, or of all ranks without a mesh."""
    if groups is not None:
        return int(groups.mesh.mesh.flatten()[0]) == dist.get_rank()
    return not dist.is_initialized() or dist.get_rank() == 0


def plain_name(name: str) -> str:
    """Return a parameter or module name without the prefixes of ``torch.compile``."""
    return name.replace(COMPILED_PREFIX, "")


def plain_versions(state_dict: Mapping[str, object]) -> dict[str, Any]:
    """Return the module versions in a state dict, by module name without compile prefixes."""
    return {plain_name(f"{n}.").removesuffix("."): v for n, v in versions_of(state_dict).items()}


def names_of(root: nn.Module, optim: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of ``optim``, by param group; of tied ones the first.

    Raises:
        ValueError: ``optim`` has a parameter that ``root`` does not have.
    """
    names = {param: plain_name(name) for name, param in root.named_parameters()}
    groups = [group["params"] for group in optim.param_groups]
    if any(param not in names for group in groups for param in group):
        raise ValueError(
            "optim has a parameter that is none of the model's: give the optimizer of this model"
        )
    return [[names[param] for param in group] for group in groups]


# --- gather to the first rank --------------------------------------------------------------------


def _gathered(values: Mapping[_Key, object], is_first: bool) -> dict[_Key, Any]:
    """Return ``values`` with full tensors on the first rank's host; empty on the other ranks."""
    full: dict[int, object] = {}
    # In order of names: ranks may have registered parameters in different orders.
    for key in sorted(values, key=str):
        value = values[key]
        if id(value) not in full:  # tied parameters are one object
            full[id(value)] = _on_first_host(value, is_first)
    return {key: full[id(value)] for key, value in values.items()} if is_first else {}


def _on_first_host(value: object, is_first: bool) -> object:
    """Return ``value`` on the first rank, gathered to its host if a tensor; None on other ranks."""
    if isinstance(value, DTensor):
        full = gather(value)
        return full.to("cpu") if is_first and full is not None else None
    if not is_first:
        return None
    return plain(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _gathered_optimizer(
    root: nn.Module, optim: torch.optim.Optimizer, is_first: bool
) -> dict[str, Any]:
    """Return the state dict of ``optim`` with full tensors, keyed by names of parameters."""
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
    groups = [{**group, "params": params} for group, params in zip(state["param_groups"], names)]
    return {"state": by_name, "param_groups": groups} if is_first else {}
