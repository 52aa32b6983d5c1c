"""Keeps CPython from slowing a compile: room on its stack, and no full garbage collections.

CPython keeps frames in chunks of 16 KB. A function that calls others in a loop, and whose frame is
the last that fits into a chunk, has a new chunk mapped and unmapped again by every call: a call
then takes 100 times as long and more (python/cpython#142183; releases of 3.13 and later that have
pull request 145789, of March 2026, keep a spare chunk). Whether and where a compile comes upon such
an end depends on how deep its caller stands: torch's joint passes and its cut took three times as
long below our frames as elsewhere.

And whenever a quarter as many objects were added as there were, its garbage collector looks at all
of them. torch alone is 400,000, and a compile makes and drops millions: 11 full collections took
7 of the 50 seconds of a first step of 48 layers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_SLOTS = 1 << 16
"""Of the frame that makes room, in pointers. CPython doubles the size of a chunk until a frame fits
in: 1 MB, of which 0.5 MB are left for the frames below. Only pages that frames write are used."""

_NEVER = 2**31 - 1
"""Collections of the middle generation before one of all objects, at most."""


def with_stack_room(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorate a function that runs long and deep: frames below it share one chunk of the stack."""

    def with_room(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return function(*args, **kwargs)

    with_room.__code__ = with_room.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(with_room)


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Have garbage collections look at young objects alone, meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
