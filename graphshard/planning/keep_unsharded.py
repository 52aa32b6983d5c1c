"""Choose parameters to keep unsharded from forward to backward instead of gathering them again.

The first gathers of backward cannot be hidden; on a slow interconnect, neither can many later ones.
In the order in which backward needs the parameters, each exposed gather is dropped if memory
allows: the earlier a parameter is needed, the shorter it is held. This is the selective unsharding
of DeepCompile (arXiv 2504.09983), with exposed time as the criterion.

    forward   .. gather w   use w  [ w is kept  ]    backward   [     ] use w   gather v   use v ..
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..kinds import TransferKind
from .bucketing import gathers_by_due
from .live_bytes import LiveBytes, Span, launches, least_by_point
from .memory_budget import ScheduleLimits
from .plan import Problem, Transfer
from .simulate import Lane, TransferCostModel, clock

# Minimum exposed time of a gather, in microseconds, that justifies keeping its parameter. Judgement
# call: less than a kernel launch. A larger value leaves gathers exposed although memory is free;
# with 0, a rounding error could keep a parameter.
LEAST_US = 1.0


class _GraphMemory(NamedTuple):
    alive: LiveBytes
    budget: int


def choose_kept(
    forward: Problem,
    backward: Problem,
    gathered: Mapping[int, Transfer],
    cost_model: TransferCostModel,
    limits: ScheduleLimits,
) -> list[int]:
    """Return the positions in ``backward.transfers`` of the gathers to drop.

    Their parameters are kept from forward to backward.

    Args:
        gathered: gather of the same parameter in ``forward``, keyed by position in
            ``backward.transfers``; parameters that cannot be kept are missing.
        limits: limits of each graph. If ``peak`` is None, the limit of a graph is the smallest peak
            of all its schedules.
    """
    memory = _graph_memory(forward, limits), _graph_memory(backward, limits)
    start_us = clock(backward, [], cost_model).step_us  # with user collectives
    late_us = 0.0  # delay of compute by exposed gathers
    communication: Lane | None = None
    kept: list[int] = []
    for i in gathers_by_due(backward):
        transfer = backward.transfers[i]
        latency_us, lane_us = (
            cost_model.collective_us(
                TransferKind.ALL_GATHER, num_bytes, transfer.world, transfer.stride
            )
            for num_bytes in (0, transfer.num_bytes)
        )
        # Back-to-back gathers can share buckets, so only the first one pays latency.
        lane = Lane(free_us=latency_us) if communication is None else communication
        end_us = lane.free_us + (lane_us - latency_us)
        exposed_us = end_us - start_us[transfer.due] - late_us
        if exposed_us > LEAST_US and i in gathered and _hold(memory, gathered[i], transfer):
            kept.append(i)
            continue
        communication = lane
        lane.run(lane_us - latency_us)
        late_us += max(0.0, exposed_us)
    return kept


def _graph_memory(problem: Problem, limits: ScheduleLimits) -> _GraphMemory:
    alive = least_by_point(problem, exchanges=limits.reduce == "exchange")
    budget = max(alive, default=0) if limits.peak is None else limits.peak
    return _GraphMemory(LiveBytes(alive), budget)


def _hold(
    memory: tuple[_GraphMemory, _GraphMemory], in_forward: Transfer, in_backward: Transfer
) -> bool:
    """Reserve memory for a parameter from its last use in forward to its first in backward.

    Return whether there was room in both graphs; if not, reserve nothing.
    """
    end, num_bytes = len(memory[0].alive.by_point), in_backward.num_bytes
    after_use = Span(launches(in_forward.last + 1), end, num_bytes)
    spans = after_use, Span(0, launches(in_backward.due), num_bytes)
    if not all(graph.alive.has_room(span, graph.budget) for graph, span in zip(memory, spans)):
        return False
    for graph, span in zip(memory, spans):
        graph.alive.add(span)
    return True
