"""Errors of a user's script, from the process that ran it to the one that tells of them."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._torch.dynamo_errors import frames_of, words_of


@dataclass(frozen=True)
class Failure:
    """An error that ended a function.

    Attributes:
        cause: its type and what it says, a line.
        where: the line of the user's code that it comes from; "" if there is none.
        details: its traceback, or the last lines that the process wrote.
    """

    cause: str
    where: str = ""
    details: str = ""


@dataclass(frozen=True)
class Result:
    """Holds the value that a function returned."""

    value: Any


_NOT_OF_THE_USER = tuple(
    str(folder)
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
        "<",  # frozen modules, code without a file
    )
)


def failure_of(error: BaseException) -> Failure:
    """Return what a user is told about an error."""
    cause = words_of(error)
    if isinstance(error, SystemExit):
        cause = f"the script ended the process: sys.exit({error.code!r}); return the model instead"
    details = "".join(traceback.format_exception(error))
    return Failure(cause, _where(error), details)


def _where(error: BaseException) -> str:
    """Return file, number and text of the innermost line that is not of torch or of ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    for frame in reversed(frames_of(error)):
        path = frame.filename
        is_installed = "site-packages" in Path(path).parts
        if not path.startswith(_NOT_OF_THE_USER) and not is_installed:
            return f"{path}:{frame.lineno}: {frame.line}"
    return ""
