"""Find uninitialised elements: memory from ``to_empty`` is filled with a reserved NaN.

A DTensor parameter must be initialised as a whole. Values written to some of its rows
(``p.data[i] = x``) go to a copy and are lost without an error, under FSDP2 too.
"""

from __future__ import annotations

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF_WORD = b"\xfb\x7f"
"""Little-endian bytes that, repeated, are a NaN in every floating-point dtype of 2 bytes or more,
but not the NaN that arithmetic produces."""


def mark_uninitialised(tensor: torch.Tensor) -> bool:
    """Fill a contiguous tensor with the mark; return whether it can hold the mark."""
    bits = _bits(tensor)
    if bits is not None:
        bits.fill_(_mark(bits))
    return bits is not None


def num_uninitialised(tensor: torch.Tensor) -> int:
    """Return how many elements of a contiguous tensor have the mark; synchronizes the device."""
    bits = _bits(tensor)
    return 0 if bits is None else int((bits == _mark(bits)).sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor`` viewed as integers; None if it is on meta or its dtype cannot be marked."""
    integer = _INTEGERS.get(tensor.element_size())
    if integer is None or tensor.is_meta or not tensor.is_floating_point():
        return None
    return tensor.detach().view(-1).view(integer)


def _mark(bits: torch.Tensor) -> int:
    return int.from_bytes(_HALF_WORD * (bits.element_size() // 2), "little")
