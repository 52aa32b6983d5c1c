"""Cause and user code of Dynamo's errors, without Dynamo's advice on torch itself.

Relies on torch/_dynamo/exc.py: ``BackendCompilerFailed`` has the original error as
``inner_exception``, and a tracing error has the user's frames as ``real_stack``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable

_CUTS = re.compile(
    r"\n*(from user code:|Set TORCHDYNAMO_VERBOSE|\s*Developer debug context:|\s*Hint: )", re.DOTALL
)
_GOT = re.compile(r"got (\w+)\((['\"])(.*)\2\)", re.DOTALL)


def cause_of(error: BaseException) -> BaseException:
    """Return the original error that one of Dynamo's wraps, or the error itself."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def describe_error(error: BaseException) -> str:
    """Return the type and message of the original error, on one line."""
    error = cause_of(error)
    text = _CUTS.split(str(error), maxsplit=1)[0]
    name, is_dynamos = type(error).__name__, type(error).__module__.startswith("torch._dynamo")
    if is_dynamos and (found := _GOT.search(text)):
        name, text = found[1], found[3]
    return f"{name}: {' '.join(text.split())}".removesuffix(": ")


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error and of its causes, innermost last.

    If Dynamo was tracing, the frames of the traced code come last.
    """
    frames: list[traceback.FrameSummary] = []
    for one in _chain(error):
        frames += traceback.extract_tb(one.__traceback__)
    for one in _chain(error):
        frames += getattr(one, "real_stack", None) or []
    return frames


def _chain(error: BaseException) -> Iterable[BaseException]:
    """Yield an error, its cause, the cause of that one, and so on."""
    following: BaseException | None = error
    while following is not None:
        yield following
        inner = getattr(following, "inner_exception", None)
        following = inner if isinstance(inner, BaseException) else following.__cause__
