"""Keep parameters unsharded between the problems of forward and backward. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..planning.live_bytes import (
    Span,
    fixed_by_point,
    launches,
    num_points,
    sum_spans,
    with_fixed_bytes,
)
from ..planning.plan import Problem, Transfer


def kept_from_forward(
    forward: Problem, backward: Problem, gathered: Mapping[int, Transfer]
) -> tuple[Problem, Problem]:
    """Return both problems, with some gathers removed from backward.

    A kept parameter occupies memory from its last use in forward to its last use in backward.

    Args:
        gathered: gathers of ``forward``, by the position in ``backward.transfers`` of the gather
            of the same parameter that is removed.
    """
    after = [
        Span(launches(t.last + 1), num_points(forward.num_steps), t.num_bytes)
        for t in gathered.values()
    ]
    until = [
        Span(0, launches(backward.transfers[i].last + 1), t.num_bytes) for i, t in gathered.items()
    ]
    left = tuple(t for i, t in enumerate(backward.transfers) if i not in gathered)
    return (
        _with_more(forward, after),
        dataclasses.replace(_with_more(backward, until), transfers=left),
    )


def _with_more(problem: Problem, spans: list[Span]) -> Problem:
    """Return a problem in which the bytes of ``spans`` are alive as well."""
    added = sum_spans(spans, num_points(problem.num_steps))
    alive = [a + b for a, b in zip(fixed_by_point(problem), added)]
    return with_fixed_bytes(problem, alive)
