"""Finds out that a rank waits for a call that another rank can never make.

    rank 0   waits in call 7                       rank 1   waits in dist.barrier(), before call 7
             ─► posts "call 7 runs plan P"                  ─► posts "I am in collective 12"
             has begun 11 collectives of that group: it would come to no. 12 only after call 7

Ranks begin the collectives of a group in one order, so the numbers prove it, and no verdict rests
on time: a rank that is slow, or waits for a third one that is, has begun nothing that others have
not. Only what a rank posts waits for a while, since most collectives end soon.
"""

from __future__ import annotations

import threading
import time

from .._torch.blocked import Blocked, collective_of, num_begun
from .event_store import BlockedEvent

BLOCKED_S = 2.0
"""A rank that is in one collective for so long posts that, if others have made a further call."""


class BlockedRank:
    """This rank's thread, the one that makes this, as others see it from outside."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seen: Blocked | None = None
        self._since = 0.0

    def is_current(self) -> bool:
        """Return whether the calling thread is the rank's."""
        return threading.get_ident() == self._thread

    def new_event(self, rank: int, call: int) -> BlockedEvent | None:
        """Return an event, once, if the rank has been in one collective for long.

        Args:
            rank: this rank, as the group numbers its ranks.
            call: the number of its next call.
        """
        seen, now = collective_of(self._thread), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if seen is None or now < self._since + BLOCKED_S:
            return None
        self._since = float("inf")
        return BlockedEvent(rank=rank, call=call, **seen._asdict())


def never_comes(event: BlockedEvent, awaited: int | str | None) -> bool:
    """Return whether the rank that posted ``event`` can never make the call that this rank awaits.

    Args:
        awaited: the number of the call in which this rank waits for all others, or another thing.
    """
    if not isinstance(awaited, int) or awaited < event.call:
        return False
    number = num_begun(event.group)
    return number is not None and number < event.number
