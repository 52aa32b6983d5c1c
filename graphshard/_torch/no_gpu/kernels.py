"""Number of CUDA kernels per operator call, for operators that may launch one per tensor.

    _foreach_copy_([a, b], [c, d])      1, or 2 if a tensor has gaps or another dtype

Relies on aten/src/ATen/native/ForeachUtils.h, and on ForeachBinaryOpList.cu and TensorShape.cu in
aten/src/ATen/native/cuda.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

from ..tensors import base_name
from .operators import tensors_in


def num_kernels(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Return the number of kernels that an operator call launches; 1 for unknown operators."""
    name = base_name(op)
    if name.startswith("_foreach_"):
        return _num_of_foreach(args, casts=name == "_foreach_copy_")
    if name == "split_with_sizes_copy":
        whole, *parts = tensors_in([args, kwargs])
        # Without ``out`` tensors, each part takes a kernel of its own.
        one = parts and all(is_dense(t) and t.dtype == whole.dtype for t in (whole, *parts))
        sizes = args[1]
        assert isinstance(sizes, Sequence)
        return 1 if one else len(sizes)
    if name == "_chunk_cat":
        *sources, target = tensors_in([args, kwargs])
        dtypes = {source.dtype for source in sources}
        casts = dtypes == {torch.bfloat16} and target.dtype == torch.float32
        one = all(map(is_dense, sources)) and (casts or dtypes == {target.dtype})
        return 1 if one else 2 * len(sources)
    return 1


def _num_of_foreach(args: Sequence[object], *, casts: bool) -> int:
    """Return 1 if a foreach operator takes its fast path, otherwise the number of tensors per list.

    The fast path requires dense tensors, one dtype per list, and the same layout for tensors at the
    same position.

    Args:
        casts: whether lists may differ in dtype.
    """
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
    """Return the shape, and the strides of all dimensions whose size is not 1."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
    return tensor.shape, strides
