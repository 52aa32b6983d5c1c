"""The limits of a schedule, and the memory that they leave while buckets are placed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .live_bytes import Footprint, LiveBytes, Span


@dataclass(frozen=True)
class ScheduleLimits:
    """The limits of a schedule, in bytes; None: no limit. The names are keys of dumps.

    Attributes:
        cap: bytes of a bucket; a larger tensor travels alone. None: the search finds a size.
        in_flight: bytes of all buckets between launch and wait; one alone may be larger.
        peak: bytes alive in a step, everything included.
    """

    cap: int | None = None
    in_flight: int | None = None
    peak: int | None = None


class FreeMemory:
    """The memory left in every step, while buckets are placed one after the other.

    Args:
        alive: bytes alive in each step before any of those buckets takes time.
    """

    def __init__(self, alive: list[int], limits: ScheduleLimits) -> None:
        self._alive, self._in_flight = LiveBytes(alive), LiveBytes([0] * len(alive))
        self._peak = math.inf if limits.peak is None else limits.peak
        self._limit = math.inf if limits.in_flight is None else limits.in_flight

    def take_earliest(self, footprint: Footprint, wish: int, wait: int) -> int:
        """Return the first launch, from step ``wish`` on, with memory until ``wait``; take that."""
        launch = wait
        while launch > wish and self._fits(footprint, launch - 1):
            launch -= 1
        self._take(footprint, launch, wait)
        return launch

    def take_latest(self, footprint: Footprint, launch: int, wish: int) -> int:
        """Return the last wait, up to step ``wish``, with memory from ``launch`` on; take that."""
        wait = launch
        while wait < wish and self._fits(footprint, wait):
            wait += 1
        self._take(footprint, launch, wait)
        return wait

    def _fits(self, footprint: Footprint, step: int) -> bool:
        in_flight_bytes, held_bytes = footprint
        return (
            self._in_flight.by_step[step] + in_flight_bytes <= self._limit
            and self._alive.by_step[step] + held_bytes <= self._peak
        )

    def _take(self, footprint: Footprint, launch: int, wait: int) -> None:
        self._in_flight.add(Span(launch, wait, footprint.in_flight_bytes))
        self._alive.add(Span(launch, wait, footprint.held_bytes))
