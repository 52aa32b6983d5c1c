"""The limits of a schedule, and the memory left within them while buckets are placed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .live_bytes import Footprint
from .time_points import LiveBytes, Span, launches, running, waits

MEMORY_BUDGET, IN_FLIGHT_LIMIT = "memory budget", "in-flight limit"
"""Names of the limits, as shown in tables."""


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits of a schedule, in bytes; None: no limit. Field names are keys in dumps.

    Attributes:
        cap: maximum size of a bucket; a larger tensor travels alone. None: the search finds a size.
        in_flight: maximum bytes of all buckets between launch and wait; a single one may be larger.
        peak: maximum bytes alive at any point in time, everything included.
    """

    cap: int | None = None
    in_flight: int | None = None
    peak: int | None = None


class FreeMemory:
    """Memory left at each point in time while buckets are placed one after the other.

    Args:
        alive: bytes alive at each point in time if each of these buckets were waited for at its
            launch.
        in_flight: bytes between launch and wait in each step; None: none.
    """

    def __init__(
        self, alive: Sequence[int], limits: ScheduleLimits, in_flight: Sequence[int] | None = None
    ) -> None:
        self._alive = LiveBytes(alive)
        self._in_flight = LiveBytes([0] * (len(alive) // 3) if in_flight is None else in_flight)
        self._peak = math.inf if limits.peak is None else limits.peak
        self._limit = math.inf if limits.in_flight is None else limits.in_flight

    def take_earliest(self, footprint: Footprint, wish: int, wait: int) -> int:
        """Reserve memory for the earliest launch from step ``wish`` on; return that step."""
        launch = wait
        while launch > wish and not self.limit_before(footprint, launch):
            launch -= 1
        self._alive.add(Span(launches(launch), launches(wait), footprint.at_launch))
        self._in_flight.add(Span(launch, wait, footprint.in_flight_bytes))
        return launch

    def take_latest(self, footprint: Footprint, launch: int, wish: int) -> int:
        """Reserve memory for the latest wait up to step ``wish``; return that step."""
        wait = launch
        while wait < wish and not self.limit_after(footprint, wait):
            for span in _of_a_later_wait(footprint, wait):
                self._alive.add(span)
            wait += 1
        self._in_flight.add(Span(launch, wait, footprint.in_flight_bytes))
        return wait

    def limit_before(self, footprint: Footprint, launch: int) -> str | None:
        """Return the limit that rules out a launch one step earlier; None if there is none."""
        step = launch - 1
        held = Span(launches(step), launches(launch), footprint.at_launch)
        return self._limit_of(step, footprint, [held])

    def limit_after(self, footprint: Footprint, wait: int) -> str | None:
        """Return the limit that rules out a wait one step later; None if there is none."""
        return self._limit_of(wait, footprint, _of_a_later_wait(footprint, wait))

    def _limit_of(self, step: int, footprint: Footprint, held: Sequence[Span]) -> str | None:
        """Return the limit that a bucket in flight in ``step`` would exceed; None if none."""
        if not all(self._alive.has_room(span, self._peak) for span in held):
            return MEMORY_BUDGET
        in_flight = Span(step, step + 1, footprint.in_flight_bytes)
        return None if self._in_flight.has_room(in_flight, self._limit) else IN_FLIGHT_LIMIT


def _of_a_later_wait(footprint: Footprint, wait: int) -> list[Span]:
    """Return the bytes that live longer if a wait moves from ``wait`` to the next step."""
    at_wait, after_wait = -footprint.at_wait, -footprint.after_wait
    return [
        Span(waits(wait), running(wait), at_wait),
        Span(running(wait), waits(wait + 1), at_wait + after_wait),
        Span(waits(wait + 1), running(wait + 1), after_wait),
    ]
