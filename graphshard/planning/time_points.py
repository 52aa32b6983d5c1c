"""Points in time in the run of a graph, and the bytes alive at them.

Each step has three points: buckets are launched before it (which packs what they send), buckets are
waited for before it (which copies out what they received), and its nodes run. The graph's end has
the first two:

    point    0 launches  1 waits  2 step 0   3 launches  4 waits  5 step 1   6 launches  7 waits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple


def launches(step: int) -> int:
    """Return the point at which buckets are launched before ``step``."""
    return 3 * step


def waits(step: int) -> int:
    """Return the point at which buckets are waited for before ``step``."""
    return 3 * step + 1


def running(step: int) -> int:
    """Return the point at which the nodes of ``step`` run."""
    return 3 * step + 2


def num_points(num_steps: int) -> int:
    """Return the number of points of a graph with ``num_steps`` steps."""
    return running(num_steps)


class Span(NamedTuple):
    """Bytes alive at points ``[begin, end)``, or in such steps; an empty range holds none."""

    begin: int
    end: int
    num_bytes: int


class ByteChanges:
    """Changes to the bytes alive at each point; their running sum is the bytes alive."""

    __slots__ = ("_changes",)

    def __init__(self, num_points: int) -> None:
        self._changes = [0] * (num_points + 1)

    def copy(self) -> ByteChanges:
        other = ByteChanges(0)
        other._changes = self._changes.copy()
        return other

    def add(self, point: int, num_bytes: int) -> None:
        """Add bytes from point ``point`` on; a negative number frees them."""
        self._changes[point] += num_bytes

    def by_point(self) -> Iterator[int]:
        """Yield the bytes alive at each point."""
        return islice(accumulate(self._changes), len(self._changes) - 1)


class LiveBytes:
    """Bytes alive at each point, changed span by span.

    Attributes:
        by_point: bytes alive at each point.
    """

    def __init__(self, by_point: Iterable[int]) -> None:
        self.by_point = list(by_point)

    def add(self, span: Span) -> None:
        for point in range(span.begin, span.end):
            self.by_point[point] += span.num_bytes

    def remove(self, span: Span) -> None:
        self.add(span._replace(num_bytes=-span.num_bytes))

    def has_room(self, span: Span, budget: float) -> bool:
        """Return whether ``span`` can be added with no point in it above ``budget`` bytes."""
        return not self.exceeds(budget - span.num_bytes, span)

    def exceeds(self, budget: float, span: Span) -> bool:
        """Return whether a point in the range of ``span`` holds more than ``budget`` bytes."""
        return any(num_bytes > budget for num_bytes in self.by_point[span.begin : span.end])


def sum_spans(spans: Iterable[Span], length: int) -> list[int]:
    """Return, for each of ``length`` points or steps, the bytes of all spans that include it."""
    changes = ByteChanges(length)
    for begin, end, num_bytes in spans:
        if begin < end:
            changes.add(begin, num_bytes)
            changes.add(end, -num_bytes)
    return list(changes.by_point())


def max_by_step(by_point: Sequence[int]) -> list[int]:
    """Return the maximum of each step's points; the last step includes the graph's end."""
    num_steps = len(by_point) // 3
    ends = [launches(step + 1) for step in range(num_steps - 1)] + [len(by_point)]
    return [max(by_point[launches(step) : end]) for step, end in zip(range(num_steps), ends)]
