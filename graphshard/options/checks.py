"""Checks of values that several options share."""

from __future__ import annotations

from typing import TypeGuard


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
