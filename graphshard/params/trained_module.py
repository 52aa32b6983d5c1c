"""The module that users train: validate it, find its mesh, name its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from .._torch.nn import CHECKPOINT_PREFIX, COMPILED_PREFIX, uncompiled
from .mesh import MeshGroups
from .sharded_param import sharded_param_of


def uncompiled_module(model: object) -> nn.Module:
    """Return ``model`` without the wrapper of ``torch.compile``; raise if it is not a module."""
    root = uncompiled(model)
    if not isinstance(root, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: pass the nn.Module that is trained")
    return root


def uncompiled_modules(values: Iterable[object]) -> Iterator[nn.Module]:
    """Yield the modules among ``values``, without the wrapper of ``torch.compile``."""
    return (value for value in map(uncompiled, values) if isinstance(value, nn.Module))


def checked_module(
    model: nn.Module, optim: torch.optim.Optimizer | None = None, *, allow_meta: bool = False
) -> nn.Module:
    """Validate the arguments; return ``model`` without the wrapper of ``torch.compile``.

    Raises:
        ValueError: ``model`` is not a module, has a parameter on the meta device (unless
            ``allow_meta``), or has one that differs between ranks (experts that are not DTensors);
            or ``optim`` is not an optimizer.
    """
    root = uncompiled_module(model)
    if optim is not None and not isinstance(optim, torch.optim.Optimizer):
        raise ValueError(f"optim is a {type(optim).__name__}: pass a torch.optim.Optimizer")
    for name, param in root.named_parameters():
        if param.is_meta and not allow_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: first call "
                "model.to_empty(device=...) if you load all parameters, otherwise "
                "graphshard.materialize(model)"
            )
        if (sharded := sharded_param_of(param)) is not None and sharded.spec.is_local:
            raise ValueError(
                f"parameter {name!r} is on {sharded.spec.mesh} only, and other ranks have "
                "different parameters of that name: make them one DTensor before sharding, for "
                'example with DTensor.from_local(param.detach(), mesh["ep"], [Shard(0)])'
            )
    return root


def mesh_groups_of(root: nn.Module) -> MeshGroups | None:
    """Return the groups of the mesh that ``root`` is sharded over, or None if not sharded."""
    sharded_params = (sharded_param_of(param) for param in root.parameters())
    return next((p.spec.groups.of_model for p in sharded_params if p is not None), None)


def is_first_rank(groups: MeshGroups | None) -> bool:
    """Return whether this is the first rank of the mesh or, without a mesh, of all ranks."""
    if groups is not None:
        return int(groups.whole_mesh.mesh.flatten()[0]) == dist.get_rank()
    return not dist.is_initialized() or dist.get_rank() == 0


def plain_name(name: str) -> str:
    """Return a parameter name, or a prefix ending in ".", without the prefixes of wrappers.

    The wrappers are ``torch.compile`` and ``checkpoint_wrapper``.
    """
    return name.replace(COMPILED_PREFIX, "").replace(CHECKPOINT_PREFIX, "")
