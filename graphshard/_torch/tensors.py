"""Fake tensors, symbolic sizes, operator schemas and foreach kernels.

Relies on its imports, on ``torch._C._functorch``, and on ForeachBinaryOpList.cu and TensorShape.cu
in aten/src/ATen/native/cuda.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.fx.experimental import symbolic_shapes
from torch.jit._builtins import _find_builtin
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from .dtensor import local_tensor

__all__ = [
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
]


def fake_mode_of(values: Iterable[object]) -> FakeTensorMode:
    """Return the mode of the first fake tensor in ``values``, including nested containers.

    Raises:
        ValueError: ``values`` contains no fake tensor.
    """
    leaves = (leaf for value in values for leaf in tree_leaves(value))
    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    raise ValueError(
        'no node of the graph has a fake tensor in meta["val"], so its shapes are unknown. Pass a '
        "graph traced by AOTAutograd"
    )


def new_fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_torch_function() -> AbstractContextManager[object]:
    """Bypass the ``__torch_function__`` of subclasses and of active modes."""
    return torch._C.DisableTorchFunction()


def quiet_fake_tensors() -> AbstractContextManager[object]:
    """Suppress the log of errors that operators raise on fake tensors."""
    return mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", True)


def traced_storage(node: fx.Node) -> int | None:
    """Return the storage ID of a node's traced value, or None if it holds no fake tensor."""
    value = traced_value(node)
    if isinstance(value, DTensor):
        value = local_tensor(value)
    return storage_of(value) if isinstance(value, FakeTensor) else None


def storage_of(tensor: torch.Tensor) -> int:
    """Return an ID of the storage of a strided tensor, real or fake; aliases share it."""
    return tensor.untyped_storage()._cdata


def on_storage(value: FakeTensor, storages: dict[int, torch.UntypedStorage]) -> FakeTensor:
    """Return a fake tensor like ``value`` on another storage.

    Args:
        storages: new storages, keyed by the ID of the old one. If there is none for ``value``, a
            storage of the same size is added.
    """
    storage = value.untyped_storage()
    with no_dispatch():
        if storage._cdata not in storages:
            # Not ``UntypedStorage(num_bytes)``, which would make a symbolic size a constant.
            like = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            storages[storage._cdata] = like.untyped_storage()
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
        torch._C._set_conj(meta, value.is_conj())
        torch._C._set_neg(meta, value.is_neg())
        return FakeTensor(value.fake_mode, meta, value.fake_device)


def has_known_sizes(value: torch.Tensor) -> bool:
    """Return whether a tensor is strided with known sizes, strides and offset."""
    if value.layout is not torch.strided:
        return False
    return all(map(is_known, (*value.shape, *value.stride(), value.storage_offset())))


def has_lazy_bits(value: object) -> bool:
    """Return whether a value contains a tensor whose conjugation or negation is only a flag."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)


def is_known(size: int | torch.SymInt | torch.SymBool) -> bool:
    """Return whether a size or condition is a constant, or depends only on backed symbols."""
    return isinstance(size, int) or not symbolic_shapes.free_unbacked_symbols(size)


def is_mutated(value: FakeTensor) -> bool:
    """Return whether an operator has written to a fake tensor, or to any view of it."""
    return value._version > 0


def traced_value(node: fx.Node) -> object:
    """Return the example value that Dynamo recorded for a node, or None."""
    value = node.meta.get("example_value")
    # If ``torch.func`` transforms wrap the value, take the innermost tensor.
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    ):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def base_name(op: object) -> str:
    """Return an operator's bare name ("mm" for ``aten.mm.out``); "" for higher-order operators."""
    return op.name().partition("::")[2].partition(".")[0] if isinstance(op, OpOverload) else ""


def returns_nothing(op: object) -> bool:
    """Return whether an operator has no outputs; higher-order operators count as having some."""
    return isinstance(op, OpOverload) and not op._schema.returns


def writes_arguments(op: object) -> bool:
    return isinstance(op, OpOverload) and op._schema.is_mutable


def norms(
    tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor, computed in ``dtype`` by one foreach call."""
    return torch._foreach_norm(tensors, norm_type, dtype=dtype)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a function called by ``node`` writes to, by its operator's schema.

    Includes tensors in lists. The function may be an operator or a function of the torch module
    that calls one, such as ``torch._foreach_mul_``; others are ignored.
    """
    written: list[fx.Node] = []
    for position, name in _written_by(node.target) if node.op == "call_function" else ():
        value = node.kwargs.get(name)
        if position is not None and position < len(node.args):
            value = node.args[position]
        fx.map_arg(value, written.append)
    return written


def _written_by(function: object) -> tuple[tuple[int | None, str], ...]:
    """Return the positions and names of arguments that any overload of ``function`` writes to."""
    if isinstance(function, OpOverload):
        return _written_in([function._schema])
    if isinstance(function, OpOverloadPacket):
        return _written_by_named(function._qualified_op_name)
    name = _find_builtin(function)
    return () if name is None else _written_by_named(name)


@functools.cache
def _written_by_named(name: str) -> tuple[tuple[int | None, str], ...]:
    return _written_in(filter(_is_dispatched, torch._C._jit_get_schemas_for_operator(name)))


def _is_dispatched(schema: torch.FunctionSchema) -> bool:
    """Return whether a schema is that of an operator on tensors, not of a TorchScript builtin."""
    # TorchScript's ``aten::sort``, for example, also sorts a list in place.
    try:
        torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    except RuntimeError:
        return False
    return True


def _written_in(schemas: Iterable[torch.FunctionSchema]) -> tuple[tuple[int | None, str], ...]:
    found = {
        (None if argument.kwarg_only else i, argument.name): None
        for schema in schemas
        for i, argument in enumerate(schema.arguments)
        if argument.is_write
    }
    return tuple(found)


def argument_names(op: object) -> list[str]:
    assert isinstance(op, OpOverload), f"{op} has no schema"
    return [argument.name for argument in op._schema.arguments]


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value that a size or size expression had during tracing; adds no guard.

    A data-dependent size counts as 4096, the ragged size of a nested tensor as 1.
    """
    if isinstance(size, torch.SymInt) and size.node.is_nested_int():
        return 1  # it has no value; nested tensors compare it only with itself
    names = ("optimization_hint", "size_hint")  # 2.13, 2.11
    ask = next(getattr(symbolic_shapes, name) for name in names if hasattr(symbolic_shapes, name))
    return int(ask(size, 4096))


def size_expr(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, casting where dtypes differ."""
    # On a GPU, one kernel per pair of dtypes if all tensors are dense
    # (aten/src/ATen/native/cuda/ForeachBinaryOpList.cu).
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    by_dtypes = {}
    for target, source in zip(targets, sources, strict=True):
        alike = by_dtypes.setdefault((target.dtype, source.dtype), ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for lists in by_dtypes.values():
        torch._foreach_copy_(*lists)


def chunk_cat_is_one_kernel(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Return whether `chunk_cat_` is one kernel on CUDA for these dtypes."""
    # See aten/src/ATen/native/cuda/TensorShape.cu.
    dtypes = {source.dtype for source in sources}
    casts = dtypes == {torch.bfloat16} and target.dtype == torch.float32
    return dtypes == {target.dtype} or casts


def chunk_cat_(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Pad each source to a multiple of ``target.shape[0]`` rows, and pack all into ``target``.

    Row ``i`` of ``target`` holds the ``i``-th chunk of every source, in the order of ``sources``.
    """
    # The kernel treats any dense tensor as contiguous.
    torch._chunk_cat([s.contiguous() for s in sources], 0, target.shape[0], out=target)


def foreach_max_abs(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value of each tensor, in shape ``[len(tensors)]``."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))
