"""Forward and backward problem with some parameters kept gathered in between; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..planning.live_bytes import other_by_moment, with_other_bytes
from ..planning.moments import Span, launches, num_moments, sum_spans
from ..planning.plan import Problem, Transfer


def kept_from_forward(
    forward: Problem, backward: Problem, gathered: Mapping[int, Transfer]
) -> tuple[Problem, Problem]:
    """Return both problems without some gathers of backward.

    What is kept is in memory from its last use in forward to the one in backward.

    Args:
        gathered: by position of a transfer of ``backward`` that is left out, the one of ``forward``
            that gathers the same parameter.
    """
    after = [
        Span(launches(t.last + 1), num_moments(forward.num_steps), t.num_bytes)
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
    """Return a problem with more bytes alive in some moments."""
    added = sum_spans(spans, num_moments(problem.num_steps))
    alive = [a + b for a, b in zip(other_by_moment(problem), added)]
    return with_other_bytes(problem, alive)
