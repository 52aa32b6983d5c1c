"""Prices an op that the cost model fails on, with a warning: no compile fails by its price."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import fx

T = TypeVar("T")

_warned: set[str] = set()
"""The ops that a warning has named."""


def read_or(fallback: T, read: Callable[[fx.Node], T], node: fx.Node) -> T:
    """Return ``read(node)``; if that raises, ``fallback``, with one warning for each op.

    With the fallbacks that are in use an op takes the time of the bytes that it moves.
    """
    try:
        return read(node)
    except Exception as error:
        op = str(node.target)
        if op not in _warned:
            _warned.add(op)
            warnings.warn(
                f"graphshard: the time of {op} cannot be predicted, and is taken to be that of the "
                f"bytes that it moves ({type(error).__name__}: {error})",
                stacklevel=2,
            )
        return fallback
