"""Operators and tensor storages as generated code uses them.

Relies on torch/utils/_python_dispatch.py, torch/_ops.py and torch/multiprocessing/reductions.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_leaves

from ..tensors import base_name

__all__ = ["DispatchMode"]

_ALLOCATIONS = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)


class WeakStorage:
    """A weak reference to a tensor's storage.

    Attributes:
        address: ID of the storage, unique while this object lives.
        num_bytes: last known size of the storage.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self.num_bytes = storage._cdata, storage.nbytes()
        self._weak = StorageWeakRef(storage)

    def take_in_size(self) -> bool:
        """Update ``num_bytes``, which ``resize_`` may have changed (FSDP2 frees memory this way).

        Returns:
            Whether it changed.
        """
        before = self.num_bytes
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is not None:
            self.num_bytes = storage.nbytes()
        return self.num_bytes != before

    def is_gone(self) -> bool:
        """Return whether the storage has been freed."""
        return bool(self._weak.expired())


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``values``, including nested containers."""
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
    """Run an operator on streams and events for real; its fake implementation does nothing.

    Operators that take tensors (``streams.record_stream``, ``streams.sync_dealloc``) have no effect
    here either.
    """
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
