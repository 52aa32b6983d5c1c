"""The process groups of a mesh: which ranks hold its shards, its replicas, and what few gather from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.distributed import is_registered

_made: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""By ranks."""


@dataclass(frozen=True)
class MeshGroups:
    """Of a 1D mesh, over which parameters are sharded, or a 2D one: replicas, and shards (HSDP)."""

    mesh: DeviceMesh

    @property
    def device(self) -> torch.device:
        """On which this rank computes."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def num_shards(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_index(self) -> int:
        """Of this rank's shards."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @cached_property
    def shards(self) -> str:
        """The group of ranks that have the shards of one replica; groups go by their names."""
        return self.mesh.get_group(self.mesh.ndim - 1).group_name

    @cached_property
    def replicas(self) -> str:
        """The group of ranks that have the same shards; "" where each is alone."""
        several = self.mesh.ndim == 2 and self.mesh.size(0) > 1
        return self.mesh.get_group(0).group_name if several else ""

    @cached_property
    def all(self) -> str:
        """The group of all ranks of the mesh."""
        if self.mesh.ndim == 1:
            return self.shards
        return _group_of(self.mesh.mesh.flatten().tolist())

    def few(self, num: int) -> str:
        """The group of ``num`` neighbours, this rank among them, that have shards of one replica."""
        parts = self.mesh.mesh.reshape(-1, num).tolist()
        return _group_of(next(ranks for ranks in parts if dist.get_rank() in ranks))


def _group_of(ranks: list[int]) -> str:
    """The group of these ranks; the first time, a collective of theirs."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD.group_name  # type: ignore[union-attr]
    known = _made.get(key := tuple(sorted(ranks)))
    if known is None or not is_registered(known):
        # Ranks of other parts of a larger mesh may shard something else, or nothing.
        _made[key] = known = dist.new_group(list(key), use_local_synchronization=True)
    return known.group_name
