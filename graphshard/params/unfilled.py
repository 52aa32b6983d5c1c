"""Finds what nobody has initialised: memory of ``to_empty`` is filled with one NaN of its own kind.

A parameter that is a DTensor is initialised as a whole. What is assigned to its ``data``, or
written to some of its rows, is lost without an error (under FSDP2, too): a DTensor makes copies.
"""

from __future__ import annotations

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF_WORD = b"\xfb\x7f"
"""Little-endian; repeated, it is a NaN in every floating-point dtype of two bytes or more, and not
the one that arithmetic makes."""


def mark_unfilled(tensor: torch.Tensor) -> bool:
    """Fill a contiguous tensor with the mark; return whether it can be marked."""
    bits = _bits(tensor)
    if bits is not None:
        bits.fill_(_mark(bits))
    return bits is not None


def num_unfilled(tensor: torch.Tensor) -> int:
    """Return how many elements of a contiguous tensor have the mark; waits for the device."""
    bits = _bits(tensor)
    return 0 if bits is None else int((bits == _mark(bits)).sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view as integers; None where a dtype has no NaN, or there is no memory."""
    integer = _INTEGERS.get(tensor.element_size())
    if integer is None or tensor.is_meta or not tensor.is_floating_point():
        return None
    return tensor.detach().view(-1).view(integer)


def _mark(bits: torch.Tensor) -> int:
    return int.from_bytes(_HALF_WORD * (bits.element_size() // 2), "little")
