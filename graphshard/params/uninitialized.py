"""Marks of uninitialized elements: memory from ``to_empty`` is filled with a reserved NaN.

A DTensor must be initialized as a whole: values written to some of its rows (``p.data[i] = x``) go
to a copy and are lost, under FSDP2 too.
"""

from __future__ import annotations

import torch

# These bytes, repeated, are a NaN in every floating-point dtype of 2 bytes or more, and differ from
# the NaN that arithmetic produces.
_HALF_WORD = 0x7FFB


def mark_uninitialized(tensor: torch.Tensor) -> bool:
    """Fill a contiguous tensor with the reserved NaN; return False if it cannot be marked.

    Floating-point and complex tensors can be marked, except 8-bit floats and tensors on meta.
    """
    half_words = _half_words(tensor)
    if half_words is not None:
        half_words.fill_(_HALF_WORD)
    return half_words is not None


def num_uninitialized(tensor: torch.Tensor) -> int:
    """Return the number of reserved NaNs in a contiguous tensor, after waiting for its device."""
    half_words = _half_words(tensor)
    if half_words is None:
        return 0
    # A complex element is uninitialized if its real or its imaginary part is.
    return int((half_words == _HALF_WORD).all(2).any(1).sum())


def _half_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return an int16 view of shape [element, real number, half word], or None if impossible."""
    numbers = 2 if tensor.is_complex() else 1
    length = tensor.element_size() // (2 * numbers)
    if not length or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    # A conjugate cannot be viewed; marked memory is no conjugate, so it is not copied.
    return tensor.detach().resolve_conj().view(-1).view(torch.int16).view(-1, numbers, length)
