"""Registry of live optimizers and modules, filled since graphshard was imported.

A module is recorded when a parameter or submodule is registered on it. The registry is needed
because ``gc.get_objects()`` omits objects that ``gc.freeze()`` has hidden.

Relies on torch/optim/optimizer.py and torch/nn/modules/module.py.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.optim import Optimizer

from .patches import patch

_T = TypeVar("_T")

# Keyed by id, because a user's module may not be hashable.
_instances: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def live_instances(kind: type[_T]) -> dict[int, _T]:
    """Return the recorded optimizers or modules of type ``kind`` that are alive, keyed by id."""
    return {key: thing for key, thing in _instances.items() if issubclass(type(thing), kind)}


def note_module(module: nn.Module, name: str, value: object) -> None:
    if not torch.compiler.is_compiling():
        _instances[id(module)] = module


def _noting(method: Any) -> Any:
    @functools.wraps(method)
    def note(self: Optimizer) -> Any:
        _instances[id(self)] = self
        return method(self)

    return note


patch("torch.optim.optimizer.Optimizer._patch_step_function", _noting)
# A module is recorded once it holds a parameter or a submodule.
registration.register_module_parameter_registration_hook(note_module)
registration.register_module_module_registration_hook(note_module)
