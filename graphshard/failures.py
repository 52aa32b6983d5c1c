"""Describe an error for the user of a command: its cause, and the failing line of their code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ._torch.dynamo import describe_error, frames_of
from ._torch.inductor import cache_dir


@dataclass(frozen=True)
class Failure:
    """An error that ended a function or a process.

    Attributes:
        cause: type and message of the error, on one line.
        where: file, number and text of the failing line, in the user's code or in a library; ""
            if unknown.
        details: traceback, or the last lines that the process wrote.
    """

    cause: str
    where: str = ""
    details: str = ""


# Path prefixes of torch, of graphshard, and of code without a file or from a frozen module. In an
# editable install, ``passes`` lies outside of ``graphshard``.
_PACKAGES = map(find_spec, ("torch", "graphshard", "graphshard.passes"))
_TORCH_AND_OURS = (*(f"{Path(p.origin).parent}{os.sep}" for p in _PACKAGES if p and p.origin), "<")


def describe_failure(error: BaseException) -> Failure:
    """Describe an error: its cause, the failing line of the user's code, and the traceback."""
    cause = describe_error(error)
    if isinstance(error, SystemExit):
        cause = f"the script ended the process: sys.exit({error.code!r}); return the model instead"
    details = "".join(traceback.format_exception(error))
    return Failure(cause, _where(error), details)


def data_dependence(error: BaseException | None) -> str | None:
    """Describe how code depends on values of tensors if that made fake tensors fail, or None."""
    while error is not None:  # Dynamo wraps the error
        name, text = type(error).__name__, str(error).strip().partition("\n")[0][:120]
        if "DynamicOutputShape" in name:
            return f"the size of a tensor depends on values ({text}), as in x[mask] and x.nonzero()"
        if "DataDependent" in name:
            return f"the model reads a value of a tensor ({text}), as .item() and `if tensor:` do"
        error = error.__cause__ or error.__context__
    return None


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's code or, if there is none, of a library, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = [f for f in reversed(frames_of(error)) if not _is_torch_or_ours(f.filename)]
    users = [frame for frame in frames if not _is_installed(frame.filename)]
    for frame in users or frames:
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _is_torch_or_ours(file: str) -> bool:
    is_pythons = file.startswith(sysconfig.get_path("stdlib")) and not _is_installed(file)
    return file.startswith((*_TORCH_AND_OURS, cache_dir())) or is_pythons


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def format_failure(failure: Failure, verbose: bool) -> str:
    """Return the lines that a command prints for a failure, with details if ``verbose``."""
    lines = [f"error  {failure.cause}"]
    lines += [f"at     {failure.where}"] if failure.where else []
    if failure.details:
        lines = [failure.details, *lines] if verbose else [*lines, "more   with --verbose"]
    return "\n".join(lines)
