"""Load a full state dict that only the first rank of the mesh has.

    host of the first rank ──► full tensor ──scatter──► shards ──► copy_

The first rank sends names, shapes and dtypes to all others. Then torch's ``load_state_dict`` walks
the modules on every rank, and each tensor is sent when the walk reaches its parameter. So
strictness, error messages and load hooks work as usual.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.distributed import process_group
from .._torch.dtensor import local_tensor
from .._torch.nn import set_versions, versions_of
from .._torch.tensors import is_traceable_wrapper_subclass
from ..errors import BackendError
from .full_state_dict import (
    StateDict,
    checked_module,
    is_first_rank,
    mesh_groups_of,
    names_of,
    plain_name,
    plain_versions,
)
from .full_tensor import broadcast, scatter, spec_of
from .loading import Incoming
from .mesh import MeshGroups
from .param_spec import ParamSpec
from .sharded_param import sharded_param_of


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    optim: torch.optim.Optimizer | None = None,
    optim_state_dict: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Load full state dicts of the first rank into a sharded model and its optimizer, in place.

    All ranks of the mesh have to call it. The state dicts that other ranks pass are ignored.

    Args:
        state_dict: full tensors by name, from :func:`full_state_dict` or a plain model.
        optim: optimizer of ``model`` to load, too.
        optim_state_dict: state dict of an optimizer, as :func:`full_state_dict` returns it.
        strict: as in ``load_state_dict``.

    Returns:
        Missing and unexpected keys, as ``load_state_dict`` does.

    Raises:
        RuntimeError: names or shapes differ; raised by ``load_state_dict``.
        ValueError: on all ranks, if ``model`` is not sharded yet or is on the meta device, or the
            first rank's state dicts cannot be loaded.
    """
    root = checked_module(model, optim)
    groups = mesh_groups_of(root)
    if groups is None:
        raise ValueError(
            f"{type(root).__name__} is not sharded yet: call load_state_dict of it, or "
            "graphshard.shard(model, mesh) before"
        )
    names = [] if optim is None else names_of(root, optim)
    sent = _Sent({}, {}, {})
    if is_first_rank(groups):
        versions = plain_versions(state_dict or {})
        sent = _Sent(state_dict, versions, {} if optim is None else optim_state_dict)
    outline = _outline(sent, names, groups)
    result = root.load_state_dict(_incoming(root, sent, outline, groups), strict)
    if optim is not None:
        optim.load_state_dict(_received_optimizer(optim, names, sent, outline, groups))
    return result


class _Sent(NamedTuple):
    """The state dicts that are sent from the first rank, or their outline, with meta tensors.

    Attributes:
        versions: module versions, by module name.
    """

    model: Any
    versions: Mapping[str, Any]
    optim: Any


def _outline(sent: _Sent, names: list[list[str]], groups: MeshGroups) -> _Sent:
    """Broadcast the outline of the first rank's state dicts, and return it on all ranks.

    Args:
        names: names of the optimizer's parameters, by param group; empty without an optimizer.

    Raises:
        BackendError: on all ranks, if the first rank's state dicts cannot be loaded.
    """
    message: list[Any] = [None]
    if is_first_rank(groups):
        fault = _fault_of_model(sent.model) or (
            _fault_of_optim(sent.optim, names) if names else None
        )
        message = [fault or _Sent(*map(_on_meta, sent))]
    dist.broadcast_object_list(message, group=process_group(groups.all_ranks), group_src=0)
    if isinstance(message[0], str):
        raise BackendError(f"the first rank: {message[0]}")
    outline: _Sent = message[0]
    return outline


def _fault_of_model(state: object) -> str | None:
    """Return why the first rank's state dict of the model cannot be loaded, or None."""
    if not isinstance(state, Mapping):
        return f"state_dict is a {type(state).__name__}: give full tensors by name"
    for name, value in state.items():
        if isinstance(value, DTensor):
            return f"{name!r} is a DTensor: give full tensors, or call model.load_state_dict"
    return None


def _fault_of_optim(state: object, names: list[list[str]]) -> str | None:
    """Return why the first rank's state dict of the optimizer cannot be loaded, or None.

    Args:
        names: names of the optimizer's parameters, by param group.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return "optim_state_dict is no state dict of an optimizer: give that of full_state_dict"
    own = {name for group in names for name in group}
    saved = {name: number for number, g in enumerate(state["param_groups"]) for name in g["params"]}
    if any(isinstance(name, int) for name in saved):
        return (
            "optim_state_dict has numbers for parameters: give names, as full_state_dict does, and "
            "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
        )
    if different := sorted(own ^ (saved.keys() | state["state"].keys())):
        where = "optim" if different[0] in own else "optim_state_dict"
        return f"the parameter {different[0]!r} is in {where} alone"
    for group in names:
        if len({saved.get(name) for name in group}) > 1:
            return f"parameters of optim's group of {group[0]!r} are in several of optim_state_dict"
    return None


def _on_meta(value: Any) -> Any:
    """Return ``value`` with all tensors in nested dicts on the meta device."""
    if isinstance(value, Mapping):
        return {key: _on_meta(entry) for key, entry in value.items()}
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _incoming(root: nn.Module, sent: _Sent, outline: _Sent, groups: MeshGroups) -> StateDict:
    """Return the state dict for ``root`` to load, by the names of ``root.state_dict()``.

    Tensors that are not sharded are received now, all others when their parameter is loaded.
    """
    own = root.state_dict(keep_vars=True)
    own_names = {plain_name(name): name for name in own}
    state: StateDict = OrderedDict()
    for sent_name, value in outline.model.items():
        name = own_names.get(plain_name(sent_name), sent_name)
        full = sent.model.get(sent_name)
        if not isinstance(value, torch.Tensor):
            state[name] = value
        elif name in own and sharded_param_of(own[name]) is None:
            state[name] = _received(full, value, None, groups)
        else:
            state[name] = Incoming.of(value, functools.partial(scatter, full, value.dtype))
    names = {plain_name(f"{name}.").removesuffix("."): name for name in versions_of(own)}
    set_versions(state, {names.get(name, name): v for name, v in outline.versions.items()})
    return state


def _received(
    full: torch.Tensor | None, outline: torch.Tensor, spec: ParamSpec | None, groups: MeshGroups
) -> torch.Tensor:
    """Receive a tensor from the first rank as a DTensor of ``spec``; if None, in full."""
    if spec is not None:
        return scatter(full, outline.dtype, spec)
    buffer = torch.empty(outline.shape, dtype=outline.dtype, device=groups.device)
    return broadcast(full, buffer, groups).to("cpu")


def _received_optimizer(
    optim: torch.optim.Optimizer,
    names: list[list[str]],
    sent: _Sent,
    outline: _Sent,
    groups: MeshGroups,
) -> dict[str, Any]:
    """Return the state dict for ``optim`` to load, with numbers for parameters."""
    param_groups = _regrouped(optim, names, outline.optim["param_groups"])
    numbers = {name: number for number, name in enumerate(n for group in names for n in group)}
    params = [param for group in optim.param_groups for param in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, values in outline.optim["state"].items():
        param, received = params[numbers[name]], {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                full = sent.optim["state"][name][key] if sent.optim else None
                present = optim.state.get(param, {}).get(key)
                spec = _spec_like(value, param, present)
                value = _as_kept(_received(full, value, spec, groups), present)
            received[key] = value
        state[numbers[name]] = received
    return {"state": state, "param_groups": param_groups}


def _as_kept(received: torch.Tensor, present: object) -> torch.Tensor:
    """Return ``received``, quantized if ``present``, the state that it replaces, is quantized."""
    if isinstance(present, DTensor) and isinstance(received, DTensor):
        local = local_tensor(present)
        if is_traceable_wrapper_subclass(local):
            local.copy_(local_tensor(received))
            return present
    return received


def _regrouped(
    optim: torch.optim.Optimizer, names: list[list[str]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved options of each of the optimizer's param groups, with numbered parameters.

    Args:
        names: names of the optimizer's parameters, by param group.
    """
    options_of = {name: group for group in saved for name in group["params"]}
    groups, start = [], 0
    for present, group in zip(optim.param_groups, names):
        options = options_of[group[0]] if group else present
        groups.append({**options, "params": list(range(start, start + len(group)))})
        start += len(group)
    return groups


def _spec_like(outline: torch.Tensor, param: nn.Parameter, present: object) -> ParamSpec | None:
    """Return the spec for a tensor of optimizer state, or None if it is not split.

    Args:
        outline: meta tensor of its full shape.
        present: optimizer state in its place.
    """
    for like in (present, param):
        if isinstance(like, DTensor) and like.shape == outline.shape:
            return spec_of(like)
    return None
