"""The graphs of a deep model, from those of two shallow ones: `deepen`; pure.

    short    | embed | layer | layer | head |
    longer   | embed | layer | layer | layer | head |          one period of layers more
    deep     | embed | layer | layer | layer | layer | .. | head |

The longer graph has to be the shorter one with a *segment* of steps inserted. That proves little by
itself, so the segment must also equal the steps in front of it or behind it; and what is alive must
have grown by one amount right in front of the segment, by one behind it, and evenly in between.
Then more layers insert more segments, and whatever else grows (such as a step that computes the
scales of all weights in fp8) grows by the same amounts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import TypeVar

from ..kinds import TransferKind
from ..planning.plan import PlanParam, Problem, Transfer
from .trace import Held, TracedGraphOfStep, TracedStep

_Number = TypeVar("_Number", int, float)


class NotPeriodicError(ValueError):
    """Error of graphs that more layers do not prolong evenly."""


@dataclass(frozen=True)
class Layers:
    """Layers of a model, by name.

    Attributes:
        path: of the list that holds them: parameters are named ``path.0.``, ``path.1.``, ...
        period: layers after which they repeat.
    """

    path: str
    period: int = 1

    def shifted(self, fqn: str, num_layers: int) -> str:
        """Return the name of the same parameter so many layers further."""
        pattern = rf"^({re.escape(self.path)}\.)(\d+)(?=\.)"
        return re.sub(pattern, lambda found: f"{found[1]}{int(found[2]) + num_layers}", fqn)


def deepen(short: TracedStep, longer: TracedStep, periods: int, layers: Layers) -> TracedStep:
    """Return the step of the model that has ``periods`` periods of layers more than ``short``.

    Args:
        longer: has one period more than ``short``.

    Raises:
        NotPeriodicError: the graphs do not show that layers repeat.
    """
    if len(short.graphs) != len(longer.graphs):
        raise NotPeriodicError("models of different depth have different numbers of graphs")
    graphs = [_deepened(a, b, periods, layers) for a, b in zip(short.graphs, longer.graphs)]
    a, b = dataclasses.asdict(short.held), dataclasses.asdict(longer.held)
    held = Held(**{name: _grown(a[name], b[name], periods) for name in a})
    return TracedStep(tuple(graphs), held)


def _deepened(
    short: TracedGraphOfStep, longer: TracedGraphOfStep, periods: int, layers: Layers
) -> TracedGraphOfStep:
    if short.problem.transfers or longer.problem.num_steps != short.problem.num_steps:
        return _Segment.find(short, longer, layers).deepened(periods)
    # Nothing travels, as in the forward of replicated parameters: all of it is one step.
    a, b = short.problem, longer.problem

    def grown(short: Sequence[_Number], longer: Sequence[_Number]) -> tuple[_Number, ...]:
        return tuple(_grown(x, y, periods) for x, y in zip(short, longer))

    compute_us = {n: grown(us, longer.compute_us[n]) for n, us in short.compute_us.items()}
    problem = dataclasses.replace(
        a,
        compute_us=grown(a.compute_us, b.compute_us),
        other_bytes=grown(a.other_bytes, b.other_bytes),
        between_bytes=grown(a.between_bytes, b.between_bytes),
    )
    return dataclasses.replace(
        short,
        problem=problem,
        compute_us=compute_us,
        input_bytes=_grown(short.input_bytes, longer.input_bytes, periods),
        num_flops=_grown(short.num_flops, longer.num_flops, periods),
    )


def _grown(short: _Number, longer: _Number, periods: int) -> _Number:
    return short + periods * (longer - short)


@dataclass(frozen=True)
class _Segment:
    """The steps that a longer graph has more than a short one.

    Attributes:
        start: the first of them; in the short graph, the step in front of which they go.
        length: how many.
        transfers: positions in the longer problem of those that belong to them.
    """

    short: TracedGraphOfStep
    longer: TracedGraphOfStep
    layers: Layers
    start: int
    length: int
    transfers: range
    front_shift: int
    back_shift: int

    @classmethod
    def find(cls, short: TracedGraphOfStep, longer: TracedGraphOfStep, layers: Layers) -> _Segment:
        """Return a segment with which the short graph becomes the longer one.

        Raises:
            NotPeriodicError: there is none.
        """
        length = longer.problem.num_steps - short.problem.num_steps
        for start in _likely_starts(short.problem, longer.problem, length):
            for shifts in ((0, layers.period), (layers.period, 0)):
                transfers = _of_segment(longer.problem.transfers, start, length)
                if transfers is None:
                    continue
                found = cls(short, longer, layers, start, length, transfers, *shifts)
                if found._is_even() and found._makes_longer():
                    return found
        raise NotPeriodicError(f"the {short.kind} graph does not repeat layer by layer")

    def _is_even(self) -> bool:
        """Return whether memory grows evenly along the longer graph."""
        return all(
            _grows_evenly(*alive, self.start, self.length)
            for alive in _alive(self.short.problem, self.longer.problem)
        )

    def _makes_longer(self) -> bool:
        made, seen = self.deepened(1), self.longer
        return (
            _named_transfers(made) == _named_transfers(seen)
            and made.problem.other_bytes == seen.problem.other_bytes
            and made.problem.between_bytes == seen.problem.between_bytes
            and all(_alike(made.compute_us[n], seen.compute_us[n]) for n in seen.compute_us)
        )

    def deepened(self, periods: int) -> TracedGraphOfStep:
        """Return the short graph with ``periods`` segments inserted."""
        short, longer = self.short.problem, self.longer.problem
        params = _Params()
        problem = Problem(
            graph=short.graph,
            steps=self._steps(short.steps, longer.steps, periods),
            compute_us=self._times(short.compute_us, longer.compute_us, periods),
            other_bytes=self._bytes(short.other_bytes, longer.other_bytes, periods),
            between_bytes=self._bytes(short.between_bytes, longer.between_bytes, periods),
            transfers=tuple(self._transfers(params, periods)),
        )
        return TracedGraphOfStep(
            params=tuple(params.params),
            problem=problem,
            compute_us={
                name: self._times(us, self.longer.compute_us[name], periods)
                for name, us in self.short.compute_us.items()
            },
            input_bytes=_grown(self.short.input_bytes, self.longer.input_bytes, periods),
            num_flops=_grown(self.short.num_flops, self.longer.num_flops, periods),
        )

    def _steps(self, short: Sequence[str], longer: Sequence[str], periods: int) -> tuple[str, ...]:
        segment = longer[self.start : self.start + self.length]
        return (*short[: self.start], *(list(segment) * periods), *short[self.start :])

    def _times(
        self, short: Sequence[float], longer: Sequence[float], periods: int
    ) -> tuple[float, ...]:
        stop = self.start + self.length
        before = map(_grown, short[: self.start], longer, [periods] * self.start)
        after = map(_grown, short[self.start :], longer[stop:], [periods] * len(longer))
        return (*before, *(list(longer[self.start : stop]) * periods), *after)

    def _bytes(self, short: Sequence[int], longer: Sequence[int], periods: int) -> tuple[int, ...]:
        stop = self.start + self.length
        front, back = _growths(short, longer, self.start, stop)
        segment = longer[self.start : stop]
        inserted = [
            value + (periods - 1) * front + copy * (back - front)
            for copy in range(periods)
            for value in segment
        ]
        before = [_grown(a, b, periods) for a, b in zip(short[: self.start], longer)]
        after = [_grown(a, b, periods) for a, b in zip(short[self.start :], longer[stop:])]
        return (*before, *inserted, *after)

    def _transfers(self, params: _Params, periods: int) -> Iterator[Transfer]:
        """Yield the transfers, each with its steps moved and its parameter renamed."""
        front, back = self.front_shift, self.back_shift
        first, transfers = self.transfers, self.longer.problem.transfers
        for transfer, other in zip(self.short.problem.transfers[: first.start], transfers):
            param = params.add(self.short, transfer, self.layers, periods * front)
            yield self._moved(transfer, other, periods, param)
        for copy in range(periods):
            shift = (periods - 1) * front + copy * (back - front)
            for i in self.transfers:
                transfer = transfers[i]
                param = params.add(self.longer, transfer, self.layers, shift)
                yield self._copied(transfer, copy, periods, param)
        rest = zip(self.short.problem.transfers[first.start :], transfers[first.stop :])
        for transfer, other in rest:
            param = params.add(self.short, transfer, self.layers, periods * back)
            yield self._moved(transfer, other, periods, param)

    def _moved(
        self, transfer: Transfer, other: Transfer, periods: int, param: int | None
    ) -> Transfer:
        """Return a transfer of the short graph where ``periods`` segments are inserted.

        Args:
            other: the same one in the longer graph: scales of weights are more there.
        """
        added = periods * self.length

        def moved(step: int, border: int) -> int:
            return step + added if step >= border else step

        # What the step in front of the segment completes is ready at the segment's first step.
        ready = moved(transfer.ready, self.start + (not _gathers(transfer)))
        due = ready if transfer.due == transfer.ready else moved(transfer.due, self.start)
        last = moved(transfer.last, self.start)
        return dataclasses.replace(
            transfer,
            ready=ready,
            due=due,
            last=last,
            param=param,
            num_bytes=_grown(transfer.num_bytes, other.num_bytes, periods),
            shard_bytes=_grown(transfer.shard_bytes, other.shard_bytes, periods),
            grad_bytes=_grown(transfer.grad_bytes, other.grad_bytes, periods),
        )

    def _copied(self, transfer: Transfer, copy: int, periods: int, param: int | None) -> Transfer:
        """Return a transfer of the segment in one of its copies."""
        stop = self.start + self.length

        def moved(step: int, begin: int, end: int) -> int:
            if step < begin:
                return step
            return step + (copy if step < end else periods - 1) * self.length

        offset = int(not _gathers(transfer))
        ready = moved(transfer.ready, self.start + offset, stop + offset)
        due = ready if transfer.due == transfer.ready else moved(transfer.due, self.start, stop)
        last = moved(transfer.last, self.start, stop)
        return dataclasses.replace(transfer, ready=ready, due=due, last=last, param=param)


class _Params:
    """Parameters of a deep graph, in the order in which transfers name them."""

    def __init__(self) -> None:
        self.params: list[PlanParam] = []
        self._position: dict[str, int] = {}

    def add(
        self, graph: TracedGraphOfStep, transfer: Transfer, layers: Layers, shift: int
    ) -> int | None:
        if transfer.param is None:
            return None
        param = graph.params[transfer.param]
        fqn = layers.shifted(param.fqn, shift)
        if fqn not in self._position:
            self._position[fqn] = len(self.params)
            self.params.append(dataclasses.replace(param, fqn=fqn, input=len(self.params)))
        return self._position[fqn]


def _named_transfers(graph: TracedGraphOfStep) -> list[tuple[str, Transfer]]:
    return [
        (
            "" if t.param is None else graph.params[t.param].fqn,
            dataclasses.replace(t, param=None),
        )
        for t in graph.problem.transfers
    ]


def _likely_starts(short: Problem, longer: Problem, length: int) -> list[int]:
    """Return where a segment may begin: those with the fewest growths first, then the middle ones.

    Where layers of two kinds take as long in a graph, a segment seems to fit among either kind. But
    among the other kind what is alive would grow by another amount in each part of the graph.
    """
    a, b = short.compute_us, longer.compute_us
    starts = [
        start for start in range(1, len(a)) if length > 0 and _is_alike_around(a, b, start, length)
    ]

    growths = list(map(add, *(_num_growths(*alive, length) for alive in _alive(short, longer))))
    return sorted(starts, key=lambda start: (growths[start], abs(start - len(a) / 2)))


def _alive(short: Problem, longer: Problem) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
    return (
        (short.other_bytes, longer.other_bytes),
        (short.between_bytes, longer.between_bytes),
    )


def _num_growths(short: Sequence[int], longer: Sequence[int], length: int) -> list[int]:
    """Return, for each start of a segment, by how many amounts bytes grow in front and behind."""
    front = _num_distinct([b - a for a, b in zip(short, longer)])
    behind = _num_distinct([b - a for a, b in zip(short, longer[length:])][::-1])
    return list(map(add, front, behind[::-1]))


def _num_distinct(values: Sequence[int]) -> list[int]:
    """Return how many different values are among the first ones: of none, of one, and so on."""
    seen: set[int] = set()
    counts = [0]
    for value in values:
        seen.add(value)
        counts.append(len(seen))
    return counts


def _is_alike_around(
    short: Sequence[float], longer: Sequence[float], start: int, length: int
) -> bool:
    """Return whether a segment takes as long as its neighbour, and those beside it as before."""
    stop, least = start + length, max(0, start - length)
    if not _alike(short[least:start], longer[least:start]):
        return False
    if not _alike(short[start : start + length], longer[stop : stop + length]):
        return False
    segment, behind = longer[start:stop], longer[stop : stop + length]
    before = longer[start - length : start] if start >= length else behind
    return _alike(segment, before) or _alike(segment, behind)


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether times are equal but for the order in which they were added up."""
    return len(a) == len(b) and all(abs(x - y) <= 1e-6 * (1 + abs(x)) for x, y in zip(a, b))


def _of_segment(transfers: Sequence[Transfer], start: int, length: int) -> range | None:
    """Return the positions of the transfers that belong to a segment; None: they are scattered."""
    stop = start + length
    own = [
        i
        for i, t in enumerate(transfers)
        if (start <= t.due < stop if _gathers(t) else start < t.ready <= stop)
    ]
    if own and own[-1] - own[0] + 1 != len(own):
        return None
    return range(own[0], own[-1] + 1) if own else None


def _gathers(transfer: Transfer) -> bool:
    return transfer.kind == TransferKind.ALL_GATHER


def _growths(short: Sequence[int], longer: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return by how much bytes have grown right in front of a segment, and right behind it."""
    return longer[start - 1] - short[start - 1], longer[stop] - short[start]


def _grows_evenly(short: Sequence[int], longer: Sequence[int], start: int, length: int) -> bool:
    stop = start + length
    front, back = _growths(short, longer, start, stop)
    if any(longer[i] - short[i] != front for i in range(max(0, start - length), start)):
        return False
    after = range(start, min(start + length, len(short)))
    if any(longer[i + length] - short[i] != back for i in after):
        return False
    pairs = [(i - length, i) for i in range(start, stop)]
    if start < length:
        pairs = [(i, i + length) for i in range(start, stop) if i + length < len(longer)]
    return bool(pairs) and all(longer[j] - longer[i] == back - front for i, j in pairs)
