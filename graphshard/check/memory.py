"""Device memory of a step or a graph, in bytes, computed from actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..planning import live_bytes
from ..planning.plan import Plan
from .actions import HOST, Action, Allocate, Free
from .runs import GraphCall

ROUNDING = 512
"""Allocation granularity of the caching allocator (c10/cuda/CUDACachingAllocator.cpp)."""


def peak_bytes(actions: Sequence[Action], run: GraphCall) -> int:
    """Return the peak of live device memory during a run, its arguments included.

    Args:
        actions: all actions of the step; ``run.actions`` holds positions in this list.
    """
    return max(alive_bytes(actions, run))


def peak_bytes_of_step(actions: Sequence[Action]) -> int:
    """Return the peak of live device memory during a step, with the memory it starts with."""
    return max(_alive_bytes(actions, 0, _sizes(actions)), default=0)


def planned_peak_bytes(plan: Plan) -> int:
    """Return the peak of live device memory that a plan predicts for its graph."""
    return max(live_bytes.alive_bytes(plan.problem, plan.buckets), default=0)


def alive_bytes(actions: Sequence[Action], run: GraphCall) -> Iterator[int]:
    """Yield the bytes of live device memory at the start of a run and after each action."""
    sizes = _sizes(actions)
    given = {block for block in run.arguments if block in sizes}
    # Only arguments and new blocks count: other older blocks may be freed during the run, too.
    start, stop = run.actions
    made = {a.block for a in actions[start:stop] if isinstance(a, Allocate)}
    known = {block: sizes[block] for block in sizes if block in given | made}
    total = sum(sizes[block] for block in given)
    yield total
    yield from _alive_bytes(actions[start:stop], total, known)


def _sizes(actions: Sequence[Action]) -> dict[int, int]:
    """Return the size of each device block, rounded as the allocator does."""
    return {
        action.block: -(-action.num_bytes // ROUNDING) * ROUNDING
        for action in actions
        if isinstance(action, Allocate) and action.stream != HOST
    }


def _alive_bytes(actions: Sequence[Action], total: int, sizes: Mapping[int, int]) -> Iterator[int]:
    """Yield ``total``, updated by the blocks in ``sizes``, after each action."""
    for action in actions:
        if isinstance(action, Allocate):
            total += sizes.get(action.block, 0)
        elif isinstance(action, Free):
            total -= sizes.get(action.block, 0)
        yield total
