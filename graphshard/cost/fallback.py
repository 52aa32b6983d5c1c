"""Stands in for what the cost model fails on, with a warning: no compile fails by its price."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import fx

T = TypeVar("T")

_warned: set[str] = set()
"""What a warning has named: ops, and whatever else was to be predicted."""


def read_or(fallback: T, read: Callable[[fx.Node], T], node: fx.Node) -> T:
    """Return ``read(node)``; if that raises, ``fallback``, with one warning for each op.

    With the fallbacks that are in use an op takes the time of the bytes that it moves.
    """
    try:
        return read(node)
    except Exception as error:
        _warn_once(
            str(node.target),
            f"the time of {node.target} cannot be predicted, and is taken to be that of the bytes "
            f"that it moves ({type(error).__name__}: {error})",
        )
        return fallback


def find_or(fallback: T, find: Callable[[], T], what: str) -> T:
    """Return ``find()``; if that raises, ``fallback``, with one warning for each ``what``."""
    try:
        return find()
    except Exception as error:
        _warn_once(what, f"{what} cannot be predicted ({type(error).__name__}: {error})")
        return fallback


def _warn_once(key: str, text: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"graphshard: {text}", stacklevel=3)
