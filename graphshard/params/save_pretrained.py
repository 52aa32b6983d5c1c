"""``save_pretrained`` of a sharded model, and the adapters of a sharded peft model.

    model.save_pretrained(folder)    gathers the full state dict (adapters only, if peft) on the
                                     first rank; there, ``state_dict()`` of every module returns its
                                     part of it while the library's own ``save_pretrained`` runs

This works for any library's method, whether it takes a state dict or not (transformers, peft,
diffusers, huggingface_hub). Before the gather, peft selects the tensors to save from meta tensors.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from .._torch.nn import uncompiled
from ..ranks.agree import broadcast_from_rank, raise_on_all_ranks
from .mesh import agree_on_gathering
from .state_dict import StateDict, full_state_dict
from .trained_module import is_first_rank, mesh_groups_of, plain_name

if TYPE_CHECKING:
    from peft import PeftModel

METHOD = "save_pretrained"
_SAVES_HERE = "should_save_on_this_rank"  # method of transformers' models


def has_save_pretrained(cls: type) -> bool:
    """Return whether modules of this class have a method ``save_pretrained``."""
    return inspect.isfunction(getattr(cls, METHOD, None))


def save_in_full(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a class's ``save_pretrained`` to gather the model and write it on the first rank.

    Other ranks take part in the gather and return None. Nothing changes for calls with a
    ``state_dict``, for unsharded models, or for modules that are saved as part of another one.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments |= kwargs  # also those that the method collects in **kwargs
        groups = mesh_groups_of(self)
        is_within = _is_part(vars(self).get("state_dict"))  # an enclosing module is being saved
        if groups is None or is_within or arguments.get("state_dict") is not None:
            return save(self, *args, **kwargs)
        remedy = (
            "model.save_pretrained(folder) outside of any `if rank == 0:`; the first rank writes"
        )
        agree_on_gathering(groups, METHOD, type(self).__name__, remedy)
        is_first = is_first_rank(groups)
        with raise_on_all_ranks(groups.all_ranks):
            if is_first and not arguments.get("is_main_process", True):
                raise ValueError(
                    f"is_main_process={arguments['is_main_process']!r} on the first rank of the "
                    "mesh, the only one with the full model: set it to True there"
                )
        state = saved_state_dict(self)
        if not is_first:
            return None
        with _returned_from_state_dict(self, state):
            return save(self, *args, **kwargs)

    return save_pretrained


def saved_state_dict(model: nn.Module) -> StateDict:
    """Gather the full state dict, or ``adapter_state_dict`` of a peft model, on the first rank."""
    return adapter_state_dict(model) if is_peft_model(model) else full_state_dict(model)


@contextmanager
def _returned_from_state_dict(root: nn.Module, state: StateDict) -> Iterator[None]:
    modules = list(root.named_modules())
    own = [(vars(module), vars(module).get("state_dict")) for _, module in modules]
    for name, module in modules:
        prefix = plain_name(f"{name}.") if name else ""
        vars(module)["state_dict"] = functools.partial(_part, state, prefix)
        if hasattr(type(module), _SAVES_HERE):
            # Transformers would write on rank 0 only, which the mesh need not contain.
            vars(module)[_SAVES_HERE] = lambda is_main_process: True
    try:
        yield
    finally:
        for attributes, method in own:
            attributes.pop(_SAVES_HERE, None)
            del attributes["state_dict"]
            if method is not None:  # assigned by the user
                attributes["state_dict"] = method


def _is_part(method: object) -> bool:
    return isinstance(method, functools.partial) and method.func is _part


def _part(
    state: StateDict,
    own_prefix: str,
    *,
    destination: StateDict | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> StateDict:
    """Return the entries of ``state`` under ``own_prefix``, which ``prefix`` replaces.

    Takes the keyword arguments of ``state_dict``; ``keep_vars`` has no effect.
    """
    destination = OrderedDict() if destination is None else destination
    for name, value in state.items():
        if name.startswith(own_prefix):
            destination[prefix + name.removeprefix(own_prefix)] = value
    return destination


# --- peft ----------------------------------------------------------------------------------------


def is_peft_model(model: object) -> TypeGuard[PeftModel]:
    """Return whether ``model`` is a ``PeftModel``."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)  # peft need not be installed
    return kind is not None and isinstance(model, kind)


def adapter_state_dict(model: nn.Module) -> StateDict:
    """Gather on the mesh's first rank the tensors that ``model.save_pretrained`` saves.

    All ranks must call this. Parameters that require a gradient are always gathered, other tensors
    only if peft saves them (``modules_to_save``, resized embeddings). If peft has to read values to
    choose what to save (AdaLoRA), the whole model is gathered.

    Returns:
        Full tensors on the first rank's host, keyed by their names in ``model.state_dict()``; empty
        on all other ranks.

    Raises:
        ValueError: ``model`` is not a ``PeftModel``, or uses prompt learning, which peft saves by
            running a forward.
        BackendError: on all ranks, if not all of them call this.
        Exception: peft's own error, on the first rank; the others raise a ``BackendError`` that
            quotes it.
    """
    root: Any = uncompiled(model)
    if not is_peft_model(root):
        raise ValueError(f"model is a {type(root).__name__}: pass the PeftModel")
    refuse_prompt_learning(root)
    groups = mesh_groups_of(root)
    if groups is None:
        return full_state_dict(root, names=_saved_names(root))
    remedy = "state = adapter_state_dict(model) outside of any `if rank == 0:`"
    agree_on_gathering(groups, "adapter_state_dict", type(root).__name__, remedy)
    names: list[str] = []
    with raise_on_all_ranks(groups.all_ranks):
        # Only the first rank calls peft, which may read base model files that other ranks lack.
        if is_first_rank(groups):
            names = _saved_names(root)
    return full_state_dict(root, names=broadcast_from_rank(names, 0, groups.all_ranks))


def refuse_prompt_learning(model: object) -> None:
    """Raise ValueError if ``model`` is a ``PeftModel`` with a prompt-learning adapter."""
    configs = model.peft_config if is_peft_model(model) else {}
    for name, config in configs.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapter {name!r} is of type {config.peft_type}: to save it, peft reads its "
                "prompt encoder on one rank, but each rank has only shards; use a different "
                "type, such as LoRA"
            )


def _saved_names(model: PeftModel) -> list[str]:
    from peft import get_peft_model_state_dict

    # Stand-ins: their identity shows which entries peft selects.
    state = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for name, value in model.state_dict().items()
    }
    try:
        chosen = [
            get_peft_model_state_dict(model, state, adapter).values()
            for adapter in model.peft_config
        ]
    except (RuntimeError, NotImplementedError):  # peft reads values, e.g. AdaLoRA's ranks
        return list(state)
    wanted = {id(value) for values in chosen for value in values}
    # Always keep trained parameters: peft may save new tensors that it computes from them.
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    return [name for name, value in state.items() if id(value) in wanted or name in trained]
