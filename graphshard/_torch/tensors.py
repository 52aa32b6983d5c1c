"""Fake tensors, symbolic sizes, operators' schemas, and kernels for lists of tensors.

Read in torch/_subclasses/fake_tensor.py, torch/fx/experimental/symbolic_shapes.py and
torch/_ops.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
]


def fake_mode_of(values: Iterable[object]) -> FakeTensorMode:
    """Return the mode of the first fake tensor in ``values``, or in containers among them.

    Raises:
        ValueError: there is none.
    """
    leaves = (leaf for value in values for leaf in tree_leaves(value))
    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    raise ValueError(
        "no node of a graph has a fake tensor for its value, as AOTAutograd leaves it in "
        'meta["val"]: nothing tells how the graph was traced. Hand over the graph as it was traced'
    )


def new_fake_mode() -> FakeTensorMode:
    """Return a mode in which operators may also take tensors that are real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fake_mode(value: torch.Tensor) -> Iterator[None]:
    """Run calls in the mode of the fake tensor ``value``, and log no errors that they raise."""
    log = logging.getLogger(FakeTensor.__module__)
    log.addFilter(_reject)
    try:
        with fake_mode_of([value]):
            yield
    finally:
        log.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return False


def traced_storage(node: fx.Node) -> int | None:
    """Return a number for the memory of a node's value while Dynamo traced; equal for aliases.

    None: the value is no tensor.
    """
    value = traced_value(node)
    return storage_of(value) if isinstance(value, FakeTensor) else None


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a strided tensor, real or not; equal for aliases."""
    return tensor.untyped_storage()._cdata


def traced_value(node: fx.Node) -> object:
    """Return the value that a node had while Dynamo traced, which it keeps as ``example_value``;
    of a tensor in a ``torch.func`` transform, the tensor that it wraps."""
    value = node.meta.get("example_value")
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    ):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def base_name(op: object) -> str:
    """Return the name of an operator: "mm" of ``aten.mm.out``; "" of one of a higher order."""
    return op.name().partition("::")[2].partition(".")[0] if isinstance(op, OpOverload) else ""


def returns_nothing(op: object) -> bool:
    """Return whether an operator has no outputs; False of one of a higher order."""
    return isinstance(op, OpOverload) and not op._schema.returns


def writes_arguments(op: object) -> bool:
    """Return whether an operator changes one of its arguments in place."""
    return isinstance(op, OpOverload) and op._schema.is_mutable


def argument_names(op: object) -> list[str]:
    """Return the names of an operator's arguments, in the order of its schema."""
    assert isinstance(op, OpOverload), f"{op} has no schema"
    return [argument.name for argument in op._schema.arguments]


def size_hint(size: int | torch.SymInt, fallback: int = 4096) -> int:
    """Return the value that a size, or an expression of sizes, had in tracing; adds no guard.

    Args:
        fallback: the value of a size that only data determines.
    """
    names = ("optimization_hint", "size_hint")  # 2.13, 2.11
    ask = next(getattr(symbolic_shapes, name) for name in names if hasattr(symbolic_shapes, name))
    return int(ask(size, fallback))


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy and cast each source into its target: on a GPU by one kernel for each pair of dtypes,
    if all are dense (aten/src/ATen/native/cuda/ForeachBinaryOpList.cu)."""
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    by_dtypes = {}
    for target, source in zip(targets, sources, strict=True):
        alike = by_dtypes.setdefault((target.dtype, source.dtype), ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for lists in by_dtypes.values():
        torch._foreach_copy_(*lists)


def chunk_cat_is_one_kernel(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Return whether `chunk_cat_` is one kernel for these dtypes and devices.

    Read in aten/src/ATen/native/cuda/TensorShape.cu; a CPU makes padded copies first.
    """
    dtypes = {source.dtype for source in sources}
    casts = dtypes == {torch.bfloat16} and target.dtype == torch.float32
    return target.device.type == "cuda" and (dtypes == {target.dtype} or casts)


def chunk_cat_(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Pad the rows of each source to a multiple of the rows of ``target``, and pack them.

    Row ``i`` of ``target`` gets the ``i``-th part of every source, one behind the other.
    """
    # The kernel takes what is dense for contiguous.
    torch._chunk_cat([s.contiguous() for s in sources], 0, target.shape[0], out=target)


def foreach_max_abs(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value of each tensor, as ``[tensors]``."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))
