"""Find repeats in a sequence, such as the layers of a graph, and cut them into pieces.

    labels     a b | c d e f | c d e f | c d e f | g     one repeat: start 2, length 4, count 3
    cut at 8                       ^                     pieces: c d | e f | c d | e f | c d | e f

A cut before a label of one part is made in all parts. Pieces at the same offset are therefore equal
and share one compiled subgraph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .plan import Regions

_MAX_LENGTHS = 16  # part lengths tried in one range
# Microseconds to compile a node with Inductor, and to call a subgraph in a training step. Measured
# with a 24-layer GPT on a CPU. An additional kernel costs as much as a call.
_NODE_US, _CALL_US = 3000.0, 20.0
_NUM_STEPS = 1000  # training steps after which sharing must still have saved time


@dataclass(frozen=True)
class Repeat:
    """Consecutive equal parts of a sequence.

    Attributes:
        length: number of labels in a part.
        count: number of parts, two or more.
        rest: number of labels after the last part that continue the repeat.
    """

    start: int
    length: int
    count: int
    rest: int = 0

    @property
    def stop(self) -> int:
        """Position after the last part, excluding ``rest``."""
        return self.start + self.length * self.count

    @property
    def num_saved(self) -> int:
        """Number of labels in all parts but the first."""
        return self.length * (self.count - 1)


def saves_time(regions: Regions) -> bool:
    """Return whether regions save more compile time than they cost in ``_NUM_STEPS`` steps."""
    saved_us = (regions.num_nodes - regions.num_compiled) * _NODE_US
    return saved_us > (regions.num_calls + regions.num_lost_fusions) * _CALL_US * _NUM_STEPS


def find_repeats(labels: Sequence[int], least_saved: int) -> list[Repeat]:
    """Return repeats whose ``num_saved`` is at least ``least_saved``, in order.

    Their parts are disjoint, but the ``rest`` of a repeat may overlap with the next one.
    """
    # Choose the largest repeat, then the largest on either side of it, and so on.
    found: list[Repeat] = []
    pending = [(0, len(labels))]
    while pending:
        begin, end = pending.pop()
        best = _largest_repeat(labels[begin:end], begin, least_saved)
        if best is not None:
            found.append(best)
            pending += [(begin, best.start), (best.stop, end)]
    return sorted(found, key=lambda repeat: repeat.start)


def _largest_repeat(labels: Sequence[int], offset: int, least_saved: int) -> Repeat | None:
    runs = [_longest_run(labels, length, offset) for length in _likely_lengths(labels)]
    large = [run for run in runs if run.count > 1 and run.num_saved >= least_saved]
    # Ties go to the shorter parts, then to the first repeat.
    return max(large, key=lambda r: (r.stop + r.rest - r.start, -r.length, -r.start), default=None)


def _likely_lengths(labels: Sequence[int]) -> list[int]:
    """Return the most frequent distances between a label and its next occurrence."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for position, label in enumerate(labels):
        if label in last:
            distances[position - last[label]] += 1
        last[label] = position
    return [length for length, _ in distances.most_common(_MAX_LENGTHS)]


def _longest_run(labels: Sequence[int], length: int, offset: int) -> Repeat:
    """Return the longest repeat with parts of this length; ``count`` is 1 if nothing repeats."""
    longest, run, stop = 0, 0, 0
    for position in range(len(labels) - length):
        run = run + 1 if labels[position] == labels[position + length] else 0
        if run > longest:
            longest, stop = run, position + 1
    count, rest = divmod(longest + length, length)
    return Repeat(offset + stop - longest, length, count, rest)


def pieces(repeat: Repeat, cuts: Iterable[int]) -> list[range]:
    """Cut the parts of a repeat before ``cuts``; return the positions of each piece, in order."""
    cuts = list(cuts)
    # Start up to ``rest`` labels later if each part then has fewer pieces.
    shifted = [
        Repeat(repeat.start + shift, repeat.length, repeat.count)
        for shift in range(repeat.rest + 1)
    ]
    best = min(shifted, key=lambda moved: (len(_offsets(moved, cuts)), moved.start))
    offsets = _offsets(best, cuts)
    starts = range(best.start, best.stop, best.length)
    bounds = [start + offset for start in starts for offset in offsets]
    return [range(*pair) for pair in pairwise([*bounds, best.stop])]


def _offsets(repeat: Repeat, cuts: Iterable[int]) -> list[int]:
    """Return the offsets within a part at which it is cut; the first is 0."""
    inside = (cut - repeat.start for cut in cuts if repeat.start < cut < repeat.stop)
    return sorted({0, *(offset % repeat.length for offset in inside)})
