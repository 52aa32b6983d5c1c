"""A lane: something that does one thing after the other, such as the stream of a process group."""

from __future__ import annotations

MARGIN = 2.0
"""Factor on the predicted duration of host copies.

Judged: next to compute, and on links that others use, a transfer may well take twice as long as it
takes alone. A larger margin holds buffers for longer; with a smaller one compute waits for
transfers that are late.
"""


class Lane:
    """Time of one lane, in microseconds.

    Attributes:
        free_us: when everything that it was given so far is done.
    """

    __slots__ = ("free_us",)

    def __init__(self, free_us: float = 0.0) -> None:
        self.free_us = free_us

    def start_us(self, ready_us: float) -> float:
        """Return when work would begin that can begin at ``ready_us``."""
        return ready_us if ready_us > self.free_us else self.free_us

    def run(self, duration_us: float, ready_us: float = 0.0) -> float:
        """Add work that can begin at ``ready_us``, behind all that came before; return its end."""
        free_us = self.free_us
        self.free_us = end_us = (ready_us if ready_us > free_us else free_us) + duration_us
        return end_us
