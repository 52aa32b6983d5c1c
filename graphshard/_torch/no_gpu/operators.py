"""Operators, and the memory of tensors, as generated code uses them.

Read in torch/utils/_python_dispatch.py, torch/_ops.py and torch/multiprocessing/reductions.py.
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
    """A tensor's memory, as long as somebody else refers to it.

    Attributes:
        address: a number of its own while this object lives.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self.num_bytes = storage._cdata, storage.nbytes()
        self._weak = StorageWeakRef(storage)

    def take_in_size(self) -> bool:
        """Update ``num_bytes``, which ``resize_`` may have changed, as FSDP2 frees memory.

        Returns:
            Whether it has changed.
        """
        before = self.num_bytes
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is not None:
            self.num_bytes = storage.nbytes()
        return self.num_bytes != before

    def is_gone(self) -> bool:
        """Return whether nothing refers to it any more."""
        return bool(self._weak.expired())


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors among ``values``, and in containers among them."""
    leaves = (leaf for value in values for leaf in tree_leaves(value))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def is_view(op: object) -> bool:
    """Return whether the outputs of an operator are its inputs' memory, or no tensors."""
    if not isinstance(op, OpOverload):  # of a higher order: it runs another one
        return False
    return op.is_view or op.namespace == "prim" or not op._schema.returns


def is_allocation(op: object) -> bool:
    """Return whether an operator makes tensors and writes nothing into them."""
    return base_name(op) in _ALLOCATIONS


def run_on_streams(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Run an operator on streams and events; its variant for fake tensors does nothing.

    Those that take tensors (``streams.record_stream``, ``streams.sync_dealloc``) do nothing here,
    too.
    """
    assert isinstance(op, OpOverload)
    with unset_fake_temporarily():
        return op(*args, **kwargs)


def written_in(
    op: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes, by its schema."""
    if not isinstance(op, OpOverload):
        return
    for position, described in enumerate(op._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(described.name)
            yield from tensors_in([given])
