"""Place the waits of reductions as late as memory allows.

Reduced gradients are needed only at the graph's end. An earlier wait frees what was sent, but
stalls compute if the link is slower than predicted. So waits depend on bytes and launch order,
never on predicted times.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from .live_bytes import Footprint
from .time_points import launches, running, waits


class Sent(NamedTuple):
    """A reduction that has been launched.

    Attributes:
        launch: step before which it is launched.
        due: last step before which it can be waited for.
        footprint: its changes to the bytes alive.
    """

    launch: int
    due: int
    footprint: Footprint

    def with_copy(self) -> Sent:
        """Return this reduction with a second copy of what is sent, from launch to wait."""
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
    """Return the step before which each reduction is waited for, in O(steps + reductions).

    Reductions are waited for in launch order, or where they are due.

    Args:
        sent: reductions in launch order.
        alive: bytes alive at each point in time if each is waited for at its launch.
        max_alive: maximum bytes alive while a reduction stays in flight longer than that.
        in_flight: bytes of other buckets between launch and wait, in each step.
        max_in_flight: maximum bytes of all buckets between launch and wait.
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
        sent: bytes that the waits will free, minus the memory for casts of the results.
        received: bytes that become free once the results are cast.
        casting: received bytes that are still alive while the results of this step's waits are
            cast.
        in_flight: bytes of full gradients.
    """

    def __init__(self, sent: Sequence[Sent]) -> None:
        self._all = sent
        self.queue: deque[int] = deque()
        self.sent = self.received = self.casting = self.in_flight = 0

    def launch(self, i: int) -> None:
        self.queue.append(i)
        self._add(self._all[i].footprint, 1)

    def wait(self, i: int, step: int) -> int:
        """Wait for a reduction before ``step``; return ``step``."""
        self.queue.remove(i)
        self._add(self._all[i].footprint, -1)
        if self._all[i].launch < step:
            self.casting -= self._all[i].footprint.after_wait
        return step

    def _add(self, footprint: Footprint, sign: int) -> None:
        self.sent -= sign * footprint.at_wait
        self.received -= sign * footprint.after_wait
        self.in_flight += sign * footprint.in_flight_bytes
