"""The process groups of a mesh: ranks that hold its shards, its replicas, and parts of these."""

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
"""Process groups that were created here, by their sorted ranks."""


@dataclass(frozen=True)
class MeshGroups:
    """The process groups of one mesh, by name.

    Args:
        mesh: 1D: parameters are sharded over it; 2D: (replicas, shards), for HSDP.
    """

    mesh: DeviceMesh

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def num_shards(self) -> int:
        """How many ranks hold the shards of one replica."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_index(self) -> int:
        """This rank's position among them."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @cached_property
    def shards(self) -> str:
        """The group of ranks that hold the shards of one replica."""
        return self.mesh.get_group(self.mesh.ndim - 1).group_name

    @cached_property
    def replicas(self) -> str | None:
        """The group of ranks that hold the same shards; None where there are no others."""
        several = self.mesh.ndim == 2 and self.mesh.size(0) > 1
        return self.mesh.get_group(0).group_name if several else None

    @cached_property
    def all_ranks(self) -> str:
        """The group of all ranks of the mesh."""
        if self.mesh.ndim == 1:
            return self.shards
        return self._group_of(self.mesh.mesh.flatten().tolist())

    def neighbours(self, num_ranks: int) -> str:
        """Return the group of ``num_ranks`` consecutive ranks of this rank's replica.

        This rank is among them; ``num_ranks`` divides ``num_shards``.
        """
        if num_ranks == self.num_shards:
            return self.shards
        rows = self.mesh.mesh.reshape(-1, num_ranks).tolist()
        return self._group_of(next(ranks for ranks in rows if dist.get_rank() in ranks))

    def _group_of(self, ranks: Sequence[int]) -> str:
        """Return the group of these ranks; the first time, all of them have to call this.

        Its collectives may take as long as those of the mesh.
        """
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD.group_name  # type: ignore[union-attr]  # it is initialised
        key = tuple(sorted(ranks))
        group = _created.get(key)
        if group is None or not is_registered(group):
            timeout = timedelta(seconds=group_timeout_s(process_group(self.shards)))
            # Ranks of other parts of a larger mesh may shard something else, or nothing.
            group = dist.new_group(list(key), timeout=timeout, use_local_synchronization=True)
            _created[key] = group
        return group.group_name
