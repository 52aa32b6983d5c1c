"""What a schedule may not exceed, and what room that leaves while buckets are placed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .bucketing import Candidate


@dataclass(frozen=True)
class ScheduleLimits:
    """What a schedule may not exceed, in bytes; None: no limit.

    Attributes:
        cap: a bucket; a larger tensor travels alone. None: found by the search.
        in_flight: all buffers between launch and wait; one alone may be larger.
        peak: all that is alive in a step.
    """

    cap: int | None = None
    in_flight: int | None = None
    peak: int | None = None


class FreeMemory:
    """Memory left in every step, while buckets are placed one after the other."""

    def __init__(self, alive: list[int], limits: ScheduleLimits) -> None:
        self._alive, self._in_flight = alive, [0] * len(alive)
        self._peak = math.inf if limits.peak is None else limits.peak
        self._limit = math.inf if limits.in_flight is None else limits.in_flight

    def earliest(self, group: Candidate, wish: int, due: int) -> int:
        """The first step from ``wish`` on from which there is room until ``due``; takes it."""
        begin = due
        while begin > wish and self._fits(group, begin - 1):
            begin -= 1
        self._take(group, begin, due)
        return begin

    def latest(self, group: Candidate, begin: int, wish: int) -> int:
        """The last step up to ``wish`` until which there is room from ``begin`` on; takes it."""
        end = begin
        while end < wish and self._fits(group, end):
            end += 1
        self._take(group, begin, end)
        return end

    def _fits(self, group: Candidate, step: int) -> bool:
        in_flight = self._in_flight[step] + group.bucket.num_bytes
        return in_flight <= self._limit and self._alive[step] + group.freed_bytes <= self._peak

    def _take(self, group: Candidate, begin: int, end: int) -> None:
        for step in range(begin, end):
            self._in_flight[step] += group.bucket.num_bytes
            self._alive[step] += group.freed_bytes
