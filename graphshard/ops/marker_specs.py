"""The arguments of the marker ops (except ``secondary_shard``), with their order and types.

The fields of a spec are the arguments of its op. They define the op's schema and the arguments of a
call; implementations and passes read arguments back into a spec:

    schema            UnshardSpec.schema()    "unshard(Tensor shard, int rows, ..) -> Tensor"
    call              UnshardSpec(shard=.., rows=..).call(run)
    implementation    UnshardSpec(*args)
    node of a graph   UnshardSpec.of_node(node)

Tensors in a spec are real tensors, fake tensors or graph nodes. Process groups are given by name.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import fx
from torch.fx.node import Argument

from .._torch.tensors import OpOverload
from ..kinds import TransferKind
from .accumulators import PARTIAL, UNSYNCED
from .collectives import CollectiveInput
from .float8_math import E4M3
from .groups import uses_all_to_all
from .library import operator_named
from .nodes import Call, Value, Values, value_of

_SCHEMA_TYPES: dict[object, str] = {
    Value: "Tensor",
    Value | None: "Tensor?",
    Values | None: "Tensor[]?",
    int: "int",
    int | None: "int?",
    bool: "bool",
    str: "str",
    str | None: "str?",
    torch.dtype | None: "ScalarType?",
    torch.device: "Device",
    torch.device | None: "Device?",
}


def used_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return ``param``'s dtype after a cast to ``dtype``; as in FSDP2, only floats are cast."""
    return dtype if dtype is not None and param.is_floating_point() else param.dtype


@dataclass(frozen=True, eq=False)
class MarkerSpec:
    """The arguments of one marker op."""

    name: ClassVar[str]
    kind: ClassVar[TransferKind | None] = None  # the transfer that the marker stands for
    # Names of the last arguments: accumulators for gradients of microbatches.
    accumulators: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def op(cls) -> OpOverload:
        return operator_named(cls.name)

    @classmethod
    def schema(cls) -> str:
        types = get_type_hints(cls)
        arguments = [
            f"{_SCHEMA_TYPES[types[field.name]]} {field.name}"
            + ("" if field.default is dataclasses.MISSING else f"={field.default}")
            for field in dataclasses.fields(cls)
        ]
        return f"{cls.name}({', '.join(arguments)}) -> Tensor"

    @classmethod
    @functools.cache  # every call of a marker op needs the names
    def argument_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def of_node(cls, node: fx.Node) -> Self:
        assert node.target is cls.op(), f"{node.name} is not a call of {cls.name}"
        return cls(*node.args)

    @classmethod
    def gradients(cls, **gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the result of the op's backward: a gradient or None for each argument."""
        assert gradients.keys() <= {*cls.argument_names()}
        return tuple(gradients.get(name) for name in cls.argument_names())

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of a call, without those at the end that have their defaults."""
        fields = dataclasses.fields(self)
        num_given = len(fields)
        while getattr(self, fields[num_given - 1].name) is fields[num_given - 1].default:
            num_given -= 1
        return tuple(getattr(self, field.name) for field in fields[:num_given])

    def call(self, call: Call) -> Any:
        return call(self.op(), *self.arguments())

    def collective_input(self) -> CollectiveInput:
        raise AssertionError(f"{self.name} has no collective")


@dataclass(frozen=True)
class UnshardSpec(MarkerSpec):
    """Arguments of ``unshard``, which gathers a full parameter from padded shards.

    Attributes:
        shard: padded shard, ``[ceil(rows / world), ...]``.
        rows: number of rows of the full parameter.
        group: group of the ranks that hold the shards.
        regather_group: group in which backward gathers again: ``group`` (ZeRO-3) or a part of it
            (ZeRO++'s hpZ). None keeps the full parameter for backward (ZeRO-2).
        replica_group: group of ranks with the same shard, over which reduced gradients are also
            averaged (HSDP), or None.
        dtype: dtype of the gathered parameter, or None for the dtype of its shard; only floats are
            cast.
        reduce_dtype: dtype of the gradient reduction, or None for the gradient's dtype.
        float8_recipe: fp8 recipe of linears that use the parameter, or None.
        scales: scales of several parameters, or None if the parameter is not gathered in fp8.
        scale_index: position of this parameter's scale in ``scales``.
        block_dim: dimension of the blocks of a parameter that is gathered in mxfp8, as uint8 (see
            ``ops.mx_math.packed``), or None.
        device: device that the shard is copied to before the gather, or None if already there.
        host_memory: kind of host memory that holds the shard (``ops.host_copy``), or None.
        unsynced: accumulator of full gradients, as a stand-in or a key (``ops.markers``), or None.
        partial: accumulator of reduced shards, as a stand-in or a key, or None.
    """

    name: ClassVar[str] = "unshard"
    kind: ClassVar[TransferKind | None] = TransferKind.ALL_GATHER
    accumulators: ClassVar[tuple[str, ...]] = (UNSYNCED, PARTIAL)

    shard: Value
    rows: int
    group: str
    regather_group: str | None = None
    replica_group: str | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    float8_recipe: str | None = None
    scales: Values | None = None
    scale_index: int = 0
    block_dim: int | None = None
    device: torch.device | None = None
    host_memory: str | None = None
    unsynced: Value | None = None
    partial: Value | None = None

    def collective_input(self) -> CollectiveInput:
        used = used_dtype(value_of(self.shard), self.dtype)
        wire_dtype = used if self.scales is None else E4M3
        return CollectiveInput(
            source=self.shard,
            rows=self.rows,
            wire_dtype=wire_dtype if self.block_dim is None else torch.uint8,
            result_dtype=used,
            scales=self.scales,
            scale_index=self.scale_index,
            block_dim=self.block_dim,
        )

    def reduction(
        self,
        grad: torch.Tensor,
        padded_shape: torch.Size,
        result_dtype: torch.dtype,
        partial: Value | None = None,
    ) -> ReduceGradSpec:
        """Return the marker that reduces this parameter's gradient.

        Args:
            padded_shape: shape of this rank's shard, including padding.
            result_dtype: dtype of the shard's gradient.
        """
        return ReduceGradSpec(
            grad=grad,
            padded_rows=padded_shape[0],
            group=self.group,
            replica_group=self.replica_group,
            partial=partial,
            reduce_dtype=self.reduce_dtype,
            result_dtype=result_dtype,
            host_memory=self.host_memory,
        )

    def partial_reduction(self, grad: torch.Tensor, padded_shape: torch.Size) -> ReduceGradSpec:
        """Return the marker that reduces this parameter's gradient only over the shard group.

        The result has the dtype of the reduction.
        """
        whole = self.reduction(grad, padded_shape, used_dtype(grad, self.reduce_dtype))
        return dataclasses.replace(whole, replica_group=None, host_memory=None)


@dataclass(frozen=True, eq=False)
class ReduceGradSpec(MarkerSpec):
    """Arguments of ``reduce_grad``, which returns this rank's padded shard of the mean gradient.

    ``group``, ``replica_group`` and ``reduce_dtype`` are as in ``UnshardSpec``.

    Attributes:
        grad: full gradient, ``[rows, ...]``.
        padded_rows: number of rows of the shard, including padding: ``ceil(rows / world)``.
        partial: key of an accumulator whose total is added before the mean over replicas, or None.
        result_dtype: dtype of the shard, or None for the dtype of ``grad``.
        host_memory: kind of host memory that the shard is copied to, or None for no copy.
    """

    name: ClassVar[str] = "reduce_grad"
    kind: ClassVar[TransferKind | None] = TransferKind.REDUCE_SCATTER

    grad: Value
    padded_rows: int
    group: str
    replica_group: str | None = None
    partial: Value | None = None
    reduce_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None
    host_memory: str | None = None

    @property
    def exchange_dtype(self) -> torch.dtype | None:
        """Narrower dtype to send if the planner chooses an exchange of rows, or None.

        None if there is no choice: an exchange saves no bytes, or the group always exchanges.
        """
        always = uses_all_to_all(self.group, used_dtype(value_of(self.grad), self.reduce_dtype))
        return value_of(self.grad).dtype if self._is_narrow and not always else None

    @property
    def _is_narrow(self) -> bool:
        grad = value_of(self.grad)
        # Not fp8, which gloo cannot send.
        return 1 < grad.dtype.itemsize < used_dtype(grad, self.reduce_dtype).itemsize

    def collective_input(self, *, exchanges: bool = False) -> CollectiveInput:
        """Return the input of the collective that replaces this marker.

        Args:
            exchanges: whether to exchange rows, which each rank then sums, even if the backend does
                not require it.
        """
        grad = value_of(self.grad)
        reduced = used_dtype(grad, self.reduce_dtype)
        exchanges = exchanges or uses_all_to_all(self.group, reduced)
        return CollectiveInput(
            source=self.grad,
            rows=self.padded_rows,
            # In an exchange, rows are cast to a wider dtype only when their receiver sums them.
            wire_dtype=grad.dtype if exchanges and self._is_narrow else reduced,
            result_dtype=self.result_dtype or grad.dtype,
            partial=self.partial,
            summed_in=reduced if exchanges else None,
        )


@dataclass(frozen=True)
class ReplicateSpec(MarkerSpec):
    """Arguments of ``replicate``, for a parameter that every rank holds; see ``UnshardSpec``."""

    name: ClassVar[str] = "replicate"
    accumulators: ClassVar[tuple[str, ...]] = (UNSYNCED,)

    param: Value
    group: str
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    unsynced: Value | None = None

    def reduction(
        self,
        grad: torch.Tensor,
        padded_shape: torch.Size,
        result_dtype: torch.dtype,
        partial: None = None,  # only shards have partial reductions
    ) -> AllReduceGradSpec:
        return AllReduceGradSpec(
            grad=grad, group=self.group, reduce_dtype=self.reduce_dtype, result_dtype=result_dtype
        )


@dataclass(frozen=True, eq=False)
class AllReduceGradSpec(MarkerSpec):
    """Arguments of ``all_reduce_grad``, which returns the mean gradient; see ``ReduceGradSpec``."""

    name: ClassVar[str] = "all_reduce_grad"
    kind: ClassVar[TransferKind | None] = TransferKind.ALL_REDUCE

    grad: Value
    group: str
    reduce_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None

    def collective_input(self) -> CollectiveInput:
        grad = value_of(self.grad)
        dtype = used_dtype(grad, self.reduce_dtype)
        return CollectiveInput(
            source=self.grad,
            rows=0,
            # Some backends can only sum in an all-reduce, and a sum of float16 may overflow.
            wire_dtype=torch.float32 if dtype == torch.float16 else dtype,
            result_dtype=self.result_dtype or grad.dtype,
        )


@dataclass(frozen=True, eq=False)
class MaxOverRanksSpec(MarkerSpec):
    """Arguments of ``max_over_ranks``, which returns the elementwise maximum over a group."""

    name: ClassVar[str] = "max_over_ranks"
    kind: ClassVar[TransferKind | None] = TransferKind.ALL_REDUCE_MAX

    amax: Value
    group: str

    def collective_input(self) -> CollectiveInput:
        dtype = value_of(self.amax).dtype
        return CollectiveInput(source=self.amax, rows=0, wire_dtype=dtype, result_dtype=dtype)


@dataclass(frozen=True, eq=False)
class OffloadSpec(MarkerSpec):
    """Arguments of ``offload_activation``, which copies an activation to host memory."""

    name: ClassVar[str] = "offload_activation"
    kind: ClassVar[TransferKind | None] = TransferKind.COPY_TO_HOST

    activation: Value
    host_memory: str


@dataclass(frozen=True, eq=False)
class ReloadSpec(MarkerSpec):
    """Arguments of ``reload_activation``, which copies an offloaded activation to ``device``."""

    name: ClassVar[str] = "reload_activation"
    kind: ClassVar[TransferKind | None] = TransferKind.COPY_TO_DEVICE

    offloaded: Value
    device: torch.device
