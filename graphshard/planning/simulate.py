"""Predict the timing of a planned graph: compute, communication and host copies.

The compute lane runs the steps in order. Before each step it issues the launches of that step, then
blocks on its waits. The communication lane runs one collective after the other in launch order,
like NCCL on the stream of a group. Host copies have a lane for each direction. User collectives
have another lane; if they use the same interconnect as the communication lane, only one of the two
lanes runs at a time:

    compute           [step 0][step 1]......[step 2]..............[step 3]
    communication     [gather a][gather b  ][reduce c ]
    user collectives                                   [all-reduce]
                                       └ exposed: step 2 needs b

``simulate`` returns everything that the lanes do. ``clock`` returns only the times; it uses
``sweep``, which the search calls many thousands of times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from ..kinds import HOST_COPIES, TransferKind
from .buckets import events_by_step, is_copied_in, next_in_chain, sorted_events
from .live_bytes import alive_bytes, in_flight_bytes
from .plan import Bucket, Problem, UserCollective, sent_buffers

COMPUTE, COMMUNICATION, USER = "compute", "communication", "user collectives"
LANES = (COMPUTE, COMMUNICATION, *HOST_COPIES, USER)
STEP, COPY_IN, COLLECTIVE, COPY_OUT = "step", "copy-in", "collective", "copy-out"


class Lane:
    """An in-order queue of work, such as the stream of a process group."""

    __slots__ = ("free_us",)

    def __init__(self, free_us: float = 0.0) -> None:
        self.free_us = free_us  # when all work added so far is done

    def start_us(self, ready_us: float) -> float:
        return ready_us if ready_us > self.free_us else self.free_us

    def run(self, duration_us: float, ready_us: float = 0.0) -> float:
        """Append work that is ready at ``ready_us``; return its end time."""
        free_us = self.free_us
        self.free_us = end_us = (ready_us if ready_us > free_us else free_us) + duration_us
        return end_us


class TransferCostModel(Protocol):
    """The methods of a cost model that planning needs; see ``cost.model.CostModel``."""

    def collective_us(
        self, kind: TransferKind, num_bytes: int, world: int, stride: int = 1
    ) -> float: ...

    def exchange_us(self, num_bytes: int, world: int, stride: int = 1) -> float: ...

    def copy_us(self, num_bytes: int) -> float: ...

    def buffer_us(self, world: int, stride: int = 1) -> float:
        """Return the time that each buffer after the first adds to a collective."""

    def crosses_nodes(self, world: int, stride: int = 1) -> bool:
        """Return whether a group communicates over the interconnect between nodes."""

    def slowdown_us(self, lane_us: float) -> float: ...


class BucketCost(NamedTuple):
    """The time of one bucket or user collective.

    Attributes:
        copy_in_us: time on the compute lane before the launch.
        lane_us: time on ``lane``.
        copy_out_us: time on the compute lane after the wait.
        latency_us: part of ``lane_us`` that does not depend on the number of bytes.
        shares: second lane that is occupied for the same time, or "".
    """

    copy_in_us: float
    lane_us: float
    copy_out_us: float
    lane: str = COMMUNICATION
    latency_us: float = 0.0
    shares: str = ""


class Scenario(NamedTuple):
    """Factors on predicted transfer times, relative to compute.

    Attributes:
        latency: factor on the part of a transfer's time that does not depend on its bytes.
        bytes: factor on the rest.
    """

    latency: float = 1.0
    bytes: float = 1.0

    def cost(self, cost: BucketCost) -> BucketCost:
        latency_us = (self.latency - self.bytes) * cost.latency_us
        return cost._replace(lane_us=self.bytes * cost.lane_us + latency_us)


AS_PREDICTED = Scenario()


@dataclass(frozen=True)
class Slot:
    """One piece of work on a lane; times count from the start of the graph.

    Attributes:
        kind: step, copy-in, collective (also a host copy) or copy-out.
        index: position of the step or of the bucket; user collectives follow the buckets.
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
    """The predicted run of a graph.

    Attributes:
        slots: slots in issue order.
        exposed_us: time that the compute lane is blocked at the wait for each bucket.
        alive_bytes: peak bytes alive in each step.
        in_flight_bytes: bytes of the buckets between launch and wait in each step.
        total_us: time until all lanes are done.
        slowdown_us: estimated time by which buckets slow down concurrent compute; not in
            ``total_us``.
        user_exposed_us: time that the compute lane is blocked at the wait for each user collective.
    """

    slots: tuple[Slot, ...]
    exposed_us: tuple[float, ...]
    alive_bytes: tuple[int, ...]
    in_flight_bytes: tuple[int, ...]
    total_us: float
    slowdown_us: float
    user_exposed_us: tuple[float, ...] = ()

    def busy_us(self, lane: str) -> float:
        return sum(slot.duration_us for slot in self.slots if slot.lane == lane)

    @property
    def peak_bytes(self) -> int:
        return max(self.alive_bytes, default=0)


def simulate(
    problem: Problem, buckets: Sequence[Bucket], cost_model: TransferCostModel
) -> Timeline:
    """Return the predicted timeline of ``problem`` with ``buckets``, which are in launch order."""
    costs = [bucket_cost(problem, bucket, cost_model) for bucket in buckets]
    costs += user_costs(problem, cost_model)
    run = _Run()
    collectives: dict[int, Slot] = {}
    waited_us = [0.0] * len(costs)
    for step, events in enumerate(
        events_by_step(problem.num_steps, buckets, problem.user_collectives)
    ):
        for i, is_wait in events:
            cost = costs[i]
            if is_wait:
                waited_us[i] = max(0.0, collectives[i].end_us - run.lanes[COMPUTE].free_us)
                run.add(COMPUTE, COPY_OUT, i, cost.copy_out_us, after=collectives[i])
            else:
                copy_in = run.add(COMPUTE, COPY_IN, i, cost.copy_in_us)
                collectives[i] = run.add(
                    cost.lane, COLLECTIVE, i, cost.lane_us, after=copy_in, shares=cost.shares
                )
        if step < problem.num_steps:
            run.add(COMPUTE, STEP, step, problem.compute_us[step])
    exposed_us, user_exposed_us = waited_us[: len(buckets)], waited_us[len(buckets) :]
    hidden_us = [
        max(0.0, collectives[i].duration_us - exposed) for i, exposed in enumerate(exposed_us)
    ]
    return Timeline(
        slots=tuple(run.slots),
        exposed_us=tuple(exposed_us),
        alive_bytes=tuple(alive_bytes(problem, buckets)),
        in_flight_bytes=tuple(in_flight_bytes(problem, buckets)),
        total_us=max((slot.end_us for slot in run.slots), default=0.0),
        slowdown_us=sum(map(cost_model.slowdown_us, hidden_us)),
        user_exposed_us=tuple(user_exposed_us),
    )


class _Run:
    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.lanes: defaultdict[str, Lane] = defaultdict(Lane)

    def add(
        self,
        lane: str,
        kind: str,
        index: int,
        duration_us: float,
        after: Slot | None = None,
        shares: str = "",
    ) -> Slot:
        """Add a slot that starts when its lanes are free and ``after`` is done."""
        busy = (lane, shares) if shares else (lane,)
        start_us = 0.0 if after is None else after.end_us
        for name in busy:
            start_us = self.lanes[name].start_us(start_us)
        slot = Slot(kind, index, start_us, duration_us, lane)
        for name in busy:
            self.lanes[name].run(duration_us, start_us)
        self.slots.append(slot)
        return slot


@dataclass(frozen=True)
class Clock:
    """The times of a timeline, without its slots.

    Attributes:
        step_us: start time of each step, then the time when the compute lane is done.
        exposed_us: same as in ``Timeline``.
        total_us: same as in ``Timeline``.
    """

    step_us: list[float]
    exposed_us: list[float]
    total_us: float


def clock(
    problem: Problem,
    buckets: Sequence[Bucket],
    cost_model: TransferCostModel,
    scenario: Scenario = AS_PREDICTED,
) -> Clock:
    """Return the times of ``simulate``, by one sweep over ``buckets`` in launch order."""
    costs = [bucket_cost(problem, bucket, cost_model) for bucket in buckets]
    costs += user_costs(problem, cost_model)
    return sweep(
        start_times_us(problem),
        launches=[bucket.launch for bucket in buckets],
        waits=[bucket.wait for bucket in buckets],
        costs=[scenario.cost(cost) for cost in costs],
        successors=next_in_chain(buckets),
        users=problem.user_collectives,
    )


def start_times_us(problem: Problem) -> list[float]:
    """Return the start of each step, then the graph's end, if nothing delays compute."""
    return [0.0, *accumulate(problem.compute_us)]


def sweep(
    start_us: Sequence[float],
    launches: Sequence[int],
    waits: Sequence[int],
    costs: Sequence[BucketCost],
    successors: Mapping[int, int],
    users: Sequence[UserCollective] = (),
) -> Clock:
    """Return the times of b buckets and user collectives in s steps, in O(b log b + s).

    Args:
        start_us: result of ``start_times_us``.
        launches: launch step of each bucket, ascending.
        waits: wait step of each bucket.
        costs: costs of the buckets, then of ``users``.
        successors: result of ``buckets.next_in_chain``.
    """
    end_us, exposed_us = [0.0] * len(costs), [0.0] * len(costs)
    lanes: defaultdict[str, Lane] = defaultdict(Lane)
    # Steps run back to back, except for the work added before them. The compute lane need not run
    # step by step: its delay is the sum of the work added so far.
    added_us = [0.0] * len(start_us)
    late_us = 0.0
    for step, _, _, is_launch, i in sorted_events(launches, waits, successors, users):
        now_us = start_us[step] + late_us
        if is_launch:
            us, lane_us, _, lane, _, shares = costs[i]
            ready_us = now_us + us
            if shares:
                end_us[i] = lanes[lane].run(lane_us, lanes[shares].start_us(ready_us))
                lanes[shares].free_us = end_us[i]
            else:
                end_us[i] = lanes[lane].run(lane_us, ready_us)
        else:
            exposed_us[i] = max(0.0, end_us[i] - now_us)
            us = exposed_us[i] + costs[i].copy_out_us
        added_us[step] += us
        late_us += us
    step_us = [start + late for start, late in zip(start_us, accumulate(added_us))]
    total_us = max([step_us[-1], *(lane.free_us for lane in lanes.values())])
    return Clock(step_us, exposed_us[: len(launches)], total_us)


def bucket_cost(problem: Problem, bucket: Bucket, cost_model: TransferCostModel) -> BucketCost:
    """Return the time of ``bucket`` and of the copies around it."""
    sent = sent_buffers(problem.transfers, bucket)
    # All-to-alls are not coalesced.
    sizes = [sum(t.num_bytes for t in buffer) for buffer in sent if bucket.exchanges]
    lane_us = _lane_us(bucket, sizes or [bucket.num_bytes], cost_model)
    if bucket.kind in HOST_COPIES:
        return BucketCost(0.0, lane_us, 0.0, bucket.kind)
    latency_us = _lane_us(bucket, [1] * max(1, len(sizes)), cost_model)
    buffers_us = cost_model.buffer_us(bucket.world, bucket.stride) * (len(bucket.buffers) - 1)
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        return BucketCost(buffers_us, lane_us, 0.0, latency_us=latency_us)  # nothing to copy
    gathers = bucket.kind == TransferKind.ALL_GATHER
    num_shards = bucket.world if gathers else 1  # a rank packs only its own shard for a gather
    copy_in_us, copy_out_us = buffers_us, 0.0
    for transfers in sent:
        num_bytes = sum(t.num_bytes for t in transfers)
        # Copy-in packs the shards of a gather, or full gradients. A tensor alone in its buffer is
        # copied only to be cast, padded or made contiguous.
        if is_copied_in(transfers):
            copy_in_us += cost_model.copy_us(num_bytes // num_shards)
        # Copy-out copies full parameters out of a shared buffer; reduced shards are slices of it.
        if gathers and len(transfers) > 1:
            copy_out_us += cost_model.copy_us(num_bytes)
        if transfers[0].summed_in:  # reads all ranks' rows, and writes their sum
            copied = (num_bytes + sum(t.reduced_bytes for t in transfers)) // 2
            copy_out_us += cost_model.copy_us(copied)
    return BucketCost(copy_in_us, lane_us, copy_out_us, latency_us=latency_us)


def _lane_us(bucket: Bucket, sizes: Sequence[int], cost_model: TransferCostModel) -> float:
    group = bucket.world, bucket.stride
    if bucket.exchanges:
        return sum(cost_model.exchange_us(num_bytes, *group) for num_bytes in sizes)
    return sum(cost_model.collective_us(bucket.kind, num_bytes, *group) for num_bytes in sizes)


def user_costs(problem: Problem, cost_model: TransferCostModel) -> list[BucketCost]:
    """Return the costs of user collectives.

    ``BucketCost.shares`` is set if transfers of ``problem`` use the same interconnect.
    """
    groups = {(t.world, t.stride) for t in problem.transfers if t.group}
    groups |= {(t.num_replicas, t.replica_stride) for t in problem.transfers if t.replicas}
    ours = {cost_model.crosses_nodes(*group) for group in groups}
    costs = []
    for user in problem.user_collectives:
        lane_us, latency_us = (
            cost_model.collective_us(user.kind, num_bytes, user.world, user.stride)
            for num_bytes in (user.num_bytes, 1)
        )
        shares = COMMUNICATION if cost_model.crosses_nodes(user.world, user.stride) in ours else ""
        costs.append(BucketCost(0.0, lane_us, 0.0, USER, min(latency_us, lane_us), shares))
    return costs
