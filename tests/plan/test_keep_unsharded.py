"""Parameters kept unsharded for backward: their gather would be exposed, and memory suffices."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from graphshard.kinds import TransferKind
from graphshard.planning.keep_unsharded import LEAST_US, choose_kept
from graphshard.planning.live_bytes import (
    LiveBytes,
    Span,
    fixed_by_point,
    launches,
    smallest_peak,
    with_fixed_bytes,
)
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Problem, Transfer
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import simulate
from tests.plan.problems import Line, gather, lines, problem, problems, reduction

FAST, SLOW = Line(1.0, 0.1), Line(1.0, 10.0)


def _mirrored(backward: Problem) -> tuple[Problem, dict[int, Transfer]]:
    """Return a forward with reversed gathers, and its gathers by position in backward."""
    end = backward.num_steps - 1
    gathered = {
        i: gather(t.param, t.num_bytes, end - t.due)
        for i, t in enumerate(backward.transfers)
        if t.kind == TransferKind.ALL_GATHER
    }
    return problem(list(backward.compute_us[::-1]), [*gathered.values()]), gathered


def _keep(backward: Problem, line: Line, budget: int | None) -> list[int]:
    forward, gathered = _mirrored(backward)
    return choose_kept(forward, backward, gathered, line, ScheduleLimits(peak=budget))


CHAIN = problem([100.0] * 4, [gather(i, 50, i) for i in range(4)])


def test_parameter_that_backward_needs_first_is_kept() -> None:
    assert _keep(CHAIN, FAST, 100) == [0]


def test_gathers_that_compute_cannot_hide_are_dropped() -> None:
    # A gather takes as long as five steps, and the last is due after three.
    assert _keep(CHAIN, SLOW, 10_000) == [0, 1, 2, 3]


def test_kept_parameters_fit_budget() -> None:
    assert _keep(CHAIN, SLOW, 100) == [0, 1]  # the second is held while the first is used
    assert _keep(CHAIN, SLOW, 99) == [0]


def test_peak_memory_does_not_grow_without_budget() -> None:
    assert _keep(CHAIN, FAST, None) == [0]
    before = problem([100.0] * 4, [gather(0, 50, 2)], [0, 0, 0, 50])
    assert choose_kept(before, CHAIN, {0: before.transfers[0]}, FAST, ScheduleLimits()) == []


def test_parameters_that_cannot_be_kept_are_gathered_again() -> None:
    assert choose_kept(CHAIN, CHAIN, {}, SLOW, ScheduleLimits(peak=10_000)) == []


def test_exchanged_gradients_leave_room_for_kept_parameters() -> None:
    # Before the first step, a reduction in float32 holds 300 bytes, an exchange 200.
    grad = dataclasses.replace(
        reduction(1, 200, 0, 2), casts=True, grad_bytes=100, exchange_dtype="torch.bfloat16"
    )
    backward = problem([100.0] * 2, [gather(0, 50, 1), grad])
    forward, gathered = _mirrored(problem([100.0] * 2, [gather(0, 50, 1)]))
    for reduce, kept in (("ring", []), ("exchange", [0])):
        limits = ScheduleLimits(peak=250, reduce=reduce)
        assert choose_kept(forward, backward, gathered, SLOW, limits) == kept


@given(problems(), lines, st.integers(0, 300))
def test_budgets_hold_and_hidden_gathers_are_not_dropped(
    backward: Problem, line: Line, spare: int
) -> None:
    forward, gathered = _mirrored(backward)
    budget = max(smallest_peak(forward), smallest_peak(backward)) + spare
    kept = choose_kept(forward, backward, gathered, line, ScheduleLimits(peak=budget))
    left = tuple(t for i, t in enumerate(backward.transfers) if i not in kept)
    alive = LiveBytes(fixed_by_point(backward))
    for transfer in (backward.transfers[i] for i in kept):
        alive.add(Span(0, launches(transfer.last + 1), transfer.num_bytes))
    after = with_fixed_bytes(dataclasses.replace(backward, transfers=left), alive.by_point)
    assert smallest_peak(after) <= budget
    timeline = simulate(backward, find_schedule(backward, line, ScheduleLimits()), line)
    assert not kept or timeline.total_us > sum(backward.compute_us) + LEAST_US
