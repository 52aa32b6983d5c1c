"""The arguments of every marker op, by name: the only place that knows their order and their types.

The fields of a spec are the arguments of its op. The op's schema is made of them, and so are the
arguments of a call; implementations read what they are given back into a spec:

    schema            UnshardSpec.schema()    "unshard(Tensor shard, int rows, ..) -> Tensor"
    call              UnshardSpec(shard=.., rows=..).call(run)
    implementation    def _unshard(*args): spec = UnshardSpec(*args)
    node of a graph   UnshardSpec.of_node(node)

Tensors in a spec are real ones, fake ones, or nodes of a graph. Process groups are given by name.
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
from .accumulators import PARTIAL, UNSYNCED
from .emitter import Call
from .library import operator_named
from .nodes import Value, Values

_SCHEMA_TYPES: dict[object, str] = {
    Value: "Tensor",
    Value | None: "Tensor?",
    Values | None: "Tensor[]?",
    int: "int",
    str: "str",
    str | None: "str?",
    torch.dtype | None: "ScalarType?",
    torch.device: "Device",
    torch.device | None: "Device?",
}


@dataclass(frozen=True, eq=False)
class MarkerSpec:
    """The arguments of one marker op.

    Attributes:
        name: of the op.
        accumulators: names of the last arguments: what gradients of microbatches add up in.
    """

    name: ClassVar[str]
    accumulators: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def op(cls) -> OpOverload:
        return operator_named(cls.name)

    @classmethod
    def schema(cls) -> str:
        """The op's definition, in the language of ``torch.library``."""
        types = get_type_hints(cls)
        arguments = [f"{_SCHEMA_TYPES[types[name]]} {name}" for name in cls.argument_names()]
        return f"{cls.name}({', '.join(arguments)}) -> Tensor"

    @classmethod
    @functools.cache  # asked for in every call
    def argument_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def of_node(cls, node: fx.Node) -> Self:
        """Read the arguments of a call in a graph."""
        assert node.target is cls.op(), f"{node.name} is no {cls.name}"
        return cls(*node.args)

    @classmethod
    def gradients(cls, **gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The result of the op's backward, from the gradients of some arguments."""
        assert gradients.keys() <= {*cls.argument_names()}
        return tuple(gradients.get(name) for name in cls.argument_names())

    def arguments(self) -> tuple[Argument, ...]:
        """The arguments in the order of the schema."""
        return tuple(getattr(self, name) for name in self.argument_names())

    def constants(self) -> tuple[Any, ...]:
        """The arguments between first tensor and accumulators; hashable if ``scales`` is None."""
        return self.arguments()[1 : len(self.argument_names()) - len(self.accumulators)]

    def call(self, call: Call) -> Any:
        """Run the op, or insert it into a graph."""
        return call(self.op(), *self.arguments())


@dataclass(frozen=True, eq=False)
class UnshardSpec(MarkerSpec):
    """The full parameter of a padded shard.

    Attributes:
        shard: ``[ceil(rows / world), ...]``, padded.
        rows: number of rows of the full parameter.
        group: the ranks that hold the shards.
        regather_group: the ranks from which backward gathers again: ``group`` (ZeRO-3), some of
            them (ZeRO++'s hpZ); None: the full parameter is kept for backward (ZeRO-2).
        replica_group: the ranks that hold the same shard, over which reduced gradients are averaged
            once more (HSDP); None: there are no others.
        dtype: as which the parameter travels and is used; None: its own.
        reduce_dtype: as which its gradient is reduced; None: that of the gradient.
        float8_recipe: how linears are to use it in fp8; None: they do not.
        scales: of several parameters; with them, the parameter travels in fp8.
        scale_index: position of the parameter's own scale in ``scales``.
        device: where to copy the shard before it is gathered; None: it is there.
        host_memory: the host's memory that keeps the shard (``graphshard.ops.host_copy``); None:
            the device keeps it.
        unsynced: a stand-in that full gradients add up in, or the key of an accumulator.
        partial: a stand-in that reduced shards add up in, or the key of an accumulator.
    """

    name: ClassVar[str] = "unshard"
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
    device: torch.device | None = None
    host_memory: str | None = None
    unsynced: Value | None = None
    partial: Value | None = None


@dataclass(frozen=True, eq=False)
class ReduceGradSpec(MarkerSpec):
    """This rank's padded shard of the mean of all ranks' gradients.

    Attributes:
        grad: full, ``[rows, ...]``.
        padded_rows: number of rows of the shard.
        replica_group: as of ``UnshardSpec``.
        partial: key of an accumulator, whose total is added before the mean over replicas.
        result_dtype: that of the shard; None: that of ``grad``.
        host_memory: where to copy the shard; None: it stays on the device.
    """

    name: ClassVar[str] = "reduce_grad"

    grad: Value
    padded_rows: int
    group: str
    replica_group: str | None = None
    partial: Value | None = None
    reduce_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None
    host_memory: str | None = None


@dataclass(frozen=True, eq=False)
class ReplicateSpec(MarkerSpec):
    """A parameter that every rank holds; attributes as of ``UnshardSpec``."""

    name: ClassVar[str] = "replicate"
    accumulators: ClassVar[tuple[str, ...]] = (UNSYNCED,)

    param: Value
    group: str
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    unsynced: Value | None = None


@dataclass(frozen=True, eq=False)
class AllReduceGradSpec(MarkerSpec):
    """The mean of all ranks' gradients; attributes as of ``ReduceGradSpec``."""

    name: ClassVar[str] = "all_reduce_grad"

    grad: Value
    group: str
    reduce_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class MaxOverRanksSpec(MarkerSpec):
    """The largest of all ranks' values, element by element."""

    name: ClassVar[str] = "max_over_ranks"

    amax: Value
    group: str


@dataclass(frozen=True, eq=False)
class OffloadSpec(MarkerSpec):
    """An activation, copied to that memory of the host until backward."""

    name: ClassVar[str] = "offload_activation"

    activation: Value
    host_memory: str


@dataclass(frozen=True, eq=False)
class ReloadSpec(MarkerSpec):
    """An offloaded activation, copied back to ``device``."""

    name: ClassVar[str] = "reload_activation"

    offloaded: Value
    device: torch.device
