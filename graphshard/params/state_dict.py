"""Full state dicts: plain tensors, on the first rank of the mesh only.

    full_state_dict         shards ──gather──► full tensor ──► host of the first rank
    load_full_state_dict    host of the first rank ──► full tensor ──scatter──► shards ──► copy_

Sharded tensors are sent one at a time: the first rank holds at most one full tensor in addition to
its shards and the state dict, and other ranks hold none. Exception: while a parameter that tensor
parallelism has split is sent, every rank holds the full tensor. To load, the first rank
broadcasts names, shapes and dtypes, and then the tensors of unsharded entries; torch's
``load_state_dict`` walks the modules on every rank, and a sharded parameter's tensor is sent when
the walk reaches it. Strictness, messages and load hooks work as usual.

[Note: why not StateDictOptions] ``torch.distributed.checkpoint.state_dict`` also gathers and
broadcasts full tensors. But it sends all of them to all ranks; copies tied weights; drops module
versions; steps an optimizer that has no state yet; cannot load state that only some parameters
have; leaves 8-bit optimizer states in torchao's classes; raises some errors on one rank only; turns
entries of the loaded state dict into shards; and returns nothing if the mesh lacks global rank 0.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .._torch.distributed import process_group
from .._torch.dtensor import local_tensor
from .._torch.nn import outside_inference_mode, set_versions, versions_of
from .._torch.tensors import is_traceable_wrapper_subclass
from ..errors import BackendError
from ..ranks.agree import raise_if_different, raise_on_all_ranks
from .full_tensor import gather, plain, receive, spec_of
from .loading import Incoming
from .mesh import MeshGroups, agree_on_gathering
from .param_spec import ParamSpec
from .sharded_param import sharded_param_of
from .trained_module import checked_module, is_first_rank, mesh_groups_of, plain_name

# A module's state dict; torch attaches module versions to it as ``_metadata``.
StateDict = OrderedDict[str, Any]


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

    All ranks of the mesh must call this. Names have no ``torch.compile`` prefix. A plain model
    loads the result with ``load_state_dict``, and so does a sharded one if all ranks have it;
    :func:`load_full_state_dict` needs it on the first rank only.

    Args:
        optim: optimizer of ``model`` whose state to gather as well. As in
            ``torch.distributed.checkpoint.state_dict``, its state dict is keyed by parameter names
            instead of numbers; ``set_optimizer_state_dict`` of that module loads it into a plain
            model's optimizer. 8-bit states of torchao are converted to float32; an optimizer that
            has stepped quantizes them again when it loads them.
        names: names in the model's state dict to gather, such as those of adapters, the same on all
            ranks; by default all. The optimizer's state is always complete, because an optimizer
            cannot load a part of it: use a separate optimizer for adapters.

    Returns:
        The model's state dict, or with ``optim`` a pair of the model's and the optimizer's; empty
        on all but the first rank. Tied weights share one tensor.

    Raises:
        ValueError: ``model`` is not a module, ``optim`` is not its optimizer, a parameter is on the
            meta device or differs between ranks (experts that are not DTensors), or the state dict
            lacks one of ``names``.
        BackendError: on all ranks, if ``names`` differs between ranks or not all of them call this.
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
        state = _select(state, names, groups)
    full: StateDict = OrderedDict((plain_name(n), v) for n, v in _gathered(state, is_first).items())
    if is_first:
        set_versions(full, _plain_versions(state))
    return full if optim is None else (full, _gathered_optimizer(root, optim, is_first))


@outside_inference_mode()
def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    optim: torch.optim.Optimizer | None = None,
    optim_state_dict: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Load full state dicts of the first rank into a sharded model and its optimizer, in place.

    All ranks of the mesh must call this. The state dicts that other ranks pass are ignored.

    Args:
        state_dict: full tensors keyed by name, from :func:`full_state_dict` or a plain model.
        optim: optimizer of ``model`` to load as well.
        optim_state_dict: optimizer state dict from :func:`full_state_dict`.
        strict: as in ``load_state_dict``.

    Returns:
        Missing and unexpected keys of the model, as ``load_state_dict`` does.

    Raises:
        RuntimeError: names (if ``strict``) or shapes differ; raised by ``load_state_dict``.
        ValueError: ``model`` is not sharded yet or is on the meta device, ``optim`` is not its
            optimizer, or a parameter differs between ranks (experts that are not DTensors); or, on
            all ranks, the first rank's state dicts cannot be loaded.
        BackendError: on all ranks, if they have registered parameters in different orders.
    """
    root = checked_module(model, optim)
    groups = mesh_groups_of(root)
    if groups is None:
        raise ValueError(
            f"{type(root).__name__} is not sharded: call graphshard.shard(model, mesh) first, or "
            "use its load_state_dict"
        )
    names = [] if optim is None else parameter_names(root, optim)
    _check_same_order(root, groups)
    incoming = _announce(state_dict, None if optim is None else optim_state_dict, names, groups)
    result = root.load_state_dict(_incoming_model(root, incoming), strict)
    if optim is not None:
        received = _received_optimizer(root, optim, incoming)
        optim.load_state_dict(optimizer_by_number(root, optim, received))
    return result


def _check_same_order(root: nn.Module, groups: MeshGroups) -> None:
    """Raise on all ranks if they have registered their sharded parameters in different orders."""
    # Each rank receives a tensor when its own ``load_state_dict`` reaches the parameter.
    named = root.named_parameters(remove_duplicate=False)
    order = [plain_name(name) for name, param in named if sharded_param_of(param)]
    raise_if_different(
        {f"sharded parameter {i}": name for i, name in enumerate(order)},
        groups.all_ranks,
        lambda *_: "Register modules in the same order on all ranks: does code iterate over a set?",
    )


# --- names and versions --------------------------------------------------------------------------


def _plain_module_name(name: str) -> str:
    return plain_name(f"{name}.").removesuffix(".")


def _plain_versions(state_dict: Mapping[str, object]) -> dict[str, Any]:
    return {_plain_module_name(name): v for name, v in versions_of(state_dict).items()}


def parameter_names(root: nn.Module, optim: torch.optim.Optimizer) -> list[list[str]]:
    """Return the parameter names of each param group; tied ones have their first name."""
    names = {param: plain_name(name) for name, param in root.named_parameters()}
    groups = [group["params"] for group in optim.param_groups]
    unknown = [tuple(param.shape) for group in groups for param in group if param not in names]
    if unknown:
        raise ValueError(
            f"optim has parameters that model does not have, with shapes {unknown}: pass this "
            "model's optimizer, created after any load_state_dict(assign=True)"
        )
    return [[names[param] for param in group] for group in groups]


def parameters_by_name(root: nn.Module, optim: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of ``optim`` by name, in the order of their numbers in state dicts."""
    params = itertools.chain(*(group["params"] for group in optim.param_groups))
    return dict(zip(itertools.chain(*parameter_names(root, optim)), params, strict=True))


def optimizer_by_name(root: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of ``optim``, keyed by parameter names instead of numbers."""
    names, state = parameter_names(root, optim), optim.state_dict()
    flat_names = list(itertools.chain(*names))
    groups = [{**group, "params": params} for group, params in zip(state["param_groups"], names)]
    by_name = {flat_names[number]: values for number, values in state["state"].items()}
    return {"state": by_name, "param_groups": groups}


def optimizer_by_number(
    root: nn.Module, optim: torch.optim.Optimizer, by_name: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a state dict for ``optim`` to load, from one that is keyed by parameter names.

    A param group takes its options from the first group in ``by_name`` that has one of its
    parameters, in their order, and keeps options that this group lacks. Entries of parameters that
    ``optim`` lacks are left out.
    """
    names = parameter_names(root, optim)
    options = {name: g for g in by_name["param_groups"] for name in g["params"]}
    numbers = {name: number for number, name in enumerate(itertools.chain(*names))}
    groups = [
        {
            **own,
            **next((options[name] for name in group if name in options), {}),
            "params": [numbers[name] for name in group],
        }
        for own, group in zip(optim.param_groups, names)
    ]
    state = {numbers[n]: values for n, values in by_name["state"].items() if n in numbers}
    return {"state": state, "param_groups": groups}


def _select(
    state: Mapping[str, Any], names: Collection[str], groups: MeshGroups | None
) -> StateDict:
    """Return the entries ``names`` of a state dict, keeping its order and module versions.

    Raise if an entry is missing, or if ``names`` differs between ranks.
    """
    names = {names} if isinstance(names, str) else set(names)
    unknown = sorted(names - {plain_name(name) for name in state})
    error = (
        f"names has {unknown[0]!r}, which is not in the state dict: pass keys of model.state_dict()"
        if unknown
        else None
    )
    if groups is not None:
        advice = "Pass the same names on all ranks: do they depend on the rank?"
        wanted = dict.fromkeys(names, "wanted")
        raise_if_different(wanted, groups.all_ranks, lambda *_: advice, error=error)
    elif error is not None:
        raise ValueError(error)
    selected: StateDict = OrderedDict((n, v) for n, v in state.items() if plain_name(n) in names)
    set_versions(selected, versions_of(state))
    return selected


# --- gather to the first rank --------------------------------------------------------------------


def _gathered(values: Mapping[str, object], is_first: bool) -> dict[str, Any]:
    """Gather ``values``; return full tensors on the first rank's host, and {} on other ranks."""
    full: dict[int, object] = {}
    # Sorted by name: ranks may have registered parameters in different orders.
    for key in sorted(values):
        value = values[key]
        if id(value) not in full:  # tied parameters are one object
            full[id(value)] = _on_first_host(value, is_first)
    return {key: full[id(value)] for key, value in values.items()} if is_first else {}


def _on_first_host(value: object, is_first: bool) -> object:
    if isinstance(value, DTensor):
        full = gather(value)  # a collective
        return full if is_first else None
    if not is_first:
        return None
    return plain(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _gathered_optimizer(
    root: nn.Module, optim: torch.optim.Optimizer, is_first: bool
) -> dict[str, Any]:
    own = optimizer_by_name(root, optim)
    full = {name: _gathered(own["state"][name], is_first) for name in sorted(own["state"])}
    return {**own, "state": {name: full[name] for name in own["state"]}} if is_first else {}


# --- load from the first rank --------------------------------------------------------------------


class _States(NamedTuple):
    model: Mapping[str, Any]
    versions: Mapping[str, Any]  # module versions, keyed by name
    optim: Mapping[str, Any]  # state dict by parameter names; empty without an optimizer

    def map_tensors(self, convert: Callable[[Hashable, torch.Tensor], torch.Tensor]) -> _States:
        def converted(values: Mapping[str, Any], *prefix: str) -> dict[str, Any]:
            return {
                key: convert((*prefix, key), value) if isinstance(value, torch.Tensor) else value
                for key, value in values.items()
            }

        # Missing in a checkpoint of an optimizer without state: DCP keeps no empty containers.
        states = self.optim.get("state", {}).items()
        optim = {"state": {name: converted(values, "optim", name) for name, values in states}}
        return _States(converted(self.model), self.versions, {**self.optim, **optim})


def _announce(state: Any, optim_state: Any, names: list[list[str]], groups: MeshGroups) -> _States:
    """Broadcast and return the first rank's state dicts, with an ``Incoming`` for every tensor.

    Raises:
        BackendError: on all ranks, if the state dicts cannot be loaded. If they cannot be sent, the
            first rank raises the cause.
    """
    tensors: dict[Hashable, torch.Tensor] = {}  # stays empty on all but the first rank

    def take(key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        tensors[key] = tensor
        return tensor.detach().to("meta")

    def incoming(key: Hashable, meta: torch.Tensor) -> torch.Tensor:
        return Incoming.create(meta, functools.partial(receive, tensors.get(key), meta, groups))

    message: list[Any] = [None]
    with raise_on_all_ranks(groups.all_ranks):
        if is_first_rank(groups):
            error = _model_error(state) or (_optimizer_error(optim_state, names) if names else None)
            if error is not None:
                raise BackendError(error)
            states = _States(state, _plain_versions(state), optim_state if names else {})
            message = [states.map_tensors(take)]
            pickle.dumps(message)  # raises if the state dict has an object that cannot be sent
    dist.broadcast_object_list(message, group=process_group(groups.all_ranks), group_src=0)
    outline: _States = message[0]
    return outline.map_tensors(incoming)


def _model_error(state: object) -> str | None:
    if not isinstance(state, Mapping):
        return f"state_dict is a {type(state).__name__}: pass a dict of full tensors"
    for name, value in state.items():
        if isinstance(value, DTensor):
            return (
                f"state_dict entry {name!r} is a DTensor: pass full tensors, or call "
                "model.load_state_dict"
            )
    return None


def _optimizer_error(state: object, names: list[list[str]]) -> str | None:
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return "optim_state_dict is not an optimizer's state dict: pass one from full_state_dict"
    own = {name for group in names for name in group}
    saved = {name: number for number, g in enumerate(state["param_groups"]) for name in g["params"]}
    if any(isinstance(name, int) for name in saved):
        return (
            "optim_state_dict has numbers instead of parameter names: get it from full_state_dict "
            "or from torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    if different := sorted(own ^ (saved.keys() | state.get("state", {}).keys())):
        where = "optim" if different[0] in own else "optim_state_dict"
        return (
            f"parameter {different[0]!r} is only in {where}: optim and optim_state_dict must have "
            "the same parameters"
        )
    for group in names:
        if len({saved.get(name) for name in group}) > 1:
            return (
                f"the param group of {group[0]!r} is split in optim_state_dict: create optim with "
                "the param groups of the saved optimizer"
            )
    return None


def _incoming_model(root: nn.Module, incoming: _States) -> StateDict:
    """Return the state dict for ``root`` to load, keyed like ``root.state_dict()``."""
    own = root.state_dict(keep_vars=True)
    own_names = {plain_name(name): name for name in own}
    state: StateDict = OrderedDict()
    for sent_name, value in incoming.model.items():
        name = own_names.get(plain_name(sent_name), sent_name)
        # Sharded parameters receive their values when they are loaded.
        is_whole = name in own and sharded_param_of(own[name]) is None
        if is_whole and isinstance(value, Incoming):
            value, like = value.receive(None), own[name]
            if isinstance(like, DTensor) and like.shape == value.shape:
                mesh, placements = like.device_mesh, like.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        state[name] = value
    names = {_plain_module_name(name): name for name in versions_of(own)}
    set_versions(state, {names.get(name, name): v for name, v in incoming.versions.items()})
    return state


def _received_optimizer(
    root: nn.Module, optim: torch.optim.Optimizer, incoming: _States
) -> dict[str, Any]:
    """Receive the state of ``optim``; return its state dict, keyed by parameter names."""
    params, state = parameters_by_name(root, optim), {}
    for name, values in incoming.optim["state"].items():
        present = optim.state.get(params[name], {})
        state[name] = {
            key: _received(value, params[name], present.get(key))
            if isinstance(value, Incoming)
            else value
            for key, value in values.items()
        }
    return {**incoming.optim, "state": state}


def _received(incoming: Incoming, param: nn.Parameter, present: object) -> torch.Tensor:
    """Receive a tensor of optimizer state of ``param``, split like the state that it replaces."""
    # An optimizer without state has nothing to replace: split like the parameter.
    likes = [x for x in (present, param) if isinstance(x, DTensor) and x.shape == incoming.shape]
    received = incoming.receive(_spec_like(likes[0], param) if likes else None)
    if isinstance(present, DTensor) and isinstance(received, DTensor):
        local = local_tensor(present)
        if is_traceable_wrapper_subclass(local):
            local.copy_(local_tensor(received))  # quantizes
            return present
    return received


def _spec_like(like: DTensor, param: nn.Parameter) -> ParamSpec | None:
    sharded_param = sharded_param_of(param)
    if sharded_param is not None and sharded_param.spec.placements == like.placements:
        return sharded_param.spec
    return spec_of(like)
