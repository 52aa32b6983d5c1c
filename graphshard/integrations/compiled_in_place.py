"""Shard a module and compile it in place, so that it stays the object that a framework knows.

Frameworks keep the module they were given, look up its attributes and save it under its parameter
names; ``torch.compile`` returns a different object, whose names start with ``_orig_mod.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ..dynamo_backend import Backend, shard
from ..params.grad_sync import no_sync
from ..params.sharded_param import sharded_model_of


def is_sharded(model: object) -> bool:
    """Return whether graphshard has sharded ``model``, or a module that contains it."""
    return isinstance(model, nn.Module) and sharded_model_of(model) is not None


def may_be_moved(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether a framework may move ``model`` to its device before it is sharded.

    It may not if shards are offloaded to the host, or a parameter is on the meta device.

    Args:
        options: arguments of :func:`graphshard.backend`.
    """
    stays = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    return not stays and not any(param.is_meta for param in model.parameters())


def shard_and_compile(
    model: nn.Module, dynamo_backend: Backend, options: Mapping[str, Any]
) -> None:
    """Shard ``model`` and compile it in place.

    This adds a ``no_sync`` method like DDP's, which frameworks call to accumulate gradients.

    Args:
        dynamo_backend: ``graphshard.backend(**options)``. Callers make it before they change
            anything, because it raises for wrong options.
        options: arguments of :func:`graphshard.backend`.

    Raises:
        ValueError: ``model`` cannot be sharded; it is unchanged.
    """
    shard(model, **options)
    model.compile(backend=dynamo_backend)
    model.no_sync = MethodType(no_sync, model)  # type: ignore[assignment]
