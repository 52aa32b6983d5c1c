"""The collective that a thread waits in, and how many of its group's collectives a rank has begun.

Names of functions and local variables are those of torch/distributed/distributed_c10d.py in torch
2.11.0 and 2.13.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .distributed import process_group

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = dist.distributed_c10d.__file__
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}


class PendingCollective(NamedTuple):
    """A collective that a thread is in.

    Attributes:
        what: function, and the line that called it.
        group: name of the process group.
        number: number of this group's collectives that this rank has begun, including this one.
    """

    what: str
    group: str
    number: int


def pending_collective(thread: int) -> PendingCollective | None:
    """Return the collective that a thread of this process is in, or None if it is in none.

    Ignores point-to-point operations, functional collectives and those of compiled graphs.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != _COLLECTIVES:
        return None
    name, group = frame.f_code.co_name, frame.f_locals.get("group") or dist.group.WORLD
    if name in _POINT_TO_POINT or "group" not in frame.f_locals or group is None:
        return None
    number = num_started(group.group_name)
    what = f"torch.distributed.{name}() of {_place(frame)}"
    return None if number is None else PendingCollective(what, group.group_name, number)


def num_started(group: str) -> int | None:
    """Return how many collectives of a group this rank has begun; None if unknown."""
    try:
        member: Any = process_group(group)  # mypy's stub lacks the method
        return int(member._get_sequence_number_for_group())
    except RuntimeError:  # this rank is not in the group, or its backend does not count
        return None


def _place(frame: FrameType) -> str:
    """Return the innermost line outside of torch."""
    place = next((f for f in _outwards(frame) if not _is_of_torch(f)), frame)
    return f"{place.f_code.co_filename}:{place.f_lineno}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)
