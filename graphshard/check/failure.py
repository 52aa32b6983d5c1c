"""Errors of a user's script, in a form that one process can send to another."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._torch.dynamo import describe_error, frames_of
from .._torch.inductor import cache_dir


@dataclass(frozen=True)
class Failure:
    """An error that ended a function.

    Attributes:
        cause: type and message of the error, on one line.
        where: file, line number and text of the line at fault, in the user's code or in a library;
            "" if there is none.
        details: the traceback, or the last lines that the process wrote.
    """

    cause: str
    where: str = ""
    details: str = ""


@dataclass(frozen=True)
class Result:
    """Return value of a function that succeeded."""

    value: Any


_TORCH_AND_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Path prefixes of torch, of graphshard, and of code without a file or from a frozen module."""


def describe_failure(error: BaseException) -> Failure:
    """Return the description of an error for the user."""
    cause = describe_error(error)
    if isinstance(error, SystemExit):
        cause = f"the script ended the process: sys.exit({error.code!r}); return the model instead"
    details = "".join(traceback.format_exception(error))
    return Failure(cause, _where(error), details)


def _where(error: BaseException) -> str:
    """Return file, line number and text of the innermost line of the user's code.

    If no line is the user's, return the innermost line of a library such as transformers.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    others = [f for f in reversed(frames_of(error)) if not _is_torch_or_ours(f.filename)]
    own = [frame for frame in others if not _is_installed(frame.filename)]
    for frame in own or others:
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _is_torch_or_ours(file: str) -> bool:
    """Return whether a file belongs to torch, Inductor's output, graphshard or the stdlib."""
    is_pythons = file.startswith(sysconfig.get_path("stdlib")) and not _is_installed(file)
    return file.startswith((*_TORCH_AND_OURS, cache_dir())) or is_pythons


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
