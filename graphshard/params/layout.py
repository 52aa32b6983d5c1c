"""How one parameter is split over a mesh, and which markers stand for it.

Rows are split as ``torch.chunk`` splits them and padded to the same number on every rank: see [Note:
padded shards] in ``graphshard.ops.markers``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch.dtensor import dtensor_of
from ..ops import markers
from ..ops.emitter import run
from ..ops.host_copy import to_host_memory
from ..ops.marker_specs import AllReduceGradSpec, ReduceGradSpec, ReplicateSpec, UnshardSpec
from ..ops.shard_rows import padded_rows, rows_of_rank
from .mesh_groups import MeshGroups


@dataclass(frozen=True, eq=False)
class Layout:
    """How one parameter is split over a mesh, and as what it and its gradient travel.

    Attributes:
        regather: the group from which backward gathers; "": what forward gathered is kept.
        dtype: as which it is gathered and used; None: its own.
        reduce_dtype: as which its gradient is reduced; None: that of the gradient.
        float8: recipe of fp8 for its linears; "": none.
        shard: False: it is replicated.
        host: shards are kept in that memory of the host (see ``graphshard.ops.host_copy``); "": on the device.
        rows: None for a replicated one.
    """

    shape: torch.Size
    groups: MeshGroups
    regather: str
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    float8: str = ""
    shard: bool = True
    host: str = ""
    rows: int | None = field(init=False)

    def __post_init__(self) -> None:
        splittable = self.shard and len(self.shape) > 0 and self.shape.numel() > 0
        object.__setattr__(self, "rows", self.shape[0] if splittable else None)
        object.__setattr__(self, "host", self.host if splittable else "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @property
    def mesh(self) -> DeviceMesh:
        return self.groups.mesh

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One for each axis of the mesh."""
        last = Replicate() if self.rows is None else Shard(0)
        return (*[Replicate()] * (self.mesh.ndim - 1), last)

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        if self.rows is None:
            return self.shape
        return torch.Size((padded_rows(self.rows, self.groups.num_shards), *self.shape[1:]))

    @functools.cached_property
    def own_rows(self) -> slice:
        """This rank's rows of the full parameter."""
        assert self.rows is not None
        return rows_of_rank(self.rows, self.groups.num_shards, self.groups.shard_index)

    @functools.cached_property
    def own_count(self) -> int:
        return self.own_rows.stop - self.own_rows.start

    def unshard(self, leaf: torch.Tensor) -> torch.Tensor:
        return self.marker(leaf).call(run)

    def reduce(
        self, grad: torch.Tensor, result: torch.dtype, partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean of all ranks' full gradients: this rank's padded shard of it, as ``result``.

        Args:
            partial: added to the mean over shards before that over replicas.
        """
        if self.rows is None:
            return AllReduceGradSpec(
                grad=grad,
                group=self.groups.all,
                reduce_dtype=self.reduce_dtype,
                result_dtype=result,
            ).call(run)
        return ReduceGradSpec(
            grad=grad,
            padded_rows=self.padded_shape[0],
            group=self.groups.shards,
            replica_group=self.groups.replicas or None,
            partial=partial,
            reduce_dtype=self.reduce_dtype,
            result_dtype=result,
            host_memory=self.host or None,
        ).call(run)

    def reduce_to_partial(self, grad: torch.Tensor) -> torch.Tensor:
        """The mean of the full gradients of one replica, in the dtype in which it is reduced."""
        dtype = markers.used_dtype(grad, self.reduce_dtype)
        return ReduceGradSpec(
            grad=grad,
            padded_rows=self.padded_shape[0],
            group=self.groups.shards,
            reduce_dtype=dtype,
            result_dtype=dtype,
        ).call(run)

    def marker(self, leaf: torch.Tensor) -> UnshardSpec | ReplicateSpec:
        """The marker that makes the full parameter of its leaf, without accumulators."""
        if self.rows is None:
            return ReplicateSpec(
                param=leaf,
                group=self.groups.all,
                dtype=self.dtype,
                reduce_dtype=self.reduce_dtype,
            )
        return UnshardSpec(
            shard=leaf,
            rows=self.rows,
            group=self.groups.shards,
            regather_group=self.regather or None,
            replica_group=self.groups.replicas or None,
            dtype=self.dtype,
            reduce_dtype=self.reduce_dtype,
            float8_recipe=self.float8 or None,
            device=self.groups.device if self.host else None,
            host_memory=self.host or None,
        )

    def padded_shard(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``full``, padded with zeros: a new contiguous tensor, where it is kept."""
        if self.rows is None:
            there = full.device.type in ("meta", self.mesh.device_type)
            device = full.device if there else self.groups.device
            return full.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        return to_host_memory(self.padded(full.detach()[self.own_rows]), self.host)

    def padded(self, own: torch.Tensor) -> torch.Tensor:
        padded = own.new_zeros(self.padded_shape)
        padded[: own.shape[0]] = own
        return padded

    def local_view(self, padded: torch.Tensor) -> torch.Tensor:
        return padded if self.rows is None else padded[: self.own_count]

    def dtensor(self, padded: torch.Tensor) -> DTensor:
        """A DTensor of the full shape whose local tensor is a view of ``padded``."""
        return dtensor_of(self.local_view(padded), self.mesh, self.placements, self.shape)
