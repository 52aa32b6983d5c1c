"""``save_pretrained`` of a sharded model: all ranks call it, the first rank writes the model.

    model.save_pretrained(folder)    gathers the full state dict (adapters only, if peft) on the
                                     first rank; there, ``state_dict()`` of every module returns it
                                     while the library's own ``save_pretrained`` writes it

This works for any library's method, whether it takes a state dict or not (transformers, peft,
diffusers, huggingface_hub). The method is replaced on the class, so copies of a model have it too.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .adapters import adapter_state_dict, is_peft_model
from .agree import raise_on_all_ranks
from .full_state_dict import (
    StateDict,
    full_state_dict,
    is_first_rank,
    mesh_groups_of,
    plain_name,
)
from .mesh import agree_on_gathering

METHOD = "save_pretrained"
_REMEDY = "model.save_pretrained(folder) outside of any `if rank == 0:`; the first rank writes"


def has_save_pretrained(cls: type) -> bool:
    """Return whether modules of this class have a method ``save_pretrained``."""
    return inspect.isfunction(getattr(cls, METHOD, None))


def save_in_full(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a class's ``save_pretrained`` to gather the full model and write it on the first rank.

    Raises:
        ValueError: from the wrapper, on all ranks: ``is_main_process`` is false on the first rank,
            the only one that has the full model.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments |= kwargs  # also those that the method collects in **kwargs
        groups = mesh_groups_of(self)
        is_within = "state_dict" in vars(self)  # an enclosing module is being saved
        if groups is None or is_within or arguments.get("state_dict") is not None:
            return save(self, *args, **kwargs)
        agree_on_gathering(groups, METHOD, type(self).__name__, _REMEDY)
        is_first, error = is_first_rank(groups), None
        if is_first and not arguments.get("is_main_process", True):
            error = ValueError(
                f"is_main_process={arguments['is_main_process']!r} on the first rank of the mesh, "
                "which alone has the full model: set it to True there"
            )
        raise_on_all_ranks(error, groups)
        state = adapter_state_dict(self) if is_peft_model(self) else full_state_dict(self)
        if not is_first:
            return None
        with _returned_from_state_dict(self, state):
            return save(self, *args, **kwargs)

    return save_pretrained


@contextmanager
def _returned_from_state_dict(root: nn.Module, state: StateDict) -> Iterator[None]:
    """Make ``state_dict()`` of ``root`` and of modules in it return their part of ``state``."""
    modules = list(root.named_modules())
    for name, module in modules:
        prefix = plain_name(f"{name}.") if name else ""
        module.__dict__["state_dict"] = functools.partial(_part, state, prefix)
    try:
        yield
    finally:
        for _, module in modules:
            del module.__dict__["state_dict"]


def _part(
    state: StateDict,
    own_prefix: str,
    *,
    destination: StateDict | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> StateDict:
    """Return the entries of ``state`` under ``own_prefix``; same signature as ``state_dict``."""
    destination = OrderedDict() if destination is None else destination
    for name, value in state.items():
        if name.startswith(own_prefix):
            destination[prefix + name.removeprefix(own_prefix)] = value
    return destination
