"""Process groups of a mesh: shard group, replica group, all ranks, parts of the shard group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.distributed import group_timeout_s, is_registered, process_group

_created: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Process groups created by this module, by their sorted ranks."""


@dataclass(frozen=True)
class MeshGroups:
    """Names of the process groups of one mesh.

    Args:
        mesh: 1D mesh to shard over, or 2D mesh of (replicas, shards) for HSDP.
    """

    mesh: DeviceMesh

    @property
    def device(self) -> torch.device:
        """Compute device of this rank."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def num_shards(self) -> int:
        """Number of ranks that hold the shards of one replica."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_index(self) -> int:
        """Index of this rank in its shard group."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @cached_property
    def shards(self) -> str:
        """Name of the shard group: the ranks that hold the shards of one replica."""
        return self.mesh.get_group(self.mesh.ndim - 1).group_name

    @cached_property
    def replicas(self) -> str | None:
        """Name of the replica group: the ranks that hold the same shards; None for one replica."""
        several = self.mesh.ndim == 2 and self.mesh.size(0) > 1
        return self.mesh.get_group(0).group_name if several else None

    @cached_property
    def all_ranks(self) -> str:
        """Name of the group of all ranks of the mesh."""
        if self.mesh.ndim == 1:
            return self.shards
        return self._group_of(self.mesh.mesh.flatten().tolist())

    def regather_group(self, num_ranks: int) -> str:
        """Return the group of this rank and its neighbours: consecutive ranks of its replica.

        Args:
            num_ranks: size of the group, which divides ``num_shards``.
        """
        if num_ranks == self.num_shards:
            return self.shards
        rows = self.mesh.mesh.reshape(-1, num_ranks).tolist()
        return self._group_of(next(ranks for ranks in rows if dist.get_rank() in ranks))

    def _group_of(self, ranks: Sequence[int]) -> str:
        """Return the group of ``ranks``, creating it if needed.

        The first call must be made by all of these ranks. A new group has the same timeout as the
        shard group.
        """
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD.group_name  # type: ignore[union-attr]  # it is initialised
        key = tuple(sorted(ranks))
        group = _created.get(key)
        if group is None or not is_registered(group):
            timeout = timedelta(seconds=group_timeout_s(process_group(self.shards)))
            # Synchronize only ``ranks``: the mesh may be a slice of a larger one, whose other ranks
            # may shard something else, or nothing.
            group = dist.new_group(list(key), timeout=timeout, use_local_synchronization=True)
            _created[key] = group
        return group.group_name
