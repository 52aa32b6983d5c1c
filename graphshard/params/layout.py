"""How one parameter is split over a mesh, and the markers that gather it and reduce its gradient.

Rows are split as ``torch.chunk`` splits them and padded to the same number on every rank: see
[Note: padded shards] in ``graphshard.ops.markers``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch.dtensor import dtensor_of
from .._torch.tensors import OpOverload
from ..ops.emitter import run
from ..ops.host_copy import to_host_memory
from ..ops.marker_specs import AllReduceGradSpec, ReduceGradSpec, ReplicateSpec, UnshardSpec
from ..ops.markers import used_dtype
from ..ops.shard_rows import padded_rows, rows_of_rank
from .mesh_groups import MeshGroups


class MarkerCall(NamedTuple):
    """The call of a parameter's marker op, without tensors.

    Attributes:
        constants: arguments between the shard and the accumulators.
        accumulators: names of the trailing accumulator arguments; None for those not passed.
    """

    op: OpOverload
    constants: tuple[Any, ...]
    accumulators: tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """How one parameter is split over a mesh, and how it and its gradient travel.

    Attributes:
        shape: shape of the full parameter, ``[rows, ...]``.
        regather_group: group that backward gathers from; None keeps the parameter unsharded between
            forward and backward.
        dtype: dtype in which the parameter is gathered and used; None for its own.
        reduce_dtype: dtype in which its gradient is reduced; None for the gradient's own.
        float8_recipe: fp8 recipe of its linears; None if they do not compute in fp8.
        shard: whether to split the parameter; False replicates it.
        host_memory: kind of host memory that holds the shards, ``PINNED`` or ``PAGEABLE`` of
            ``graphshard.ops.host_copy``; None keeps them on the device.
        rows: number of rows that are split; None if the parameter is replicated.
    """

    shape: torch.Size
    groups: MeshGroups
    regather_group: str | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    float8_recipe: str | None = None
    shard: bool = True
    host_memory: str | None = None
    rows: int | None = field(init=False)

    def __post_init__(self) -> None:
        splittable = self.shard and len(self.shape) > 0 and self.shape.numel() > 0
        object.__setattr__(self, "rows", self.shape[0] if splittable else None)
        object.__setattr__(self, "host_memory", self.host_memory if splittable else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which the parameter is split or replicated."""
        return self.groups.mesh

    def group_names(self) -> set[str]:
        """Return the names of all process groups that this parameter's markers may use."""
        groups = self.groups
        names = (groups.shards, groups.replicas, groups.all_ranks, self.regather_group)
        return {name for name in names if name is not None}

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor's placements, one for each axis of the mesh."""
        last = Replicate() if self.rows is None else Shard(0)
        return (*[Replicate()] * (self.mesh.ndim - 1), last)

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        """The shape of the shard on every rank, ``[ceil(rows / num_shards), ...]``."""
        if self.rows is None:
            return self.shape
        return torch.Size((padded_rows(self.rows, self.groups.num_shards), *self.shape[1:]))

    @functools.cached_property
    def local_rows(self) -> slice:
        """This rank's rows of the full parameter, without padding."""
        assert self.rows is not None
        return rows_of_rank(self.rows, self.groups.num_shards, self.groups.shard_index)

    @functools.cached_property
    def num_local_rows(self) -> int:
        """Number of this rank's rows, without padding."""
        return self.local_rows.stop - self.local_rows.start

    def marker(self, shard: torch.Tensor) -> UnshardSpec | ReplicateSpec:
        """Return the marker that unshards ``shard``, without accumulators."""
        if self.rows is None:
            return ReplicateSpec(
                param=shard,
                group=self.groups.all_ranks,
                dtype=self.dtype,
                reduce_dtype=self.reduce_dtype,
            )
        return UnshardSpec(
            shard=shard,
            rows=self.rows,
            group=self.groups.shards,
            regather_group=self.regather_group,
            replica_group=self.groups.replicas,
            dtype=self.dtype,
            reduce_dtype=self.reduce_dtype,
            float8_recipe=self.float8_recipe,
            device=None if self.host_memory is None else self.groups.device,
            host_memory=self.host_memory,
        )

    def marker_call(self, shard: torch.Tensor) -> MarkerCall:
        """Return the marker's op and non-tensor arguments, which are the same for all shards."""
        if self.host_memory is not None:
            return self._marker_call(shard)  # not cached: it contains the current device
        # Cached: accessors are refreshed at every entry to and exit from no_sync.
        if "_known_marker_call" not in self.__dict__:
            object.__setattr__(self, "_known_marker_call", self._marker_call(shard))
        known: MarkerCall = self.__dict__["_known_marker_call"]
        return known

    def _marker_call(self, shard: torch.Tensor) -> MarkerCall:
        spec = self.marker(shard)
        return MarkerCall(spec.op(), spec.constants(), spec.accumulators)

    def unshard(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather the full parameter from ``shard`` of ``padded_shape``, eagerly."""
        full: torch.Tensor = self.marker(shard).call(run)
        return full

    def reduce(
        self, grad: torch.Tensor, result_dtype: torch.dtype, partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduce full gradients to this rank's padded shard of their mean, eagerly.

        Args:
            partial: key of an accumulator whose total is added after the reduction over shards,
                before the average over replicas.
        """
        marker: ReduceGradSpec | AllReduceGradSpec
        if self.rows is None:
            marker = AllReduceGradSpec(
                grad=grad,
                group=self.groups.all_ranks,
                reduce_dtype=self.reduce_dtype,
                result_dtype=result_dtype,
            )
        else:
            marker = ReduceGradSpec(
                grad=grad,
                padded_rows=self.padded_shape[0],
                group=self.groups.shards,
                replica_group=self.groups.replicas,
                partial=partial,
                reduce_dtype=self.reduce_dtype,
                result_dtype=result_dtype,
                host_memory=self.host_memory,
            )
        shard: torch.Tensor = marker.call(run)
        return shard

    def reduce_to_partial(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce full gradients within each replica to a shard in the reduction dtype, eagerly."""
        dtype = used_dtype(grad, self.reduce_dtype)
        marker = ReduceGradSpec(
            grad=grad,
            padded_rows=self.padded_shape[0],
            group=self.groups.shards,
            reduce_dtype=dtype,
            result_dtype=dtype,
        )
        shard: torch.Tensor = marker.call(run)
        return shard

    def average_over_replicas(
        self, partial: torch.Tensor, result_dtype: torch.dtype
    ) -> torch.Tensor:
        """Average a shard that was reduced within each replica over the replicas, eagerly."""
        assert self.groups.replicas is not None
        marker = AllReduceGradSpec(
            grad=partial, group=self.groups.replicas, result_dtype=result_dtype
        )
        return to_host_memory(marker.call(run), self.host_memory)

    def padded_shard(self, full: torch.Tensor) -> torch.Tensor:
        """Copy this rank's rows of ``full``, zero-padded, to the memory that keeps them.

        The result is contiguous and has ``padded_shape``.
        """
        if self.rows is None:
            stays = full.device.type in ("meta", self.mesh.device_type)
            device = full.device if stays else self.groups.device
            return full.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        return to_host_memory(self.padded(full.detach()[self.local_rows]), self.host_memory)

    def padded(self, own: torch.Tensor) -> torch.Tensor:
        """Copy this rank's rows into a tensor of ``padded_shape``, followed by zeros."""
        padded = own.new_zeros(self.padded_shape)
        padded[: own.shape[0]] = own
        return padded

    def local_view(self, padded: torch.Tensor) -> torch.Tensor:
        """Return a view of ``padded`` without the padding."""
        return padded if self.rows is None else padded[: self.num_local_rows]

    def dtensor(self, padded: torch.Tensor) -> DTensor:
        """Return a DTensor of the full shape whose local tensor is a view of ``padded``."""
        return dtensor_of(self.local_view(padded), self.mesh, self.placements, self.shape)
