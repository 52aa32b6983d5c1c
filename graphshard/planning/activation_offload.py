"""Chooses activations that wait for backward in host memory, to keep a budget or to save time.

Some have to leave because a graph has no memory for them. More may leave, since a schedule that has
memory left launches gathers earlier. So the planner tries a few amounts, and schedules both graphs
for each.

    budget   ├───────────────── needed ─────────────┤     all gathers exposed
             ├────────── needed ─────────┤ ahead ───┤     hidden behind compute, if the copies are
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ..kinds import TransferKind
from .host_copies import add_host_copies, without_host_copies
from .live_bytes import least_by_moment, other_by_moment, smallest_peak, with_other_bytes
from .memory_budget import ScheduleLimits
from .moments import LiveBytes, Span, launches, num_moments
from .plan import Problem, Transfer
from .search import find_schedule
from .simulate import TransferCostModel, clock

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Parts of the budget that a graph's least memory may take; the rest is for gathering earlier. All
are tried.

Judged: each share costs a search of both graphs without refinement, and times differ little between
neighbours. Fewer shares would miss a good one; more take longer to plan.
"""
LEAST_GAIN = 0.02
"""The part of the predicted time that must be saved for more activations to leave than have to.

Judged: predictions are no better than that. If it is larger, fewer activations leave, and gathers
stay exposed that could hide; at 0 copies load the bus to the host for a gain that may be none.
"""


class SavedActivation(NamedTuple):
    """An activation that is saved for backward.

    Attributes:
        last: the step of the forward graph that uses it last.
        first: the step of the backward graph that uses it first.
        until: the step of the backward graph that uses it last.
    """

    num_bytes: int
    last: int
    first: int
    until: int


def choose_offloaded(
    forward: Problem,
    backward: Problem,
    saved: Sequence[SavedActivation],
    limits: ScheduleLimits,
    cost_model: TransferCostModel,
) -> list[int]:
    """Return the positions in ``saved`` of the activations to offload.

    They are enough to keep ``limits.peak`` in each graph, as far as that is possible; none if there
    is no such limit. More are offloaded where gathers are then launched earlier, and time is saved.
    """
    if limits.peak is None:
        return []
    budgets = [int(limits.peak * share) for share in SHARES]
    amounts = (tuple(_offload_enough(forward, backward, saved, budget)) for budget in budgets)
    choices = list(dict.fromkeys(amounts))
    times_us: dict[tuple[int, ...], float] = {}
    for chosen in choices if len(choices) > 1 else ():
        problems = _offloaded(forward, backward, [saved[i] for i in chosen])
        peaks = [smallest_peak(without_host_copies(problem)) for problem in problems]
        if max(peaks) <= limits.peak:
            times_us[chosen] = sum(_predicted_us(p, limits, cost_model) for p in problems)
    if not times_us:
        # There is one choice, or none keeps the budget: then scheduling reports what is missing.
        return list(choices[0])
    within_us = min(times_us.values()) * (1 + LEAST_GAIN)
    return list(next(chosen for chosen, us in times_us.items() if us <= within_us))


class _Absence(NamedTuple):
    """The moments of both graphs in which an activation need not be on the device."""

    forward: Span
    backward: Span


def _absence(activation: SavedActivation, forward_steps: int) -> _Absence:
    return _Absence(
        Span(launches(activation.last + 1), num_moments(forward_steps), activation.num_bytes),
        Span(0, launches(activation.first), activation.num_bytes),
    )


def _offload_enough(
    forward: Problem, backward: Problem, saved: Sequence[SavedActivation], budget: int
) -> list[int]:
    """Return positions of activations without which each graph's least memory is within ``budget``.

    Activations that backward needs last come first, since the most time hides their copies.
    """
    in_forward, in_backward = map(LiveBytes, map(least_by_moment, (forward, backward)))
    chosen = []
    for i in sorted(range(len(saved)), key=lambda i: (-saved[i].first, saved[i].last)):
        absence = _absence(saved[i], forward.num_steps)
        if in_forward.exceeds(budget, absence.forward) or in_backward.exceeds(
            budget, absence.backward
        ):
            chosen.append(i)
            in_forward.remove(absence.forward)
            in_backward.remove(absence.backward)
    return sorted(chosen)


def _offloaded(
    forward: Problem, backward: Problem, chosen: Sequence[SavedActivation]
) -> tuple[Problem, Problem]:
    """Return both problems as they are read from graphs in which ``chosen`` is offloaded."""
    end = forward.num_steps
    offloads = [
        _host_copy(
            TransferKind.COPY_TO_HOST,
            activation.num_bytes,
            ready=activation.last + 1,
            due=end,
            last=end - 1,
        )
        for activation in chosen
    ]
    reloads = [
        _host_copy(
            TransferKind.COPY_TO_DEVICE,
            activation.num_bytes,
            ready=0,
            due=activation.first,
            last=activation.until,
        )
        for activation in chosen
    ]
    # Their transfers account for them from the last use in forward to the last one in backward.
    saved = [_absence(activation, end).forward for activation in chosen]
    taken = [Span(0, launches(a.until + 1), a.num_bytes) for a in chosen]
    return _with_transfers(forward, offloads, saved), _with_transfers(backward, reloads, taken)


def _host_copy(kind: TransferKind, num_bytes: int, *, ready: int, due: int, last: int) -> Transfer:
    return Transfer(
        param=None,
        kind=kind,
        num_bytes=num_bytes,
        dtype="",
        shard_bytes=0,
        casts=False,
        group="",
        world=1,
        ready=ready,
        due=due,
        last=last,
    )


def _with_transfers(
    problem: Problem, transfers: Sequence[Transfer], replaced: Sequence[Span]
) -> Problem:
    """Return ``problem`` with ``transfers`` in place of the bytes of ``replaced``."""
    other = LiveBytes(other_by_moment(problem))
    for span in replaced:
        other.remove(span)
    problem = with_other_bytes(problem, other.by_moment)
    return dataclasses.replace(problem, transfers=(*problem.transfers, *transfers))


def _predicted_us(problem: Problem, limits: ScheduleLimits, cost_model: TransferCostModel) -> float:
    collectives = without_host_copies(problem)
    buckets = find_schedule(collectives, cost_model, limits, refine=False)
    placed = add_host_copies(problem, buckets, cost_model, limits)
    return clock(problem, placed, cost_model).total_us
