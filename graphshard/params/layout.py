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
from ..ops.accumulators import ACCUMULATOR_NAMES
from ..ops.host_copy import to_host_memory
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
        return torch.Size((-(-self.rows // self.groups.num_shards), *self.shape[1:]))

    @functools.cached_property
    def own_rows(self) -> slice:
        """This rank's rows of the full parameter."""
        assert self.rows is not None
        padded = self.padded_shape[0]
        start = min(padded * self.groups.shard_index, self.rows)
        return slice(start, min(start + padded, self.rows))

    @functools.cached_property
    def own_count(self) -> int:
        return self.own_rows.stop - self.own_rows.start

    def unshard(self, leaf: torch.Tensor) -> torch.Tensor:
        op, args = self.marker()
        return op(leaf, *args, *[None] * len(self.sums))

    def reduce(
        self, grad: torch.Tensor, result: torch.dtype, partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean of all ranks' full gradients: this rank's padded shard of it, as ``result``.

        Args:
            partial: added to the mean over shards before that over replicas.
        """
        if self.rows is None:
            return markers.all_reduce_grad(grad, self.groups.all, self.reduce_dtype, result)
        groups = self.groups.shards, self.groups.replicas
        given = partial, self.reduce_dtype, result, self.host
        return markers.reduce_grad(grad, self.padded_shape[0], *groups, *given)

    def reduce_to_partial(self, grad: torch.Tensor) -> torch.Tensor:
        """The mean of the full gradients of one replica, in the dtype in which it is reduced."""
        groups, dtype = (self.groups.shards, ""), markers.used_dtype(grad, self.reduce_dtype)
        return markers.reduce_grad(grad, self.padded_shape[0], *groups, None, dtype, dtype, "")

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the marker's last arguments: see ``graphshard.params.grad_accumulation``."""
        return ACCUMULATOR_NAMES[:1] if self.rows is None else ACCUMULATOR_NAMES

    def marker(self) -> tuple[Any, tuple[Any, ...]]:
        """The op that makes the full parameter of the leaf, and its arguments between leaf and sums."""
        if self.rows is None:
            return markers.replicate, (self.groups.all, self.dtype, self.reduce_dtype)
        groups = self.groups.shards, self.regather, self.groups.replicas
        casts = (self.dtype, self.reduce_dtype, self.float8, None, 0)
        kept = (self.groups.device if self.host else None, self.host)
        return markers.unshard, (self.rows, *groups, *casts, *kept)

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
