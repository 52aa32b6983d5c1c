"""Which activations wait for backward in the host's memory, where that keeps a budget or saves time. Pure.

What has to leave is what one graph or the other has no room for. More may leave: a schedule that has room
launches gathers earlier. So a few amounts are tried, and both graphs scheduled for each.

    budget   ├───────────────── needed ─────────────┤           all gathers exposed
             ├────────── needed ─────────┤ ahead ───┤           hidden behind compute, if the copies are
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ..kinds import TransferKind
from .host_copies import add_host_copies, without_host_copies
from .memory_budget import ScheduleLimits
from .plan import Problem, Transfer
from .search import find_schedule, least_bytes, smallest_peak
from .simulate import TransferCostModel, clock

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Of a budget: what is tried for what has to be there; the schedule has the rest."""
LEAST_GAIN = 0.02
"""Of the predicted time; for less no more activations leave than have to."""


class SavedActivation(NamedTuple):
    """An activation that is saved for backward.

    Attributes:
        last: the step of the forward graph that uses it last; ``first`` that of the backward graph
            which uses it first, ``until`` the last that does.
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
    prices: TransferCostModel,
) -> list[int]:
    """Positions in ``saved`` of what is to leave the device, so that each graph keeps ``limits.peak``;
    as far as it can. More than has to leaves where that saves time: what then fits is gathered earlier."""
    if limits.peak is None:
        return []
    budgets = [int(limits.peak * share) for share in SHARES]
    enough = (tuple(_enough(forward, backward, saved, budget)) for budget in budgets)
    choices = list(dict.fromkeys(enough))
    times_us: dict[tuple[int, ...], float] = {}
    for chosen in choices if len(choices) > 1 else ():
        parts = _stowed(forward, backward, [saved[i] for i in chosen])
        if all(smallest_peak(without_host_copies(part)) <= limits.peak for part in parts):
            times_us[chosen] = sum(_predicted_us(part, limits, prices) for part in parts)
    if not times_us:
        # The only one; or no budget is kept, and scheduling says what is missing.
        return list(choices[0])
    within_us = min(times_us.values()) * (1 + LEAST_GAIN)
    return list(next(chosen for chosen, us in times_us.items() if us <= within_us))


def _enough(
    forward: Problem, backward: Problem, saved: Sequence[SavedActivation], budget: int
) -> list[int]:
    """What leaves so that the least that each graph needs is within ``budget``, as far as it can be. What
    backward needs last is copied first, since the most time hides it."""
    alive = least_bytes(forward), least_bytes(backward)
    chosen = []
    for i in sorted(range(len(saved)), key=lambda i: (-saved[i].first, saved[i].last)):
        of = saved[i]
        spans = ((alive[0], range(of.last + 1, len(alive[0]))), (alive[1], range(of.first)))
        if any(held[step] > budget for held, steps in spans for step in steps):
            chosen.append(i)
            for held, steps in spans:
                for step in steps:
                    held[step] -= of.num_bytes
    return sorted(chosen)


def _stowed(
    forward: Problem, backward: Problem, chosen: Sequence[SavedActivation]
) -> tuple[Problem, Problem]:
    """Both problems, as they are read when what is chosen has left."""
    ends = forward.num_steps, backward.num_steps
    away = [
        _moved(TransferKind.COPY_TO_HOST, s.num_bytes, s.last + 1, ends[0], ends[0] - 1)
        for s in chosen
    ]
    back = [_moved(TransferKind.COPY_TO_DEVICE, s.num_bytes, 0, s.first, s.until) for s in chosen]
    return (
        _with_moved(forward, away, [(s.num_bytes, range(s.last + 1, ends[0])) for s in chosen]),
        _with_moved(backward, back, [(s.num_bytes, range(s.until + 1)) for s in chosen]),
    )


def _moved(kind: TransferKind, num_bytes: int, ready: int, due: int, last: int) -> Transfer:
    return Transfer(None, kind, num_bytes, "", 0, False, "", 1, ready, due, last)


def _with_moved(
    problem: Problem, moved: Sequence[Transfer], held: Sequence[tuple[int, range]]
) -> Problem:
    """``problem`` with transfers more, and without what they held."""
    other_bytes = list(problem.other_bytes)
    for num_bytes, steps in held:
        for step in steps:
            other_bytes[step] -= num_bytes
    return dataclasses.replace(
        problem, transfers=(*problem.transfers, *moved), other_bytes=tuple(other_bytes)
    )


def _predicted_us(problem: Problem, limits: ScheduleLimits, prices: TransferCostModel) -> float:
    buckets = find_schedule(without_host_copies(problem), prices, limits, refine=False)
    return clock(problem, add_host_copies(problem, buckets, prices, limits), prices).total_us
