"""Bytes of a device that a step or a graph needs, from their actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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


def peak_bytes_of_step(actions: Sequence[Action]) -> int:
    """Return the most bytes of the device that are alive, what there was before among them."""
    return max(_alive_bytes(actions, 0, _sizes(actions)), default=0)


def planned_peak_bytes(plan: Plan) -> int:
    """Return the most bytes of the device that are alive in a graph by its plan."""
    return max(live_bytes.alive_bytes(plan.problem, plan.buckets), default=0)


def alive_bytes(actions: Sequence[Action], run: GraphRun) -> Iterator[int]:
    """Yield the bytes of the device that are alive when a run begins, and behind each change."""
    sizes = _sizes(actions)
    given = {block for block in run.arguments if block in sizes}
    # Others may be freed meanwhile that have been there before.
    start, stop = run.actions
    made = {a.block for a in actions[start:stop] if isinstance(a, Allocate)}
    known = {block: sizes[block] for block in sizes if block in given | made}
    total = sum(sizes[block] for block in given)
    yield total
    yield from _alive_bytes(actions[start:stop], total, known)


def _sizes(actions: Sequence[Action]) -> dict[int, int]:
    """Return the bytes of each block of the device."""
    return {
        action.block: -(-action.num_bytes // ROUNDING) * ROUNDING
        for action in actions
        if isinstance(action, Allocate) and action.stream != HOST
    }


def _alive_bytes(actions: Sequence[Action], total: int, sizes: Mapping[int, int]) -> Iterator[int]:
    """Yield the bytes of the blocks in ``sizes`` behind each action, from ``total`` on."""
    for action in actions:
        if isinstance(action, Allocate):
            total += sizes.get(action.block, 0)
        elif isinstance(action, Free):
            total -= sizes.get(action.block, 0)
        yield total
