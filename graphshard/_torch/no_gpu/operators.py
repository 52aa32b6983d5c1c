"""Operators called by generated code, the kernels that they launch, and tensor storages.

Relies on its imports, on ``UntypedStorage._new_with_weak_ptr`` (torch/multiprocessing/reductions.py
uses it), and on ForeachUtils.h, cuda/ForeachBinaryOpList.cu and cuda/TensorShape.cu in
aten/src/ATen/native.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_leaves

from ..tensors import argument_names, base_name, chunk_cat_is_one_kernel

__all__ = ["DispatchMode", "is_dense"]

Operator: TypeAlias = OpOverload | HigherOrderOperator

_ALLOCATIONS = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)


class WeakStorage:
    """A weak reference to a storage; ``address`` stays unique as long as the reference lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self.num_bytes = storage._cdata, storage.nbytes()
        self._weak = StorageWeakRef(storage)

    def take_in_size(self) -> bool:
        """Update ``num_bytes`` from the storage; return whether it changed."""
        # FSDP2 frees memory by ``resize_``.
        before = self.num_bytes
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is not None:
            self.num_bytes = storage.nbytes()
        return self.num_bytes != before

    def is_gone(self) -> bool:
        return bool(self._weak.expired())


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``values``, including those in nested containers."""
    leaves = (leaf for value in values for leaf in tree_leaves(value))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def is_view(op: object) -> bool:
    """Return whether an operator returns only views of its inputs, or no tensors."""
    if not isinstance(op, OpOverload):  # a higher-order operator runs others
        return False
    return op.is_view or op.namespace == "prim" or not op._schema.returns


def is_allocation(op: object) -> bool:
    """Return whether an operator allocates tensors without writing to them."""
    return base_name(op) in _ALLOCATIONS


def run_on_streams(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Run a stream or event operator for real, because its fake implementation does nothing."""
    # Stream operators on tensors (``streams.record_stream``, ``streams.sync_dealloc``) still have
    # no effect.
    assert isinstance(op, OpOverload)
    with unset_fake_temporarily():
        return op(*args, **kwargs)


def written_in(
    op: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator mutates according to its schema."""
    if not isinstance(op, OpOverload):
        return
    for position, described in enumerate(op._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(described.name)
            yield from tensors_in([given])


def is_non_blocking(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    names = argument_names(op)
    if "non_blocking" not in names:
        return False
    position = names.index("non_blocking")
    return bool(args[position] if position < len(args) else kwargs.get("non_blocking"))


def num_kernels(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Return the number of kernels that an operator call launches, or 1 if unknown."""
    name = base_name(op)
    if name.startswith("_foreach_"):
        return _num_of_foreach(args, casts=name == "_foreach_copy_")
    if name == "split_with_sizes_copy":
        whole, *parts = tensors_in([args, kwargs])
        # Without ``out`` tensors, each part needs its own kernel.
        one = parts and all(is_dense(t) and t.dtype == whole.dtype for t in (whole, *parts))
        sizes = args[1]
        assert isinstance(sizes, Sequence)
        return 1 if one else len(sizes)
    if name == "_chunk_cat":
        *sources, target = tensors_in([args, kwargs])
        one = all(map(is_dense, sources)) and chunk_cat_is_one_kernel(target, sources)
        return 1 if one else 2 * len(sources)
    return 1


def _num_of_foreach(args: Sequence[object], *, casts: bool) -> int:
    """Return the number of kernels of a foreach operator: 1 on its fast path, or 1 per tensor."""
    # The fast path requires dense tensors, one dtype per list (with ``casts``, it may differ
    # between lists), and the same layout for tensors at the same position.
    lists = [list(tensors_in(arg)) for arg in args if isinstance(arg, (list, tuple))]
    lists = [tensors for tensors in lists if tensors]
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    alike = all(len(own) == 1 and (casts or own == dtypes[0]) for own in dtypes)
    together = zip(*lists, strict=True)
    one = alike and all(
        is_dense(tensor) and _layout(tensor) == _layout(first)
        for first, *others in together
        for tensor in (first, *others)
    )
    return 1 if one else len(lists[0])


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, list[int]]:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
    return tensor.shape, strides
