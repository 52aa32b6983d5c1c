"""Limits of a schedule, and the memory that they leave while buckets are placed."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .live_bytes import Footprint, LiveBytes, Span, launches, running, waits

Reduce = Literal["ring", "exchange", "auto"]

MEMORY_BUDGET, IN_FLIGHT_LIMIT = "memory budget", "in-flight limit"  # as shown in tables


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits of a schedule in bytes, and how it reduces gradients. Field names are keys in dumps.

    Attributes:
        cap: maximum size of a bucket; a larger tensor gets a separate bucket. If None, the search
            chooses sizes.
        in_flight: maximum size of all buckets between launch and wait, or None for no limit; a
            bucket that is waited for at its launch may exceed it.
        peak: maximum bytes alive at any point in time, or None for no limit.
        reduce: collectives that may reduce gradients with a ``Transfer.exchange_dtype``: "ring",
            "exchange", or "auto" for whichever is faster for each bucket.
    """

    cap: int | None = None
    in_flight: int | None = None
    peak: int | None = None
    reduce: Reduce = "ring"


class FreeMemory:
    """Memory left at each point in time while buckets are placed one by one.

    Args:
        alive: bytes alive at each point in time if every bucket that is still to be placed is
            waited for at its launch.
        in_flight: bytes already between launch and wait in each step; zero by default.
    """

    def __init__(
        self, alive: Sequence[int], limits: ScheduleLimits, in_flight: Sequence[int] | None = None
    ) -> None:
        self._alive = LiveBytes(alive)
        self._in_flight = LiveBytes([0] * (len(alive) // 3) if in_flight is None else in_flight)
        self._peak = math.inf if limits.peak is None else limits.peak
        self._limit = math.inf if limits.in_flight is None else limits.in_flight

    def take_earliest(self, footprint: Footprint, wish: int, wait: int) -> int:
        """Reserve memory for a launch as early as the limits allow; return its step.

        The launch moves earlier from ``wait``, one step at a time, but not past ``wish``. A launch
        at ``wait`` is always allowed.
        """
        launch = wait
        while launch > wish and not self.limit_before(footprint, launch):
            launch -= 1
        self._alive.add(Span(launches(launch), launches(wait), footprint.at_launch))
        self._in_flight.add(Span(launch, wait, footprint.in_flight_bytes))
        return launch

    def take_latest(self, footprint: Footprint, launch: int, wish: int) -> int:
        """Reserve memory for a wait as late as the limits allow; return its step.

        The wait moves later from ``launch``, one step at a time, but not past ``wish``. A wait at
        ``launch`` is always allowed.
        """
        wait = launch
        while wait < wish and not self.limit_after(footprint, wait):
            for span in _of_a_later_wait(footprint, wait):
                self._alive.add(span)
            wait += 1
        self._in_flight.add(Span(launch, wait, footprint.in_flight_bytes))
        return wait

    def limit_before(self, footprint: Footprint, launch: int) -> str | None:
        """Return the limit that rules out a launch one step earlier, or None."""
        step = launch - 1
        held = Span(launches(step), launches(launch), footprint.at_launch)
        return self._limit_of(step, footprint, [held])

    def limit_after(self, footprint: Footprint, wait: int) -> str | None:
        """Return the limit that rules out a wait one step later, or None."""
        return self._limit_of(wait, footprint, _of_a_later_wait(footprint, wait))

    def _limit_of(self, step: int, footprint: Footprint, held: Sequence[Span]) -> str | None:
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


class Sent(NamedTuple):
    """A launched reduction.

    Attributes:
        launch: step before which it is launched.
        due: last step before which it can be waited for.
    """

    launch: int
    due: int
    footprint: Footprint

    def with_copy(self) -> Sent:
        # The process group's backend holds a copy of the sent data from launch to wait.
        footprint = self.footprint
        at_wait = footprint.at_wait - footprint.in_flight_bytes
        return self._replace(footprint=footprint._replace(at_wait=at_wait))


def place_waits(
    sent: Sequence[Sent],
    alive: Sequence[int],
    max_alive: float,
    in_flight: Sequence[int],
    max_in_flight: float,
) -> list[int]:
    """Return the step before which each reduction is waited for.

    Args:
        sent: reductions in launch order. Each is waited for when it is due, or before that, the
            oldest first, to stay within the limits.
        alive: bytes alive at each point in time if each reduction is waited for at its launch.
        max_alive: maximum bytes alive while reductions stay in flight after their launch.
        in_flight: bytes of other buckets between launch and wait, in each step.
        max_in_flight: maximum size of all buckets between launch and wait.
    """
    num_steps = len(in_flight)
    placed = [num_steps] * len(sent)
    launched, due = defaultdict(list), defaultdict(list)
    for i, reduction in enumerate(sent):
        launched[reduction.launch].append(i)
        due[reduction.due].append(i)
    held = _Held(sent)
    for step in range(num_steps):
        before_waits = alive[waits(step)]
        after_waits = max(alive[running(step)], alive[launches(step + 1)])
        next_waits = alive[waits(step + 1)]
        held.casting = 0
        for i in launched[step]:
            held.launch(i)
        for i in due[step]:
            if placed[i] == num_steps:  # not waited for earlier to free memory
                placed[i] = held.wait(i, step)
        while held.queue and not (
            before_waits + held.sent + held.casting <= max_alive
            and after_waits + held.sent + held.received <= max_alive
            and next_waits + held.received <= max_alive
            and in_flight[step] + held.in_flight <= max_in_flight
        ):
            oldest = held.queue[0]
            placed[oldest] = held.wait(oldest, step)
    return placed


class _Held:
    """Bytes that reductions hold because they are not waited for at their launch.

    Attributes:
        queue: positions of the reductions in flight, the oldest first.
        sent: bytes that the waits will free, minus those allocated for casts and sums.
        received: bytes freed once the results are cast, summed or sent to the host.
        casting: received bytes still alive while the results of this step's waits are cast.
        in_flight: total size of the reductions in flight.
    """

    def __init__(self, sent: Sequence[Sent]) -> None:
        self._all = sent
        self.queue: deque[int] = deque()
        self.sent = self.received = self.casting = self.in_flight = 0

    def launch(self, i: int) -> None:
        self.queue.append(i)
        self._add(self._all[i].footprint, 1)

    def wait(self, i: int, step: int) -> int:
        self.queue.remove(i)
        self._add(self._all[i].footprint, -1)
        if self._all[i].launch < step:
            self.casting -= self._all[i].footprint.after_wait
        return step

    def _add(self, footprint: Footprint, sign: int) -> None:
        self.sent -= sign * footprint.at_wait
        self.received -= sign * footprint.after_wait
        self.in_flight += sign * footprint.in_flight_bytes
