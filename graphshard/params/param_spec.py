"""How a parameter is split over a mesh and gathered, and how its gradient is reduced.

    options, fp8 recipe, mesh ─► ParamSpec ─► the parameter's shard and DTensor
                                           ─► the arguments of its marker in every graph

Rows are split like ``torch.chunk`` does, and padded to the same number on every rank: see
[Note: padded shards] in ``graphshard.ops.markers``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch.dtensor import dtensor_of
from ..ops.groups import padded_rows, rows_of_rank
from ..ops.host_copy import to_host_memory
from ..ops.marker_specs import AllReduceGradSpec, ReplicateSpec, UnshardSpec
from ..ops.nodes import run
from .mesh import MeshGroups


@dataclass(frozen=True)
class ParamSpec:
    """How a parameter is split, gathered and used, and how its gradient is reduced.

    Attributes:
        shape: full shape, ``[rows, ...]``.
        fqn: first name at the time of sharding, used in messages.
        num_backward_ranks: number of ranks that backward gathers from; None keeps the parameter
            unsharded between forward and backward.
        dtype: dtype of the gathered parameter, or None for the dtype of its shard.
        reduce_dtype: dtype of the gradient reduction, or None for the gradient's dtype.
        float8_recipe: fp8 recipe of the linears that use the parameter, or None.
        shard: whether to split the parameter instead of replicating it.
        host_memory: kind of host memory that holds shards, ``PINNED`` or ``PAGEABLE`` of
            ``graphshard.ops.host_copy``, or None for device memory.
        rows: number of rows that are split, or None if the parameter is replicated.
    """

    shape: torch.Size
    groups: MeshGroups
    fqn: str = ""
    num_backward_ranks: int | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    float8_recipe: str | None = None
    shard: bool = True
    host_memory: str | None = None
    rows: int | None = field(init=False)

    def __post_init__(self) -> None:
        # Scalars and empty parameters have no rows to split.
        splittable = self.shard and len(self.shape) > 0 and self.shape.numel() > 0
        object.__setattr__(self, "rows", self.shape[0] if splittable else None)
        object.__setattr__(self, "host_memory", self.host_memory if splittable else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamSpec:
        return self

    @property
    def mesh(self) -> DeviceMesh:
        return self.groups.mesh

    @functools.cached_property
    def regather_group(self) -> str | None:
        """Group that backward gathers from, or None; the first read may be a collective."""
        ranks = self.num_backward_ranks
        return None if ranks is None else self.groups.regather_group(ranks)

    def group_names(self) -> set[str]:
        groups = self.groups  # all that its markers may use
        names = (groups.shards, groups.replicas, groups.all_ranks, self.regather_group)
        return {name for name in names if name is not None}

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        last = Replicate() if self.rows is None else Shard(0)
        return (*[Replicate()] * (self.mesh.ndim - 1), last)

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        """Shape of the shard on every rank, ``[ceil(rows / num_shards), ...]``."""
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
        return self.local_rows.stop - self.local_rows.start

    # --- conversions of full tensors, padded shards and DTensors ---

    def padded_shard(self, full: torch.Tensor) -> torch.Tensor:
        """Copy this rank's rows of ``full`` to a padded shard, in host memory if offloaded."""
        if self.rows is None:
            stays = full.device.type in ("meta", self.mesh.device_type)
            device = full.device if stays else self.groups.device
            return full.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        return to_host_memory(self.padded(full.detach()[self.local_rows]), self.host_memory)

    def padded(self, local: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's rows, zero-padded to ``padded_shape``."""
        padded = local.new_zeros(self.padded_shape)
        padded[: local.shape[0]] = local
        return padded

    def local_view(self, padded: torch.Tensor) -> torch.Tensor:
        return padded if self.rows is None else padded[: self.num_local_rows]

    def dtensor(self, padded: torch.Tensor) -> DTensor:
        """Return a DTensor of the full shape whose local tensor is a view of ``padded``."""
        return dtensor_of(self.local_view(padded), self.mesh, self.placements, self.shape)

    # --- markers, for graphs and for eager parts of a model ---

    def marker(self, shard: Any, **accumulators: Any) -> UnshardSpec | ReplicateSpec:
        """Return the marker that unshards ``shard``."""
        # ``shard`` is unused unless the marker is called. The accumulators are stand-ins or keys:
        # see [Note: unreduced gradients] in sharded_param.
        if self.rows is None:
            return ReplicateSpec(
                param=shard,
                group=self.groups.all_ranks,
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
        """Gather the full parameter from a shard of ``padded_shape``, eagerly."""
        full: torch.Tensor = self.marker(shard).call(run)
        return full

    def reduce(
        self, grad: torch.Tensor, result_dtype: torch.dtype, partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduce full gradients to this rank's padded shard of their mean, eagerly."""
        marker: Any = self.marker(None)
        # partial is the key of an accumulator: see ReduceGradSpec.
        shard: torch.Tensor = marker.reduction(grad, self.padded_shape, result_dtype, partial).call(
            run
        )
        return shard

    def reduce_to_partial(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce full gradients within each replica to a shard in the reduction dtype, eagerly."""
        marker = self.marker(None)
        assert isinstance(marker, UnshardSpec), "a replicated parameter has no shards to reduce to"
        shard: torch.Tensor = marker.partial_reduction(grad, self.padded_shape).call(run)
        return shard

    def average_over_replicas(
        self, partial: torch.Tensor, result_dtype: torch.dtype
    ) -> torch.Tensor:
        """Average over replicas a shard that each replica has reduced, eagerly."""
        assert self.groups.replicas is not None
        marker = AllReduceGradSpec(
            grad=partial, group=self.groups.replicas, result_dtype=result_dtype
        )
        return to_host_memory(marker.call(run), self.host_memory)


# --- memory that padding takes -------------------------------------------------------------------
# All shards are padded to the size of the largest. If 8 experts are stacked in one parameter, each
# of 64 ranks holds the memory of one expert: 8 times an even share.

# Fraction of an even share, and bytes per rank, above which padding is reported. Chosen by
# judgement, not measured.
NOTABLE, LEAST_BYTES = 0.1, 1e6


@dataclass(frozen=True)
class Padding:
    """Memory that padding costs a model.

    Attributes:
        names: parameters with fewer rows than shards, largest first.
        rows: number of rows of the largest one.
        held_bytes: parameter bytes on a rank, including padding.
        even_bytes: parameter bytes on a rank if split evenly.
    """

    names: tuple[str, ...]
    rows: int
    shards: int
    held_bytes: float
    even_bytes: float

    def __str__(self) -> str:
        first, others = self.names[0], len(self.names) - 1
        who = f"{first} has" if not others else f"{first} and {others} more parameters have"
        return (
            f"{who} fewer rows ({self.rows}) than the {self.shards} ranks that share them: a rank "
            f"holds {self.held_bytes / 1e6:,.0f} MB of parameters, "
            f"{self.held_bytes / self.even_bytes:.3g} times the even share of "
            f"{self.even_bytes / 1e6:,.0f} MB"
        )

    def splits_evenly(self, num_ranks: int) -> bool:
        """Return whether HSDP with ``rows`` shards per replica would avoid this padding."""
        return self.rows > 1 and num_ranks % self.rows == 0


def find_padding(
    shapes: Mapping[str, Sequence[int]], shards: int, held_bytes: float, full_bytes: float
) -> Padding | None:
    """Return the padding of a model, or None if it takes little memory.

    Args:
        shapes: full shapes of the parameters that are split by rows, keyed by name.
        held_bytes: bytes of their shards on a rank, including padding.
        full_bytes: bytes of the full parameters.
    """
    padded = {name: shape for name, shape in shapes.items() if 0 < shape[0] < shards}
    even_bytes = full_bytes / shards
    if not padded or held_bytes - even_bytes < max(NOTABLE * even_bytes, LEAST_BYTES):
        return None
    names = sorted(padded, key=lambda name: math.prod(padded[name]), reverse=True)
    return Padding(tuple(names), padded[names[0]][0], shards, held_bytes, even_bytes)


def padding_advice(itemsizes: Mapping[ParamSpec, int]) -> str:
    """Return a description of notable padding with a remedy, or "" if padding takes little."""
    # The keys are the parameters of one model on one mesh.
    split = {spec: itemsize for spec, itemsize in itemsizes.items() if spec.rows is not None}
    if not split:
        return ""
    held_bytes = sum(itemsize * spec.padded_shape.numel() for spec, itemsize in split.items())
    full_bytes = sum(itemsize * spec.shape.numel() for spec, itemsize in split.items())
    groups = next(iter(split)).groups
    shapes = {spec.fqn: spec.shape for spec in split}
    padding = find_padding(shapes, groups.num_shards, held_bytes, full_bytes)
    return "" if padding is None else f"{padding}. {_remedy(padding, groups.mesh.size())}"


def _remedy(padding: Padding, num_ranks: int) -> str:
    if padding.rows == 1:
        overrides = {padding.names[0]: {"shard": False}}
        return f"With overrides={overrides}, a rank holds no more, and gathers nothing"
    evenly = "One parameter per row, as in nn.ParameterList, would be split evenly"
    if not padding.splits_evenly(num_ranks):
        return evenly
    shape = (num_ranks // padding.rows, padding.rows)
    return (
        f"{evenly}; on a mesh of {shape}, i.e. HSDP over {padding.rows} ranks, a rank holds no "
        "more, and no padding is sent"
    )
