"""Errors of a user's script, from the process that ran it to the one that tells of them."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._torch.dynamo_errors import frames_of, words_of
from .._torch.inductor import cache_dir


@dataclass(frozen=True)
class Failure:
    """An error that ended a function.

    Attributes:
        cause: its type and what it says, a line.
        where: the line of the user's code, or of a library, that it comes from; "" if there is
            none.
        details: its traceback, or the last lines that the process wrote.
    """

    cause: str
    where: str = ""
    details: str = ""


@dataclass(frozen=True)
class Result:
    """Holds the value that a function returned."""

    value: Any


_TORCH_AND_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Where code of torch and of this project lies; and frozen modules, and code without a file."""


def failure_of(error: BaseException) -> Failure:
    """Return what a user is told about an error."""
    cause = words_of(error)
    if isinstance(error, SystemExit):
        cause = f"the script ended the process: sys.exit({error.code!r}); return the model instead"
    details = "".join(traceback.format_exception(error))
    return Failure(cause, _where(error), details)


def _where(error: BaseException) -> str:
    """Return file, number and text of the innermost line of the user's code; if there is none, of a
    library that he uses, such as transformers."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    others = [f for f in reversed(frames_of(error)) if not _is_torch_or_ours(f.filename)]
    own = [frame for frame in others if not _is_installed(frame.filename)]
    for frame in own or others:
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _is_torch_or_ours(file: str) -> bool:
    """Return whether code is of torch, written by Inductor, of this project, or Python's own."""
    is_pythons = file.startswith(sysconfig.get_path("stdlib")) and not _is_installed(file)
    return file.startswith((*_TORCH_AND_OURS, cache_dir())) or is_pythons


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
