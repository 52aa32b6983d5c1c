"""Detect that a rank waits for a call that another rank can never make.

    rank 0   waits in call 7                       rank 1   waits in dist.barrier(), before call 7
             ─► posts "call 7 runs plan P"                  ─► posts "I am in collective 12"
             has begun 11 collectives of that group; begins no. 12 only after call 7

Ranks begin the collectives of a group in the same order, so these numbers prove the deadlock, and
no verdict depends on time: a rank that is slow, or that waits for a slow third rank, has begun
nothing that the others have not. Only the post of a blocked rank is delayed, because most
collectives end soon.
"""

from __future__ import annotations

import threading
import time

from .._torch.blocked import PendingCollective, num_started, pending_collective
from .store import BlockedEvent

BLOCKED_S = 2.0
"""Seconds that a rank is in one collective before it posts that, if its peers are a call ahead."""


class RankThread:
    """This rank's thread, as other threads observe it; must be created in that thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seen: PendingCollective | None = None
        self._since = 0.0

    def is_current(self) -> bool:
        """Return whether the calling thread is the rank's."""
        return threading.get_ident() == self._thread

    def new_event(self, rank: int, call: int) -> BlockedEvent | None:
        """Return an event, once, if the rank has been in one collective for ``BLOCKED_S``.

        Args:
            rank: this rank's number in the group.
            call: number of this rank's next call.
        """
        seen, now = pending_collective(self._thread), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if seen is None or now < self._since + BLOCKED_S:
            return None
        self._since = float("inf")
        return BlockedEvent(rank=rank, call=call, **seen._asdict())


def is_deadlocked(event: BlockedEvent, awaited: int | str | None) -> bool:
    """Return whether the rank that posted ``event`` can never make the call that this rank awaits.

    Args:
        awaited: number of the call in which this rank waits for all others. For the key of a
            choice, or None, the result is False.
    """
    if not isinstance(awaited, int) or awaited < event.call:
        return False
    number = num_started(event.group)
    return number is not None and number < event.number
