"""Room on Python's stack, so that no loop inside of a call comes upon the end of a chunk of it.

CPython keeps frames in chunks of 16 KB. A function that calls others in a loop, and whose frame is
the last that fits into a chunk, has a new chunk mapped and unmapped again by every call: a call
then takes 100 times as long and more (python/cpython#142183; releases of 3.13 and later that have
pull request 145789, of March 2026, keep a spare chunk). Whether and where a compile comes upon such
an end depends on how deep its caller stands: torch's joint passes and its cut took three times as
long below our frames as elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_SLOTS = 1 << 16
"""Of the frame that makes room, in pointers. CPython doubles the size of a chunk until a frame fits
in: 1 MB, of which 0.5 MB are left for the frames below. Only pages that frames write are used."""


def with_stack_room(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorate a function that runs long and deep: frames below it share one chunk of the stack."""

    def with_room(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return function(*args, **kwargs)

    with_room.__code__ = with_room.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(with_room)
