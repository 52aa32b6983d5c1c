"""Predicts when everything in a planned graph happens, in lanes: compute, communication, and copies of
shards from the host and to it, where they are kept there.

The compute lane runs the steps in order. In front of each it issues the collectives that are
launched there, then stands still for those that are waited for there. The communication lane carries
one collective after the other, in the order of their launch, each no earlier than its launch, as
NCCL does on the stream of a group and gloo in its queue; so do the lanes of copies, each way:

    compute        [step 0][step 1]......[step 2][step 3]
    communication  [gather a][gather b    ][reduce c]
                                    └ exposed: step 2 needs b

``simulate`` builds the DAG of all that and reads the timeline from it. ``clock`` gives the times alone,
by ``sweep``, which the planner's search calls a thousand times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import networkx as nx

from ..kinds import HOST_COPIES, TransferKind
from .plan import Bucket, Problem, events_by_step, next_in_chain

COMPUTE, COMMUNICATION = "compute", "communication"
LANES = (COMPUTE, COMMUNICATION, *HOST_COPIES)
_Node = tuple[str, int]
"""Kind and index, as in ``Slot``."""
if TYPE_CHECKING:
    _Dag = nx.DiGraph[_Node]
STEP, COPY_IN, COLLECTIVE, COPY_OUT = "step", "copy-in", "collective", "copy-out"


class TransferCostModel(Protocol):
    """What is asked of a cost model; microseconds for bytes of full tensors."""

    def collective_us(
        self, kind: TransferKind, num_bytes: int, world: int, stride: int = 1
    ) -> float: ...

    def copy_us(self, num_bytes: int) -> float: ...

    def buffer_us(self, world: int, stride: int = 1) -> float: ...

    def lost_us(self, lane_us: float) -> float: ...


class BucketCost(NamedTuple):
    """Of one bucket, on the compute lane, on its own lane, and on the compute lane."""

    copy_in_us: float
    lane_us: float
    copy_out_us: float
    lane: str = COMMUNICATION


@dataclass(frozen=True)
class Slot:
    """One thing that a lane does.

    Attributes:
        kind: step, copy-in, collective (or what else a bucket launches) or copy-out; ``index`` of the
            step or of the bucket.
        start_us: since the graph began.
        lane: one of ``LANES``.
    """

    kind: str
    index: int
    start_us: float
    duration_us: float
    lane: str

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
            gradients from their completion to the end of their reduction, reduced shards from then;
            those that the host keeps only until they are gathered or reduced.
        in_flight_bytes: by step, buffers between launch and wait.
        critical_path: slots of which each had to wait for the one before it, to the end.
        total_us: until all lanes are done.
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


def simulate(problem: Problem, buckets: Sequence[Bucket], prices: TransferCostModel) -> Timeline:
    """The predicted timeline of ``problem`` with ``buckets`` in launch order."""
    dag = _dag(problem, buckets, prices)
    slots: dict[_Node, Slot] = {}
    exposed_us = [0.0] * len(buckets)
    for node in dag:  # in order of issue, which is a topological one
        ends = {slots[before].lane: slots[before].end_us for before in dag.predecessors(node)}
        kind, index = node
        start_us = max(ends.values(), default=0.0)
        slots[node] = Slot(kind, index, start_us, **dag.nodes[node])
        if kind == COPY_OUT:
            arrived_us = ends[slots[COLLECTIVE, index].lane]
            exposed_us[index] = max(0.0, arrived_us - ends.get(COMPUTE, 0.0))
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


def _dag(problem: Problem, buckets: Sequence[Bucket], prices: TransferCostModel) -> _Dag:
    """Nodes ``(kind, index)`` in order of issue; an edge from what has to end to what then begins."""
    dag: _Dag = nx.DiGraph()
    last: dict[str, _Node] = {}

    def add(lane: str, kind: str, index: int, us: float, *after: _Node) -> None:
        node = (kind, index)
        dag.add_node(node, duration_us=us, lane=lane)
        dag.add_edges_from(
            (before, node) for before in (*after, *([last[lane]] if lane in last else []))
        )
        last[lane] = node

    costs = [bucket_cost(problem, bucket, prices) for bucket in buckets]
    for step, happening in enumerate(events_by_step(problem.num_steps, buckets)):
        for i, is_wait in happening:
            if is_wait:
                add(COMPUTE, COPY_OUT, i, costs[i].copy_out_us, (COLLECTIVE, i))
            else:
                add(COMPUTE, COPY_IN, i, costs[i].copy_in_us)
                add(costs[i].lane, COLLECTIVE, i, costs[i].lane_us, (COPY_IN, i))
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


def clock(problem: Problem, buckets: Sequence[Bucket], prices: TransferCostModel) -> Clock:
    """The times of ``simulate``, in one sweep over the buckets."""
    costs = [bucket_cost(problem, bucket, prices) for bucket in buckets]
    spans = [(bucket.launch, bucket.wait) for bucket in buckets]
    return sweep([0.0, *accumulate(problem.compute_us)], spans, costs, next_in_chain(buckets))


def sweep(
    start_us: Sequence[float],
    spans: Sequence[tuple[int, int]],
    costs: Sequence[BucketCost],
    after: Mapping[int, int],
) -> Clock:
    """The times of buckets of known costs, in O(b log b + s).

    Args:
        start_us: by step, and of the end: when it starts if nothing is in its way.
        spans: launch and wait of every bucket, in order of launch.
        after: see ``plan.goes_on``; events are in the order of ``plan.by_step``.
    """
    launches = [(launch, 0, i, 1, i) for i, (launch, _) in enumerate(spans)]
    waits = [
        (wait, 0, after[i], 0, i) if i in after else (wait, 1, i, 0, i)
        for i, (_, wait) in enumerate(spans)
    ]
    end_us, exposed_us = [0.0] * len(spans), [0.0] * len(spans)
    late_us = [0.0] * len(start_us)  # by step, what is added in front of it
    free: dict[str, float] = defaultdict(float)  # by lane, when it is
    behind = 0.0
    for step, _, _, is_launch, i in sorted(launches + waits):
        now = start_us[step] + behind
        if not is_launch:
            exposed_us[i] = max(0.0, end_us[i] - now)
            us = exposed_us[i] + costs[i].copy_out_us
        else:
            us, lane_us, _, lane = costs[i]
            end_us[i] = free[lane] = max(free[lane], now + us) + lane_us
        late_us[step] += us
        behind += us
    step_us = [start + late for start, late in zip(start_us, accumulate(late_us))]
    return Clock(step_us, exposed_us, max([step_us[-1], *free.values()]))


def bucket_cost(problem: Problem, bucket: Bucket, prices: TransferCostModel) -> BucketCost:
    """What packing shards before a gather costs, or full gradients before a reduction; the collective;
    and unpacking gathered parameters: reduced shards are slices of their buffer."""
    lane_us = prices.collective_us(bucket.kind, bucket.num_bytes, bucket.world, bucket.stride)
    if bucket.kind in HOST_COPIES:
        return BucketCost(0.0, lane_us, 0.0, bucket.kind)
    parcels_us = prices.buffer_us(bucket.world, bucket.stride) * (len(bucket.buffers) - 1)
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:  # in the buffers that it is left in
        return BucketCost(parcels_us, lane_us, 0.0)
    gathers = bucket.kind == TransferKind.ALL_GATHER
    packed, cast = [], []
    for parcel in bucket.buffers:
        size = sum(problem.transfers[i].num_bytes for i in parcel)
        if len(parcel) > 1:
            packed.append(size)
        elif problem.transfers[parcel[0]].casts:
            cast.append(size)
    parts = bucket.world if gathers else 1
    return BucketCost(
        parcels_us + sum(prices.copy_us(n // parts) for n in [*packed, *cast]),
        lane_us,
        sum(prices.copy_us(n) for n in packed) if gathers else 0.0,
    )


def alive_bytes(problem: Problem, buckets: Sequence[Bucket]) -> list[int]:
    """By step; see ``Timeline``."""
    end = problem.num_steps
    spans = []
    for bucket in buckets:
        of = [problem.transfers[i] for i in bucket.transfers]
        if bucket.kind == TransferKind.ALL_GATHER:
            spans += [(bucket.launch, t.last + 1, t.num_bytes) for t in of]
            spans += [(bucket.launch, bucket.wait, t.shard_bytes) for t in of if t.host]
        elif bucket.kind == TransferKind.COPY_TO_DEVICE:
            spans += [
                (bucket.launch, t.last + 1, t.num_bytes)
                for t in of
                if t.kind == TransferKind.COPY_TO_DEVICE
            ] or [(bucket.launch, bucket.wait, bucket.num_bytes)]
        elif bucket.kind == TransferKind.COPY_TO_HOST:
            spans += [
                (t.ready, bucket.wait, t.num_bytes)
                for t in of
                if t.kind == TransferKind.COPY_TO_HOST
            ] or [(bucket.launch, bucket.wait, bucket.num_bytes)]
        elif bucket.kind != TransferKind.ALL_REDUCE_SHARDS:
            spans += [(t.ready, bucket.wait, t.num_bytes) for t in of]
            spans += [(bucket.wait, end, t.shard_bytes) for t in of if not t.host]
    return [a + b for a, b in zip(problem.other_bytes, _summed(spans, end))]


def gathered_bytes(problem: Problem, buckets: Sequence[Bucket]) -> list[int]:
    """By step, full parameters that were gathered and are used yet, or are on their way."""
    spans = [
        (bucket.launch, problem.transfers[i].last + 1, problem.transfers[i].num_bytes)
        for bucket in buckets
        if bucket.kind == TransferKind.ALL_GATHER
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
