"""Predicts when everything in a planned graph happens: two lanes, compute and communication.

The compute lane runs the steps in order. In front of each it issues the collectives that are
launched there, then stands still for those that are waited for there. The communication lane carries
one collective after the other, in the order of their launch, each no earlier than its launch, as
NCCL does on the stream of a group and gloo in its queue:

    compute        [step 0][step 1]......[step 2][step 3]
    communication  [gather a][gather b    ][reduce c]
                                    └ exposed: step 2 needs b

``simulate`` builds the DAG of all that and reads the timeline from it. ``clock`` gives the times alone,
by ``sweep``, which the planner's search calls a thousand times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import networkx as nx

from .plan import ALL_GATHER, SHARD_REDUCE, Bucket, Problem, averaged_by, by_step

COMPUTE, COMMUNICATION = "compute", "communication"
_Node = tuple[str, int]
"""Kind and index, as in ``Slot``."""
if TYPE_CHECKING:
    _Dag = nx.DiGraph[_Node]
STEP, COPY_IN, COLLECTIVE, COPY_OUT = "step", "copy-in", "collective", "copy-out"


class Prices(Protocol):
    """What is asked of a cost model; microseconds for bytes of full tensors."""

    def collective_us(self, kind: str, num_bytes: int, world: int, stride: int = 1) -> float: ...

    def copy_us(self, num_bytes: int) -> float: ...

    def parcel_us(self, world: int, stride: int = 1) -> float: ...

    def lost_us(self, wire_us: float) -> float: ...


class Cost(NamedTuple):
    """Of one bucket, on the compute lane, on the communication lane, and on the compute lane."""

    copy_in_us: float
    wire_us: float
    copy_out_us: float


@dataclass(frozen=True)
class Slot:
    """One thing that a lane does.

    Attributes:
        kind: step, copy-in, collective or copy-out; ``index`` of the step or of the bucket.
        start_us: since the graph began.
    """

    kind: str
    index: int
    start_us: float
    duration_us: float

    @property
    def lane(self) -> str:
        return COMMUNICATION if self.kind == COLLECTIVE else COMPUTE

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Timeline:
    """What is predicted of one run of a graph.

    Attributes:
        slots: in order of issue.
        exposed_us: by bucket, how long the compute lane stands still at its wait.
        alive_bytes: by step: ``Problem.other_bytes``, gathered parameters from launch to last use,
            gradients from their completion to the end of their reduction, reduced shards from then.
        in_flight_bytes: by step, buffers between launch and wait.
        critical_path: slots of which each had to wait for the one before it, to the end.
        total_us: until both lanes are done.
        lost_us: what hidden collectives cost compute, about; it is not in ``total_us``.
    """

    slots: tuple[Slot, ...]
    exposed_us: tuple[float, ...]
    alive_bytes: tuple[int, ...]
    in_flight_bytes: tuple[int, ...]
    critical_path: tuple[Slot, ...]
    total_us: float
    lost_us: float

    def busy_us(self, lane: str) -> float:
        return sum(slot.duration_us for slot in self.slots if slot.lane == lane)

    @property
    def peak_bytes(self) -> int:
        return max(self.alive_bytes, default=0)


def simulate(problem: Problem, buckets: Sequence[Bucket], prices: Prices) -> Timeline:
    """The predicted timeline of ``problem`` with ``buckets`` in launch order."""
    dag = _dag(problem, buckets, prices)
    slots: dict[_Node, Slot] = {}
    exposed_us = [0.0] * len(buckets)
    for node in dag:  # in order of issue, which is a topological one
        ends = {slots[before].lane: slots[before].end_us for before in dag.predecessors(node)}
        kind, index = node
        slots[node] = Slot(kind, index, max(ends.values(), default=0.0), dag.nodes[node]["us"])
        if node[0] == COPY_OUT:
            exposed_us[node[1]] = max(0.0, ends[COMMUNICATION] - ends.get(COMPUTE, 0.0))
    return Timeline(
        tuple(slots.values()),
        tuple(exposed_us),
        tuple(alive_bytes(problem, buckets)),
        tuple(in_flight_bytes(problem, buckets)),
        _critical_path(dag, slots),
        max((slot.end_us for slot in slots.values()), default=0.0),
        sum(
            prices.lost_us(max(0.0, slots[COLLECTIVE, i].duration_us - exposed))
            for i, exposed in enumerate(exposed_us)
        ),
    )


def _dag(problem: Problem, buckets: Sequence[Bucket], prices: Prices) -> _Dag:
    """Nodes ``(kind, index)`` in order of issue; an edge from what has to end to what then begins."""
    dag: _Dag = nx.DiGraph()
    last: dict[str, _Node] = {}

    def add(lane: str, kind: str, index: int, us: float, *after: _Node) -> None:
        node = (kind, index)
        dag.add_node(node, us=us)
        dag.add_edges_from(
            (before, node) for before in (*after, *([last[lane]] if lane in last else []))
        )
        last[lane] = node

    costs = [cost_of(problem, bucket, prices) for bucket in buckets]
    for step, happening in enumerate(by_step(problem.num_steps, buckets)):
        for i, is_wait in happening:
            if is_wait:
                add(COMPUTE, COPY_OUT, i, costs[i].copy_out_us, (COLLECTIVE, i))
            else:
                add(COMPUTE, COPY_IN, i, costs[i].copy_in_us)
                add(COMMUNICATION, COLLECTIVE, i, costs[i].wire_us, (COPY_IN, i))
        if step < problem.num_steps:
            add(COMPUTE, STEP, step, problem.compute_us[step])
    return dag


def _critical_path(dag: _Dag, slots: dict[_Node, Slot]) -> tuple[Slot, ...]:
    path = []
    node = max(dag, key=lambda n: slots[n].end_us, default=None)
    while node is not None:
        path.append(slots[node])
        node = max(dag.predecessors(node), key=lambda n: slots[n].end_us, default=None)
    return tuple(reversed(path))


@dataclass(frozen=True)
class Clock:
    """The times of a timeline alone.

    Attributes:
        step_us: when every step starts, and when the compute lane is done.
        exposed_us, total_us: as in ``Timeline``.
    """

    step_us: list[float]
    exposed_us: list[float]
    total_us: float


def clock(problem: Problem, buckets: Sequence[Bucket], prices: Prices) -> Clock:
    """The times of ``simulate``, in one sweep over the buckets."""
    costs = [cost_of(problem, bucket, prices) for bucket in buckets]
    spans = [(bucket.launch, bucket.wait) for bucket in buckets]
    return sweep([0.0, *accumulate(problem.compute_us)], spans, costs, averaged_by(buckets))


def sweep(
    start_us: Sequence[float],
    spans: Sequence[tuple[int, int]],
    costs: Sequence[Cost],
    averaged: Mapping[int, int],
) -> Clock:
    """The times of buckets of known costs, in O(b log b + s).

    Args:
        start_us: by step, and of the end: when it starts if nothing is in its way.
        spans: launch and wait of every bucket, in order of launch.
        averaged: see ``plan.averaged_by``; events are in the order of ``plan.by_step``.
    """
    launches = [(launch, 0, i, 1, i) for i, (launch, _) in enumerate(spans)]
    waits = [
        (wait, 0, averaged[i], 0, i) if i in averaged else (wait, 1, i, 0, i)
        for i, (_, wait) in enumerate(spans)
    ]
    end_us, exposed_us = [0.0] * len(spans), [0.0] * len(spans)
    late_us = [0.0] * len(start_us)  # by step, what is added in front of it
    behind = free = 0.0
    for step, _, _, is_launch, i in sorted(launches + waits):
        now = start_us[step] + behind
        if not is_launch:
            exposed_us[i] = max(0.0, end_us[i] - now)
            us = exposed_us[i] + costs[i].copy_out_us
        else:
            us = costs[i].copy_in_us
            end_us[i] = free = max(free, now + us) + costs[i].wire_us
        late_us[step] += us
        behind += us
    step_us = [start + late for start, late in zip(start_us, accumulate(late_us))]
    return Clock(step_us, exposed_us, max(step_us[-1], free))


def cost_of(problem: Problem, bucket: Bucket, prices: Prices) -> Cost:
    """What packing shards before a gather costs, or full gradients before a reduction; the collective;
    and unpacking gathered parameters: reduced shards are slices of their buffer."""
    wire_us = prices.collective_us(bucket.kind, bucket.num_bytes, bucket.world, bucket.stride)
    parcels_us = prices.parcel_us(bucket.world, bucket.stride) * (len(bucket.parcels) - 1)
    if bucket.kind == SHARD_REDUCE:  # in the buffers that it is left in
        return Cost(parcels_us, wire_us, 0.0)
    gathers = bucket.kind == ALL_GATHER
    packed, cast = [], []
    for parcel in bucket.parcels:
        size = sum(problem.transfers[i].num_bytes for i in parcel)
        if len(parcel) > 1:
            packed.append(size)
        elif problem.transfers[parcel[0]].casts:
            cast.append(size)
    parts = bucket.world if gathers else 1
    return Cost(
        parcels_us + sum(prices.copy_us(n // parts) for n in [*packed, *cast]),
        wire_us,
        sum(prices.copy_us(n) for n in packed) if gathers else 0.0,
    )


def alive_bytes(problem: Problem, buckets: Sequence[Bucket]) -> list[int]:
    """By step; see ``Timeline``."""
    end = problem.num_steps
    spans = []
    for bucket in (bucket for bucket in buckets if bucket.kind != SHARD_REDUCE):
        for transfer in (problem.transfers[i] for i in bucket.transfers):
            if bucket.kind == ALL_GATHER:
                spans.append((bucket.launch, transfer.last + 1, transfer.num_bytes))
            else:
                spans.append((transfer.ready, bucket.wait, transfer.num_bytes))
                spans.append((bucket.wait, end, transfer.shard_bytes))
    return [a + b for a, b in zip(problem.other_bytes, _summed(spans, end))]


def gathered_bytes(problem: Problem, buckets: Sequence[Bucket]) -> list[int]:
    """By step, full parameters that were gathered and are used yet, or are on their way."""
    spans = [
        (bucket.launch, problem.transfers[i].last + 1, problem.transfers[i].num_bytes)
        for bucket in buckets
        if bucket.kind == ALL_GATHER
        for i in bucket.transfers
    ]
    return _summed(spans, problem.num_steps)


def in_flight_bytes(problem: Problem, buckets: Sequence[Bucket]) -> list[int]:
    """By step; see ``Timeline``."""
    spans = [(bucket.launch, bucket.wait, bucket.num_bytes) for bucket in buckets]
    return _summed(spans, problem.num_steps)


def _summed(spans: Sequence[tuple[int, int, int]], num_steps: int) -> list[int]:
    """By step, the bytes of all spans ``[begin, end)`` that hold it."""
    change = [0] * (num_steps + 1)
    for begin, end, num_bytes in spans:
        if begin < end:
            change[begin] += num_bytes
            change[end] -= num_bytes
    return list(accumulate(change))[:num_steps]
