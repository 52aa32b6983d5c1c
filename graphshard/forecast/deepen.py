"""Derive the graphs of a deep model from the graphs of two shallow ones.

    short    | embed | layer | layer | head |
    longer   | embed | layer | layer | layer | head |          one more period of layers
    deep     | embed | layer | layer | layer | layer | .. | head |

The longer graph must equal the short one with a *segment* of steps inserted, and must show that
layers repeat (``_Segment.find``). Each further period inserts the segment once more. Other
quantities, such as the time to compute the fp8 scales of all weights, grow linearly, as do all
quantities of a graph that is a single step because it has no transfers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import TypeVar

import sympy

from ..planning.plan import PlanParam, Problem, Transfer, UserCollective
from .trace import HeldMemory, StepGraph, TracedStep

_Number = TypeVar("_Number", int, float, sympy.Expr)


class NotPeriodicError(ValueError):
    """Error raised if graphs do not grow linearly with the number of layers."""


@dataclass(frozen=True)
class Layers:
    """Name and repeating pattern of a model's layers."""

    path: str  # name of the list of layers; parameters are called ``path.0.*``, ``path.1.*``, ...
    period: int = 1  # number of layers in the repeating pattern

    def shifted(self, fqn: str, num_layers: int) -> str:
        """Return ``fqn`` with ``num_layers`` added to its layer number, if any."""
        pattern = rf"^({re.escape(self.path)}\.)(\d+)(?=\.)"
        return re.sub(pattern, lambda match: f"{match[1]}{int(match[2]) + num_layers}", fqn)


def deepen(short: TracedStep, longer: TracedStep, periods: int, layers: Layers) -> TracedStep:
    """Return the step of a model with ``periods`` more periods of layers than ``short``.

    Args:
        longer: step of a model with one more period than ``short``.

    Raises:
        NotPeriodicError: the graphs do not show that layers repeat, or the steps have different
            numbers of graphs.
    """
    if len(short.graphs) != len(longer.graphs):
        raise NotPeriodicError("models of different depth have different numbers of graphs")
    graphs = [_deepened(a, b, periods, layers) for a, b in zip(short.graphs, longer.graphs)]
    a, b = dataclasses.asdict(short.held), dataclasses.asdict(longer.held)
    held = HeldMemory(**{name: _extrapolate(a[name], b[name], periods) for name in a})
    saved = _extrapolate(short.saved, longer.saved, periods)
    return TracedStep(tuple(graphs), held, saved)


def _deepened(short: StepGraph, longer: StepGraph, periods: int, layers: Layers) -> StepGraph:
    if short.problem.transfers or longer.problem.num_steps != short.problem.num_steps:
        return _Segment.find(short, longer, layers).deepened(periods)
    # No transfers, as in forward with replicated parameters: the whole graph is one step.
    a, b = short.problem, longer.problem
    by_machine = short.compute_us.items()
    compute_us = {name: _grown(us, longer.compute_us[name], periods) for name, us in by_machine}
    problem = dataclasses.replace(
        a,
        compute_us=_grown(a.compute_us, b.compute_us, periods),
        fixed_bytes=_grown(a.fixed_bytes, b.fixed_bytes, periods),
        fixed_boundary_bytes=_grown(a.fixed_boundary_bytes, b.fixed_boundary_bytes, periods),
        peak_us=_extrapolate(a.peak_us, b.peak_us, periods),
    )
    return dataclasses.replace(
        short,
        problem=problem,
        compute_us=compute_us,
        input_bytes=_extrapolate(short.input_bytes, longer.input_bytes, periods),
    )


def _moved(user: UserCollective, num_steps: int) -> UserCollective:
    return dataclasses.replace(user, launch=user.launch + num_steps, wait=user.wait + num_steps)


def _extrapolate(short: _Number, longer: _Number, periods: int) -> _Number:
    return short + periods * (longer - short)


def _grown(a: Sequence[_Number], b: Sequence[_Number], periods: int) -> tuple[_Number, ...]:
    return tuple(_extrapolate(short, longer, periods) for short, longer in zip(a, b))


@dataclass(frozen=True)
class _Segment:
    """The steps that the longer graph has in addition to those of the short one."""

    short: StepGraph
    longer: StepGraph
    layers: Layers
    start: int  # first step; also the position in the short graph where the segment is inserted
    length: int
    transfers: range  # positions of the segment's transfers in the longer graph's problem
    # Each inserted segment adds these to the layer numbers of parameters that are transferred
    # before and after the segment.
    front_shift: int
    back_shift: int

    @classmethod
    def find(cls, short: StepGraph, longer: StepGraph, layers: Layers) -> _Segment:
        # Containing the short graph is not enough. The segment must also equal the steps just
        # before or just after it, and live bytes must grow by a constant amount in the period
        # before it, by another constant in the period after it, and linearly in between.
        length = longer.problem.num_steps - short.problem.num_steps
        for start in _likely_starts(short.problem, longer.problem, length):
            # Layers may run in order, as in forward, or in reverse, as in backward.
            for shifts in ((0, layers.period), (layers.period, 0)):
                transfers = _segment_transfers(longer.problem.transfers, start, length)
                if transfers is None:
                    continue
                segment = cls(short, longer, layers, start, length, transfers, *shifts)
                if segment._is_even() and segment._makes_longer():
                    return segment
        raise NotPeriodicError(f"the {short.kind} graph does not repeat layer by layer")

    def _is_even(self) -> bool:
        return all(
            _grows_evenly(*alive, self.start, self.length)
            for alive in _alive(self.short.problem, self.longer.problem)
        )

    def _makes_longer(self) -> bool:
        # Times and live bytes are those of the longer graph by construction.
        return (
            _named_transfers(self.deepened(1)) == _named_transfers(self.longer)
            and tuple(self._user_collectives(0)) == self.short.problem.user_collectives
        )

    def deepened(self, periods: int) -> StepGraph:
        short, longer = self.short.problem, self.longer.problem
        params = _Params()
        problem = Problem(
            graph=short.graph,
            steps=self._steps(short.steps, longer.steps, periods),
            compute_us=self._times(short.compute_us, longer.compute_us, periods),
            fixed_bytes=self._bytes(short.fixed_bytes, longer.fixed_bytes, periods),
            fixed_boundary_bytes=self._bytes(
                short.fixed_boundary_bytes, longer.fixed_boundary_bytes, periods
            ),
            transfers=tuple(self._transfers(params, periods)),
            user_collectives=tuple(self._user_collectives(periods)),
            peak_us=_extrapolate(short.peak_us, longer.peak_us, periods),
        )
        return StepGraph(
            params=tuple(params.params),
            problem=problem,
            compute_us={
                name: self._times(us, self.longer.compute_us[name], periods)
                for name, us in self.short.compute_us.items()
            },
            input_bytes=_extrapolate(self.short.input_bytes, self.longer.input_bytes, periods),
        )

    def _user_collectives(self, periods: int) -> Iterator[UserCollective]:
        """Yield the user collectives of a graph with ``periods`` copies of the segment."""
        users, stop = self.longer.problem.user_collectives, self.start + self.length
        added = (periods - 1) * self.length
        for user in users:
            if user.launch < self.start:
                late = added if user.wait >= stop else 0
                yield dataclasses.replace(user, wait=user.wait + late)
        for copy in range(periods):
            for user in users:
                if self.start <= user.launch < stop:
                    yield _moved(user, copy * self.length)
        for user in users:
            if user.launch >= stop:
                yield _moved(user, added)

    def _steps(self, short: Sequence[str], longer: Sequence[str], periods: int) -> tuple[str, ...]:
        segment = longer[self.start : self.start + self.length]
        return (*short[: self.start], *(list(segment) * periods), *short[self.start :])

    def _times(
        self, short: Sequence[float], longer: Sequence[float], periods: int
    ) -> tuple[float, ...]:
        stop = self.start + self.length
        before = _grown(short[: self.start], longer, periods)
        after = _grown(short[self.start :], longer[stop:], periods)
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
        before = _grown(short[: self.start], longer, periods)
        after = _grown(short[self.start :], longer[stop:], periods)
        return (*before, *inserted, *after)

    def _transfers(self, params: _Params, periods: int) -> Iterator[Transfer]:
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
                yield self._moved(transfer, transfer, periods, param, copy)
        rest = zip(self.short.problem.transfers[first.start :], transfers[first.stop :])
        for transfer, other in rest:
            param = params.add(self.short, transfer, self.layers, periods * back)
            yield self._moved(transfer, other, periods, param)

    def _moved(
        self,
        transfer: Transfer,
        other: Transfer,
        periods: int,
        param: int | None,
        copy: int | None = None,
    ) -> Transfer:
        """Return ``transfer`` with its steps, sizes and parameter in the deep graph.

        Args:
            transfer: transfer of the short graph or of the segment.
            other: the transfer's counterpart in the longer graph, from which sizes grow.
            param: position of the transfer's parameter in the deep graph, if any.
            copy: index of the segment's copy; None for a transfer of the short graph.
        """
        if copy is None:
            stop, inside, after = self.start, 0, periods  # the short graph has no segment
        else:
            stop, inside, after = self.start + self.length, copy, periods - 1

        def moved(step: int, offset: int = 0) -> int:
            if step < self.start + offset:
                return step
            return step + (inside if step < stop + offset else after) * self.length

        # A gradient that is ready at ``start`` was completed before the segment: it does not move.
        ready = moved(transfer.ready, offset=int(not transfer.kind.is_fetch))
        return dataclasses.replace(
            transfer,
            ready=ready,
            due=ready if transfer.due == transfer.ready else moved(transfer.due),
            last=moved(transfer.last),
            param=param,
            # The transfer of all weights' fp8 scales grows with the number of layers.
            num_bytes=_extrapolate(transfer.num_bytes, other.num_bytes, periods),
            shard_bytes=_extrapolate(transfer.shard_bytes, other.shard_bytes, periods),
            grad_bytes=_extrapolate(transfer.grad_bytes, other.grad_bytes, periods),
        )


class _Params:
    def __init__(self) -> None:
        self.params: list[PlanParam] = []
        self._position: dict[str, int] = {}

    def add(self, graph: StepGraph, transfer: Transfer, layers: Layers, shift: int) -> int | None:
        if transfer.param is None:
            return None
        param = graph.params[transfer.param]
        fqn = layers.shifted(param.fqn, shift)
        if fqn not in self._position:
            self._position[fqn] = len(self.params)
            self.params.append(dataclasses.replace(param, fqn=fqn, input=len(self.params)))
        return self._position[fqn]


def _named_transfers(graph: StepGraph) -> list[tuple[str, Transfer]]:
    return [
        (
            "" if t.param is None else graph.params[t.param].fqn,
            dataclasses.replace(t, param=None),
        )
        for t in graph.problem.transfers
    ]


def _likely_starts(short: Problem, longer: Problem, length: int) -> list[int]:
    """Return the steps at which a segment may start, most likely first."""
    a, b = short.compute_us, longer.compute_us
    starts = [
        start for start in range(1, len(a)) if length > 0 and _is_alike_around(a, b, start, length)
    ]
    # If two kinds of layers take equally long, times alone match a segment in either kind. In the
    # wrong kind, live bytes grow by more distinct amounts.
    growths = list(map(add, *(_num_growths(*alive, length) for alive in _alive(short, longer))))
    return sorted(starts, key=lambda start: (growths[start], abs(start - len(a) / 2)))


def _alive(short: Problem, longer: Problem) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
    return (
        (short.fixed_bytes, longer.fixed_bytes),
        (short.fixed_boundary_bytes, longer.fixed_boundary_bytes),
    )


def _num_growths(short: Sequence[int], longer: Sequence[int], length: int) -> list[int]:
    """Count, for each start, the distinct amounts by which bytes grow before and after it."""
    front = _num_distinct([b - a for a, b in zip(short, longer)])
    back = _num_distinct([b - a for a, b in zip(short, longer[length:])][::-1])
    return list(map(add, front, back[::-1]))


def _num_distinct(values: Sequence[int]) -> list[int]:
    seen: set[int] = set()
    counts = [0]
    for value in values:
        seen.add(value)
        counts.append(len(seen))
    return counts


def _is_alike_around(
    short: Sequence[float], longer: Sequence[float], start: int, length: int
) -> bool:
    """Return whether times next to a segment match ``short``, and one side repeats the segment."""
    stop, least = start + length, max(0, start - length)
    if not _alike(short[least:start], longer[least:start]):
        return False
    if not _alike(short[start : start + length], longer[stop : stop + length]):
        return False
    segment, after = longer[start:stop], longer[stop : stop + length]
    before = longer[start - length : start] if start >= length else after
    return _alike(segment, before) or _alike(segment, after)


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    # Rounding depends on the order in which times were summed.
    return len(a) == len(b) and all(abs(x - y) <= 1e-6 * (1 + abs(x)) for x, y in zip(a, b))


def _segment_transfers(transfers: Sequence[Transfer], start: int, length: int) -> range | None:
    """Return the positions of a segment's transfers, or None unless they are contiguous."""
    stop = start + length
    own = [
        i
        for i, t in enumerate(transfers)
        if (start <= t.due < stop if t.kind.is_fetch else start < t.ready <= stop)
    ]
    return range(own[0], own[-1] + 1) if own and own[-1] - own[0] == len(own) - 1 else None


def _growths(short: Sequence[int], longer: Sequence[int], start: int, stop: int) -> tuple[int, int]:
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
