"""Meshes in which only one rank exists, used to forecast and check steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import expert_parallel
from ._torch.distributed import fake_ranks


class Ranks(NamedTuple):
    """Shape of a mesh: ``replicas`` x ``shards`` groups of ``tp`` ranks each.

    Attributes:
        shards: number of shards of a replica's parameters; of experts, ``shards / ep``.
        tp: number of ranks over which tensor parallelism splits the model.
        ep: number of ranks over which experts are split. It divides ``shards``; if it is greater
            than 1, ``replicas`` and ``tp`` are 1.
    """

    replicas: int
    shards: int
    tp: int = 1
    ep: int = 1

    @property
    def axes(self) -> dict[str, int]:
        if self.ep > 1:
            return dict(zip(expert_parallel.AXES, (self.shards // self.ep, self.ep)))
        sizes = zip(("replicate", "shard", "tp"), self)
        return {name: size for name, size in sizes if size > 1 or name == "shard"}

    @property
    def split_axis(self) -> str:
        """Name of the mesh axis over which the model is split before sharding, or ""."""
        return "tp" if self.tp > 1 else "ep" if self.ep > 1 else ""


@contextmanager
def fake_mesh(ranks: Ranks, device_type: str, rank: int = 0) -> Iterator[DeviceMesh]:
    """Yield a mesh with the axes of ``ranks``, in which only ``rank`` exists."""
    names, shape = zip(*ranks.axes.items())
    with fake_ranks(math.prod(shape), rank):
        yield init_device_mesh(device_type, shape, mesh_dim_names=names)


def sharding_options(
    options: Mapping[str, Any], model: nn.Module, mesh: DeviceMesh, ranks: Ranks
) -> dict[str, Any]:
    """Complete arguments of ``backend`` for ``model``, already split over ``split_axis``, if any.

    Arguments in ``overrides`` take precedence over those that shard experts.
    """
    options = {**options, "sync_module_states": False}  # no other rank exists to broadcast values
    if ranks.ep > 1:
        overrides = expert_parallel.overrides(model, mesh)
        for glob, arguments in (options.get("overrides") or {}).items():  # the last match wins
            overrides[glob] = {**overrides.pop(glob, {}), **arguments}
        return {**options, "mesh": expert_parallel.data_mesh(mesh), "overrides": overrides}
    return {**options, "mesh": mesh[tuple(name for name in ranks.axes if name != "tp")]}
