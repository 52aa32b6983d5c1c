"""Bytes of a device that a graph needs: `peak_bytes`, from the actions of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..planning import live_bytes
from ..planning.plan import Plan
from .actions import HOST, Action, Allocate, Free
from .runs import GraphRun

ROUNDING = 512
"""The caching allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp)."""


def peak_bytes(actions: Sequence[Action], run: GraphRun) -> int:
    """Return the most bytes of the device that are alive in a run, its arguments included.

    Args:
        actions: of all steps, in which those of ``run`` lie.
    """
    return max(alive_bytes(actions, run))


def planned_peak_bytes(plan: Plan) -> int:
    """Return the most bytes of the device that are alive in a graph by its plan."""
    return max(live_bytes.alive_bytes(plan.problem, plan.buckets), default=0)


def alive_bytes(actions: Sequence[Action], run: GraphRun) -> Iterator[int]:
    """Yield the bytes of the device that are alive when a run begins, and behind each change."""
    sizes = {
        action.block: -(-action.num_bytes // ROUNDING) * ROUNDING
        for action in actions
        if isinstance(action, Allocate) and action.stream != HOST
    }
    start, stop = run.actions
    alive = {block for block in run.arguments if block in sizes}
    total = sum(sizes[block] for block in alive)
    yield total
    for action in actions[start:stop]:
        if isinstance(action, Allocate) and action.block in sizes:
            alive.add(action.block)
            total += sizes[action.block]
        elif isinstance(action, Free) and action.block in alive:
            alive.remove(action.block)
            total -= sizes[action.block]
        yield total
