"""Refuse distinct parameters that share memory.

Sharding would untie them. Tying them automatically would change training: an optimizer steps each
object with its own state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.tensors import is_traceable_wrapper_subclass, storage_of
from .full_tensor import without_expanded_dims
from .plain_params import PlainParam

_NamedParam = tuple[str, nn.Parameter]


def shared_memory_error(root: nn.Module, plain_params: Sequence[PlainParam]) -> str | None:
    """Return an error if a parameter to be sharded shares elements with another, or None."""
    plain = {plain_param.param for plain_param in plain_params}
    for one, other in _sharing_storage(root):
        if not plain.isdisjoint((one[1], other[1])) and _share_elements(one[1], other[1]):
            return _untied(*one, *other)
    return None


def _sharing_storage(root: nn.Module) -> Iterator[tuple[_NamedParam, _NamedParam]]:
    """Yield pairs of parameters with overlapping byte ranges in one storage."""
    by_storage: dict[int, list[_NamedParam]] = {}
    for name, param in root.named_parameters():
        if _has_memory(param):
            by_storage.setdefault(storage_of(param), []).append((name, param))
    for named in by_storage.values():
        ranges = sorted(((_bytes_of(one[1]), one) for one in named), key=lambda r: r[0].start)
        for i, (own_bytes, one) in enumerate(ranges):
            for bytes_, other in ranges[i + 1 :]:
                if bytes_.start >= own_bytes.stop:
                    break
                yield one, other


def _has_memory(param: nn.Parameter) -> bool:
    if isinstance(param, DTensor | nn.parameter.UninitializedParameter):
        return False
    is_plain = param.layout == torch.strided and not is_traceable_wrapper_subclass(param.data)
    return is_plain and not param.is_meta and param.numel() > 0


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


def _untied(name: str, param: nn.Parameter, other_name: str, other: nn.Parameter) -> str:
    same = (param.shape, param.stride(), param.storage_offset(), param.dtype)
    if same == (other.shape, other.stride(), other.storage_offset(), other.dtype):
        tie = f"to tie them, register one parameter in both modules ({other_name} = {name})"
    else:
        tie = f"to tie them, compute {other_name!r} from {name!r} in forward"
    return (
        f"parameters {name!r} and {other_name!r} are separate objects that share memory, but "
        f"sharding would untie them: {tie}; otherwise clone() one of them"
    )
