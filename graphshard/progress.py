"""Progress of a compile: log records, or a line on the first rank's terminal.

The first step of a deep model may compile for minutes. If INFO is enabled for the logger
``graphshard``, by ``logging`` or by ``TORCH_LOGS="+graphshard"``, every rank logs what it does:

    sharding GPT over 8 ranks
    tracing
    tracing forward and backward of 2310 nodes
    backward: planned 148 parameters in 26 buckets
    backward: compiling region 3 of 4
    compiled in 12.4 s; predicted: 80.1 ms, with 1.2 ms of exposed communication

If the logger is not configured and stderr is a terminal, the first rank shows these messages in one
line, which is cleared at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time

import torch.distributed as dist

_log = logging.getLogger("graphshard")

_since_s: float | None = None  # when the line appeared


def is_logged() -> bool:
    """Return whether progress is logged."""
    return _log.isEnabledFor(logging.INFO)


def report(text: str) -> None:
    """Log a message about a compile's progress, or show it in the progress line."""
    global _since_s
    if is_logged():
        _log.info("%s", text, stacklevel=2)
    elif _shows_line():
        now_s = time.monotonic()
        _since_s = _since_s or now_s
        show_line(f"graphshard: {text} [{now_s - _since_s:.0f} s]")


def end() -> None:
    """Clear the progress line, if there is one."""
    global _since_s
    if _since_s is not None:
        _since_s = None
        show_line("")


def show_line(text: str) -> None:
    """Replace the current line of stderr with ``text``, if stderr is a terminal."""
    if _is_terminal():
        width = _width() - 1  # a wrapped line cannot be cleared
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def _width() -> int:
    with contextlib.suppress(OSError, ValueError):  # stderr may have no file descriptor
        if columns := os.get_terminal_size(sys.stderr.fileno()).columns:  # 0: unknown
            return columns
    return shutil.get_terminal_size().columns  # of stdout


def _shows_line() -> bool:
    is_configured = _log.level != logging.NOTSET or _log.handlers
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    return not is_configured and is_first_rank and _is_terminal()


def _is_terminal() -> bool:
    return bool(getattr(sys.stderr, "isatty", bool)())  # stderr may be None
