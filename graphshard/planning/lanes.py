"""A lane: an in-order queue of work, such as the stream of a process group."""

from __future__ import annotations

MARGIN = 2.0
"""Factor on the predicted duration of host copies.

Judgement call: next to compute, or on a shared link, a transfer may well take twice as long as
alone. A larger margin holds buffers for longer; with a smaller one compute waits for late
transfers.
"""


class Lane:
    """Timeline of one lane, in microseconds.

    Attributes:
        free_us: time at which all work added so far is done.
    """

    __slots__ = ("free_us",)

    def __init__(self, free_us: float = 0.0) -> None:
        self.free_us = free_us

    def start_us(self, ready_us: float) -> float:
        """Return when work that is ready at ``ready_us`` would start."""
        return ready_us if ready_us > self.free_us else self.free_us

    def run(self, duration_us: float, ready_us: float = 0.0) -> float:
        """Append work that is ready at ``ready_us``; return when it ends."""
        free_us = self.free_us
        self.free_us = end_us = (ready_us if ready_us > free_us else free_us) + duration_us
        return end_us
