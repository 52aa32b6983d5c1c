"""Which gathered parameters are kept from forward to backward, instead of gathered again. Pure.

What backward needs first has nothing to hide behind, and where the wire is slow that goes on for a
while: those gathers are exposed whatever the schedule. They are left out as far as memory allows,
in the order in which backward needs them, which is that of the time for which they are held. It is
DeepCompile's selective unsharding (arXiv 2504.09983), decided by exposed time.

    forward   .. gather w   use w  [ w stays    ]      backward   [     ] use w   gather v   use v ..
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from ..kinds import TransferKind
from .plan import Problem, Transfer
from .search import least_bytes
from .simulate import TransferCostModel

LEAST_US = 1.0
"""What is exposed for less is gathered again."""


def choose_kept(
    forward: Problem,
    backward: Problem,
    gathered: Mapping[int, Transfer],
    prices: TransferCostModel,
    budget: int | None,
) -> list[int]:
    """Positions in ``backward.transfers`` of the gathers to leave out.

    Args:
        gathered: by such a position, the gather of the same parameter in ``forward``; none for a
            parameter that cannot be kept.
        budget: peak of a graph, in bytes; None: what each needs at least.
    """
    alive = least_bytes(forward), least_bytes(backward)
    limits = [max(of, default=0) if budget is None else budget for of in alive]
    start_us = [0.0, *accumulate(backward.compute_us)]
    kept: list[int] = []
    late_us = 0.0  # of compute, by what is exposed
    free_us = None  # when the wire is through with what came before
    for i in _by_due(backward):
        transfer = backward.transfers[i]
        latency_us, us = (
            prices.collective_us(
                TransferKind.ALL_GATHER, num_bytes, transfer.world, transfer.stride
            )
            for num_bytes in (0, transfer.num_bytes)
        )
        us -= latency_us
        through_us = us + (latency_us if free_us is None else free_us)
        exposed_us = through_us - start_us[transfer.due] - late_us
        if exposed_us > LEAST_US and i in gathered and _hold(alive, gathered[i], transfer, limits):
            kept.append(i)
            continue
        free_us = through_us
        late_us += max(0.0, exposed_us)
    return kept


def _by_due(problem: Problem) -> list[int]:
    gathers = [i for i, t in enumerate(problem.transfers) if t.kind == TransferKind.ALL_GATHER]
    return sorted(gathers, key=lambda i: problem.transfers[i].due)


def _hold(
    alive: tuple[list[int], list[int]], before: Transfer, after: Transfer, limits: Sequence[int]
) -> bool:
    """Hold a parameter from its last use in forward to its first in backward, if there is room."""
    forward, backward = alive
    spans: list[tuple[list[int], Sequence[int]]] = [
        (forward, range(before.last + 1, len(forward))),
        (backward, range(min(after.due, len(backward)))),
    ]
    size = after.num_bytes
    for limit, (of, steps) in zip(limits, spans):
        if any(of[step] + size > limit for step in steps):
            return False
    for of, steps in spans:
        for step in steps:
            of[step] += size
    return True
