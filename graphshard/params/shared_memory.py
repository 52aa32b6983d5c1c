"""Find distinct parameters that share memory, which sharding would silently untie.

    o.weight.data = e.weight.data                       the same elements
    o.weight = nn.Parameter(e.weight.t())               the same elements in another order
    nn.Parameter(flat[:6]), nn.Parameter(flat[6:])      disjoint views of one buffer: fine

graphshard does not tie them for the user: an optimizer steps each object with its own state, so a
single tied parameter would train differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.tensors import is_traceable_wrapper_subclass, storage_of
from .find import PlainParam
from .full_tensor import without_expanded_dims


def fault_of_shared_memory(root: nn.Module, plain_params: Sequence[PlainParam]) -> str | None:
    """Return a fault if a parameter to be sharded shares elements with another one, or None."""
    plain = {plain_param.param for plain_param in plain_params}
    for one, other in _sharing_storage(root):
        if not plain.isdisjoint((one[1], other[1])) and _share_elements(one[1], other[1]):
            return _fault(*one, *other)
    return None


_Named = tuple[str, nn.Parameter]


def _sharing_storage(root: nn.Module) -> Iterator[tuple[_Named, _Named]]:
    """Yield pairs of parameters whose byte ranges in one storage overlap."""
    by_storage: dict[int, list[_Named]] = {}
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
    """Return the range of bytes that ``tensor`` spans in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.storage_offset()
    return range(start * tensor.itemsize, (start + last + 1) * tensor.itemsize)


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping byte ranges have an element in common."""
    if one.itemsize != other.itemsize:
        return True
    first = min(one.storage_offset(), other.storage_offset())
    stop = max(_bytes_of(one).stop, _bytes_of(other).stop) // one.itemsize
    marks = torch.zeros(stop - first, dtype=torch.bool, device="cpu")
    marked, read = (
        without_expanded_dims(marks.as_strided(t.shape, t.stride(), t.storage_offset() - first))
        for t in (one, other)
    )
    marked.fill_(True)
    return bool(read.any())


def _fault(name: str, param: nn.Parameter, other_name: str, other: nn.Parameter) -> str:
    same = (param.shape, param.stride(), param.storage_offset(), param.dtype)
    if same == (other.shape, other.stride(), other.storage_offset(), other.dtype):
        tie = f"to tie them, register one parameter in both modules ({other_name} = {name})"
    else:
        tie = f"to tie them, compute what {other_name!r} holds from {name!r} in forward"
    return (
        f"parameters {name!r} and {other_name!r} are two objects that share memory, which sharding "
        f"would part: {tie}; else give one of them a copy, by clone()"
    )
