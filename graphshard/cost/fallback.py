"""Replace failed predictions by fallbacks, with a warning: no compile may fail over a price."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import fx

T = TypeVar("T")

_warned: set[str] = set()
"""Ops, and other predictions, that have been warned about."""


def read_or(fallback: T, read: Callable[[fx.Node], T], node: fx.Node) -> T:
    """Return ``read(node)`` or, if that raises, ``fallback``; warn once for each op.

    With the fallbacks in use, an op then takes the time of the bytes that it moves.
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
    """Return ``find()`` or, if that raises, ``fallback``; warn once for each ``what``."""
    try:
        return find()
    except Exception as error:
        _warn_once(what, f"{what} cannot be predicted ({type(error).__name__}: {error})")
        return fallback


def _warn_once(key: str, text: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"graphshard: {text}", stacklevel=3)
