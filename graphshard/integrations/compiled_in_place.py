"""Shard a module and compile it in place: it stays the object that a framework knows.

Frameworks keep the module that they were given, look for its attributes and save it by its names;
what ``torch.compile`` returns is another object, whose names start with ``_orig_mod.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ..backend import Backend, shard
from ..params.grad_sync import no_sync
from ..params.sharded_model import sharded_model_of


def is_sharded(model: object) -> bool:
    """Return whether graphshard has sharded ``model``, or the module in which it is."""
    return isinstance(model, nn.Module) and sharded_model_of(model) is not None


def may_be_moved(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether a framework may move ``model`` to its device before it is sharded.

    It may not where the host is to keep the shards, or where the model has no values yet.

    Args:
        options: the arguments of :func:`graphshard.backend`.
    """
    stays = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    return not stays and not any(param.is_meta for param in model.parameters())


def shard_and_compile(model: nn.Module, made: Backend, options: Mapping[str, Any]) -> None:
    """Shard ``model`` and compile it in place.

    It gets a method ``no_sync``, by which frameworks accumulate gradients, as they know it of DDP.

    Args:
        made: ``graphshard.backend(**options)``, which the caller makes before it changes anything.

    Raises:
        ValueError: ``model`` cannot be sharded; nothing is changed then.
    """
    shard(model, **options)
    model.compile(backend=made)
    model.no_sync = MethodType(no_sync, model)  # type: ignore[assignment]
