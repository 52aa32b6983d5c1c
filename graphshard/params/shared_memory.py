"""Refuse distinct parameters that share memory, and buffers that share that of a parameter.

Sharding would untie them. Tying them automatically would change training: an optimizer steps each
object with its own state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.tensors import is_traceable_wrapper_subclass, storage_of
from .full_tensor import without_expanded_dims
from .plain_params import PlainParam

_Named = tuple[str, torch.Tensor]


def shared_memory_error(root: nn.Module, plain_params: Sequence[PlainParam]) -> str | None:
    """Return an error if a parameter to be sharded shares elements with another, or None.

    Trained parameters must not share elements with buffers, either.
    """
    plain: set[torch.Tensor] = {plain_param.param for plain_param in plain_params}
    trained = {param for param in plain if param.requires_grad}
    buffers = set(root.buffers())
    for one, other in _sharing_storage([*root.named_parameters(), *root.named_buffers()]):
        pair = (one[1], other[1])
        refused = plain if buffers.isdisjoint(pair) else trained
        if not refused.isdisjoint(pair) and _share_elements(*pair):
            if buffers.isdisjoint(pair):
                return _untied(*one, *other)
            param, buffer = (one, other) if other[1] in buffers else (other, one)
            return (
                f"parameter {param[0]!r} and buffer {buffer[0]!r} share memory, but sharding would "
                f"untie them: to tie them, compute {buffer[0]!r} from {param[0]!r} in forward; "
                "otherwise clone() the buffer"
            )
    return None


def _sharing_storage(named: Iterable[_Named]) -> Iterator[tuple[_Named, _Named]]:
    """Yield pairs of tensors with overlapping byte ranges in one storage."""
    by_storage: dict[int, list[_Named]] = {}
    for name, tensor in named:
        if _has_memory(tensor):
            by_storage.setdefault(storage_of(tensor), []).append((name, tensor))
    for named in by_storage.values():
        ranges = sorted(((_bytes_of(one[1]), one) for one in named), key=lambda r: r[0].start)
        for i, (own_bytes, one) in enumerate(ranges):
            for bytes_, other in ranges[i + 1 :]:
                if bytes_.start >= own_bytes.stop:
                    break
                yield one, other


def _has_memory(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) or nn.parameter.is_lazy(tensor):
        return False
    is_plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor.data)
    return is_plain and not tensor.is_meta and tensor.numel() > 0


def _bytes_of(tensor: torch.Tensor) -> range:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.storage_offset()
    return range(start * tensor.itemsize, (start + last + 1) * tensor.itemsize)


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping byte ranges share an element.

    Tensors with elements of different sizes count as sharing one.
    """
    if one.itemsize != other.itemsize:
        return True
    # Mark the elements of one tensor in a map of the storage, and look for marks in the other.
    first = min(one.storage_offset(), other.storage_offset())
    stop = max(_bytes_of(one).stop, _bytes_of(other).stop) // one.itemsize
    marks = torch.zeros(stop - first, dtype=torch.bool, device="cpu")
    marked, read = (
        without_expanded_dims(marks.as_strided(t.shape, t.stride(), t.storage_offset() - first))
        for t in (one, other)
    )
    marked.fill_(True)
    return bool(read.any())


def _untied(name: str, param: torch.Tensor, other_name: str, other: torch.Tensor) -> str:
    same = (param.shape, param.stride(), param.storage_offset(), param.dtype)
    if same == (other.shape, other.stride(), other.storage_offset(), other.dtype):
        tie = f"to tie them, register one parameter in both modules ({other_name} = {name})"
    else:
        tie = f"to tie them, compute {other_name!r} from {name!r} in forward"
    return (
        f"parameters {name!r} and {other_name!r} are separate objects that share memory, but "
        f"sharding would untie them: {tie}; otherwise clone() one of them"
    )
