"""Choose saved activations to offload to the host, to fit a memory budget or to save time.

Some must be offloaded because the graph does not fit otherwise. Offloading more can save time,
because gathers can be launched earlier in the memory that becomes free. So the planner tries a few
amounts, and schedules both graphs for each.

    budget   ├──────────── least memory ──────────┤     all gathers exposed
             ├─────── least memory ───┤ prefetch ─┤     gathers hidden, if the copies are hidden
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ..kinds import TransferKind
from .host_copies import add_host_copies, without_host_copies
from .live_bytes import fixed_by_point, least_by_point, smallest_peak, with_fixed_bytes
from .memory_budget import ScheduleLimits
from .plan import Problem, Transfer
from .search import find_schedule
from .simulate import TransferCostModel, clock
from .time_points import LiveBytes, Span, launches, num_points

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Fractions of the budget that a graph's least memory may take; all are tried.

The rest of the budget is for launching gathers earlier. Judgement call: each fraction costs a
search of both graphs (without local search), and times differ little between neighbours. Fewer
fractions would miss a good one; more take longer to plan.
"""
MIN_GAIN = 0.02
"""Fraction of the predicted time that offloading more than necessary has to save.

Judgement call: predictions are no more accurate than that. With a larger value fewer activations
are offloaded, and gathers stay exposed that could be hidden; at 0, copies load the host link for a
gain that may not be real.
"""


class SavedActivation(NamedTuple):
    """An activation that forward saves for backward.

    Attributes:
        num_bytes: size of the activation.
        last: last step of the forward graph that uses it.
        first: first step of the backward graph that uses it.
        until: last step of the backward graph that uses it.
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

    They are enough to keep each graph within ``limits.peak``, as far as that is possible. More are
    offloaded if gathers can then be launched earlier and that saves time (see ``MIN_GAIN``).
    Without ``limits.peak`` nothing is offloaded.
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
        # There is only one choice, or none fits. In the latter case scheduling reports what is
        # missing.
        return list(choices[0])
    within_us = min(times_us.values()) * (1 + MIN_GAIN)
    return list(next(chosen for chosen, us in times_us.items() if us <= within_us))


class _Absence(NamedTuple):
    """The points in time, in both graphs, at which an activation may be off the device."""

    forward: Span
    backward: Span


def _absence(activation: SavedActivation, forward_steps: int) -> _Absence:
    return _Absence(
        Span(launches(activation.last + 1), num_points(forward_steps), activation.num_bytes),
        Span(0, launches(activation.first), activation.num_bytes),
    )


def _offload_enough(
    forward: Problem, backward: Problem, saved: Sequence[SavedActivation], budget: int
) -> list[int]:
    """Return the activations to offload for each graph's least memory to fit ``budget``.

    Activations that backward needs last are chosen first: their copies have the most time to hide
    in.
    """
    in_forward, in_backward = map(LiveBytes, map(least_by_point, (forward, backward)))
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
    """Return both problems as they would be read from graphs in which ``chosen`` is offloaded."""
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
    # From the last use in forward to the last use in backward, the transfers count the activations.
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
    """Return ``problem`` with ``transfers`` in place of the bytes in ``replaced``."""
    other = LiveBytes(fixed_by_point(problem))
    for span in replaced:
        other.remove(span)
    problem = with_fixed_bytes(problem, other.by_point)
    return dataclasses.replace(problem, transfers=(*problem.transfers, *transfers))


def _predicted_us(problem: Problem, limits: ScheduleLimits, cost_model: TransferCostModel) -> float:
    collectives = without_host_copies(problem)
    buckets = find_schedule(collectives, cost_model, limits, refine=False)
    placed = add_host_copies(problem, buckets, cost_model, limits)
    return clock(problem, placed, cost_model).total_us
