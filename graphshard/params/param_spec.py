"""How a parameter is split over a mesh and gathered, and how its gradient is reduced.

    options, fp8 recipe, mesh ─► ParamSpec ─► the parameter's shard and DTensor
                                           ─► the arguments of its marker in every graph

Rows are split as by ``torch.chunk``, and padded to the same number on every rank: see
[Note: padded shards] in ``graphshard.ops.markers``. If a dimension other than 0 is split, its
slices are the rows: shards, markers and collectives have that dimension first. Users and forward
see views with the dimensions in their original order.

A parameter that tensor parallelism has already split is a DTensor. Graphs gather and reduce this
rank's part of it, here called the unsharded tensor, like a plain parameter of that shape:

    full parameter ── tp_placements ──► unsharded tensor ── dim, rows ──► padded shard
                                        ▲
    forward reads a DTensor of it ──────┘
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch.dtensor import dtensor_of, local_tensor, rows_of_parts
from ..ops.groups import padded_rows, rows_of_rank
from ..ops.host_copy import to_host_memory
from ..ops.marker_specs import AllReduceGradSpec, ReplicateSpec, UnshardSpec
from ..ops.nodes import run
from .mesh import MeshGroups


class TensorParallel(NamedTuple):
    """Arguments of ``DTensor.from_local`` with which forward wraps a gathered parameter."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def reader(dim: int, parallel: TensorParallel | None) -> Callable[[Any], Any]:
    """Return a function that converts gathered rows to the tensor that forward reads.

    With tensor parallelism, that function returns a DTensor whose local tensor is this rank's part,
    and whose gradient gets the same placements.
    """
    if parallel is None:
        return lambda rows: rows.movedim(0, dim) if dim else rows
    # Unpack here, because graphs would guard on a NamedTuple.
    mesh, placements, shape, stride = parallel

    def read(rows: Any) -> DTensor:
        part = rows.movedim(0, dim) if dim else rows
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return read


@dataclass(frozen=True)
class ParamSpec:
    """Specification of a parameter's sharding, gathering, dtypes and gradient reduction.

    Attributes:
        shape: full shape, with dimensions in the model's order.
        fqn: first name at the time of sharding, used in messages.
        num_backward_ranks: number of ranks that backward gathers from; None keeps the parameter
            unsharded between forward and backward.
        overrides_reshard: whether ``overrides`` set ``reshard_after_forward`` for the parameter.
        dtype: dtype of the gathered parameter, or None for the dtype of its shard.
        reduce_dtype: dtype of the gradient reduction, or None for the gradient's dtype.
        float8_recipe: fp8 recipe of the linears that use the parameter, or None.
        shard: whether to split the parameter instead of replicating it.
        host_memory: kind of host memory that holds shards, ``PINNED`` or ``PAGEABLE`` of
            ``graphshard.ops.host_copy``, or None for device memory.
        tp_placements: placements on ``groups.tp_mesh``, ``Shard`` or ``Replicate``, of the original
            DTensor, or None for a plain parameter.
        dim: dimension whose slices are the rows; 0 if the parameter is replicated.
        rows: number of rows of the unsharded tensor, which are split over ranks, or None if the
            parameter is replicated.
    """

    shape: torch.Size
    groups: MeshGroups
    fqn: str = ""
    num_backward_ranks: int | None = None
    overrides_reshard: bool = False
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    float8_recipe: str | None = None
    shard: bool = True
    host_memory: str | None = None
    tp_placements: tuple[Placement, ...] | None = None
    dim: int = 0
    rows: int | None = field(init=False)

    def __post_init__(self) -> None:
        # Scalars and empty parameters have no rows to split.
        splittable = self.shard and len(self.shape) > 0 and self.shape.numel() > 0
        object.__setattr__(self, "dim", self.dim if splittable else 0)
        object.__setattr__(self, "rows", self.unsharded_shape[0] if splittable else None)
        object.__setattr__(self, "host_memory", self.host_memory if splittable else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamSpec:
        return self

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of the DTensor that users see."""
        return self.groups.mesh if self.tp_placements is None else self.groups.whole_mesh

    @functools.cached_property
    def tensor_parallel(self) -> TensorParallel | None:
        if self.tp_placements is None:
            return None
        assert self.groups.tp_mesh is not None
        stride = torch.empty(self.shape, device="meta").stride()
        return TensorParallel(self.groups.tp_mesh, self.tp_placements, self.shape, stride)

    @functools.cached_property
    def tp_part(self) -> tuple[slice, ...]:
        """Index of the unsharded tensor in the full parameter."""
        index, tp_mesh = [slice(0, size) for size in self.shape], self.groups.tp_mesh
        for placement in self.tp_placements or ():  # at most one: the mesh has one axis
            if isinstance(placement, Shard):
                assert tp_mesh is not None
                size, rank = self.shape[placement.dim], tp_mesh.get_local_rank()
                index[placement.dim] = rows_of_rank(size, tp_mesh.size(), rank)
        return tuple(index)

    @functools.cached_property
    def unsharded_shape(self) -> torch.Size:
        """Shape of the unsharded tensor with its rows first, ``[rows, ...]``."""
        sizes = [part.stop - part.start for part in self.tp_part]
        rows, others = sizes[self.dim : self.dim + 1], sizes[: self.dim] + sizes[self.dim + 1 :]
        return torch.Size([*rows, *others])

    @functools.cached_property
    def regather_group(self) -> str | None:
        """Group that backward gathers from, or None; the first read may be a collective."""
        ranks = self.num_backward_ranks
        return None if ranks is None else self.groups.regather_group(ranks)

    @property
    def is_local(self) -> bool:
        """Whether other ranks hold a different parameter of this name, such as other experts."""
        default = self.groups.default
        return (
            default is not None
            and self.tp_placements is None
            and self.mesh.size() < default.whole_mesh.size()
        )

    def group_names(self) -> set[str]:
        """Return the names of all groups that the parameter's markers may use."""
        groups = self.groups
        names = (groups.shards, groups.replicas, groups.data_ranks, self.regather_group)
        return {name for name in names if name is not None}

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        last: Placement = Replicate()
        if self.rows is not None:
            last = rows_of_parts(self.shape[self.dim] // self.rows, self.dim)
        return (*[Replicate()] * (self.groups.mesh.ndim - 1), last, *(self.tp_placements or ()))

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        """Shape of every rank's shard, ``[ceil(rows / num_shards), ...]``; full if replicated."""
        shape = self.unsharded_shape
        if self.rows is None:
            return shape
        return torch.Size((padded_rows(self.rows, self.groups.num_shards), *shape[1:]))

    @functools.cached_property
    def local_rows(self) -> slice:
        """This rank's rows of the unsharded tensor, without padding."""
        assert self.rows is not None
        rank = self.groups.mesh.get_local_rank(self.groups.mesh.ndim - 1)
        return rows_of_rank(self.rows, self.groups.num_shards, rank)

    @functools.cached_property
    def num_local_rows(self) -> int:
        return self.local_rows.stop - self.local_rows.start

    @functools.cached_property
    def part(self) -> tuple[slice, ...]:
        """Index of this rank's part of the full parameter, without padding."""
        if self.rows is None:
            return self.tp_part
        index, own = list(self.tp_part), self.local_rows
        start = index[self.dim].start
        index[self.dim] = slice(start + own.start, start + own.stop)
        return tuple(index)

    # --- conversions of full tensors, padded shards and DTensors ---

    def padded_shard(self, full: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of ``full`` to a padded shard; see ``padded_shard_of``."""
        return self.padded_shard_of(self.unsharded(full))

    def unsharded(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor-parallel part of ``full``, or all of it without TP.

        A DTensor is redistributed to ``tp_placements``, which may communicate.
        """
        if isinstance(full, DTensor):  # a gradient's placements may differ: this communicates
            detached: Any = full.detach()
            return local_tensor(detached.redistribute(placements=self.tp_placements))
        return full.detach()[self.tp_part]

    def padded_shard_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of ``unsharded`` to a padded shard.

        It is on the mesh's device, or in host memory if offloaded; a meta tensor stays on meta.
        """
        stays = unsharded.is_meta or self.host_memory is not None
        device = unsharded.device if stays else self.groups.device
        if self.rows is None:
            return unsharded.to(device, copy=True, memory_format=torch.contiguous_format)
        rows = self.rows_first(unsharded)[self.local_rows].to(device)
        return to_host_memory(self.padded(self.in_place(rows)), self.host_memory)

    def padded(self, local: torch.Tensor) -> torch.Tensor:
        """Return a copy of a DTensor's local tensor, zero-padded to ``padded_shape``."""
        padded, rows = local.new_zeros(self.padded_shape), self.rows_first(local)
        padded[: rows.shape[0]] = rows
        return padded

    def shared_shard(self, local: torch.Tensor) -> torch.Tensor | None:
        """Return a padded shard in the memory of a DTensor's local tensor, or None if impossible.

        The memory grows in place if it lacks room for padding: other tensors in it stay valid.
        """
        rows = self.rows_first(local)
        if self.rows is None or self.rows % self.groups.num_shards == 0:  # no rank needs padding
            return rows if rows.shape == self.padded_shape and rows.is_contiguous() else None
        if rows.shape != (self.num_local_rows, *self.padded_shape[1:]) or not rows.is_contiguous():
            return None
        # All ranks must share memory, or none: these conditions hold on all for like tensors. Other
        # data might follow a tensor that is neither alone in its storage nor the view of a shard.
        storage, row_size = local.untyped_storage(), self.padded_shape[1:].numel()
        own, needed = rows.numel() * rows.itemsize, self.padded_shape.numel() * rows.itemsize
        is_alone = rows.storage_offset() == 0 and storage.nbytes() in (own, needed)
        # A single row is contiguous even if it is a column in memory.
        if not is_alone or rows.stride(0) != row_size or not storage.resizable():
            return None
        stride = (row_size, *rows.stride()[1:])
        grows = storage.nbytes() < needed
        if grows:
            storage.resize_(needed)
        padded = rows.as_strided(self.padded_shape, stride)
        if grows:
            padded.data[rows.shape[0] :] = 0  # .data: autograd must not see a change of the rows
        return padded

    def local_view(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the view of a padded shard that is its DTensor's local tensor."""
        return padded if self.rows is None else self.in_place(padded[: self.num_local_rows])

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def in_place(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a view of ``rows`` with its first dimension moved back to ``dim``."""
        return rows.movedim(0, self.dim) if self.dim else rows

    def dtensor(self, padded: torch.Tensor) -> DTensor:
        """Return a DTensor of the full shape whose local tensor is a view of ``padded``."""
        return dtensor_of(self.local_view(padded), self.mesh, self.placements, self.shape)

    # --- markers, for graphs and for eager parts of a model ---

    def marker(self, shard: Any, **accumulators: Any) -> UnshardSpec | ReplicateSpec:
        """Return the marker that reads the parameter.

        Args:
            shard: tensor, name of a module attribute, or None to use only the marker's reductions.
            accumulators: stand-ins or keys of accumulators, or names of module attributes that hold
                them: see [Note: unreduced gradients] in ``sharded_param``.
        """
        if self.rows is None:
            return ReplicateSpec(
                param=shard,
                group=self.groups.data_ranks,
                dtype=self.dtype,
                reduce_dtype=self.reduce_dtype,
                **accumulators,
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
            **accumulators,
        )

    def unshard(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather the unsharded tensor from a shard of ``padded_shape``, eagerly."""
        return self.marker(shard).call(run)

    def reduce(
        self, grad: torch.Tensor, result_dtype: torch.dtype, partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Average ``grad`` over all ranks of ``groups.mesh`` to this rank's padded shard, eagerly.

        ``partial`` is the key of an accumulator whose total is added, as in ``ReduceGradSpec``.
        """
        marker: Any = self.marker(None)
        reduction = marker.reduction(grad, self.padded_shape, result_dtype, partial)
        return reduction.call(run)

    def reduce_to_partial(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce ``grad`` to this rank's padded shard of its mean over the shard group, eagerly.

        Replicas are not averaged. The result has the dtype of the reduction.
        """
        marker = self.marker(None)
        assert isinstance(marker, UnshardSpec), "a replicated parameter has no shards to reduce to"
        return marker.partial_reduction(grad, self.padded_shape).call(run)

    def average_over_replicas(
        self, partial: torch.Tensor, result_dtype: torch.dtype
    ) -> torch.Tensor:
        """Average a partially reduced shard over replicas, eagerly."""
        assert self.groups.replicas is not None
        marker = AllReduceGradSpec(
            grad=partial, group=self.groups.replicas, result_dtype=result_dtype
        )
        return to_host_memory(marker.call(run), self.host_memory)
