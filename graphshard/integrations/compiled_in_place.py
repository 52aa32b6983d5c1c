"""Shard a module and compile it in place: it stays the object that a framework knows.

Frameworks keep the module that they were given, look for its attributes and save it by its names;
what ``torch.compile`` returns is another object, whose names start with ``_orig_mod.``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from ..backend import Backend, backend, shard
from ..params.grad_sync import no_sync
from ..params.sharded_model import sharded_model_of


def is_sharded(model: object) -> bool:
    """Return whether graphshard has sharded ``model``, or the module in which it is."""
    return isinstance(model, nn.Module) and sharded_model_of(model) is not None


def shard_and_compile(model: nn.Module, **options: Any) -> Backend:
    """Shard ``model`` and compile it in place; return its backend.

    It gets a method ``no_sync``, by which frameworks accumulate gradients, as they know it of DDP.

    Args:
        options: the arguments of :func:`graphshard.backend`.

    Raises:
        ValueError: an option is wrong, or ``model`` cannot be sharded; nothing is changed then.
    """
    made = backend(**options)
    shard(model, **options)
    model.compile(backend=made)
    model.no_sync = MethodType(no_sync, model)  # type: ignore[assignment]
    return made
