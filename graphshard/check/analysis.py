"""Analyze a recorded step: kernels and waits, peak memory, and order compared with the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest

from ..kinds import TransferKind
from ..planning import live_bytes
from ..planning.buckets import events_by_step
from ..planning.plan import Bucket, Plan, UserCollective
from .actions import HOST, Action, Allocate, Free, GraphCall, Launch, WaitEvent, Work

# --- counts --------------------------------------------------------------------------------------

_BUCKET_COPIES = ("aten._foreach_copy_", "aten._chunk_cat", "aten.split_with_sizes_copy")


@dataclass(frozen=True)
class Counts:
    """Numbers of kernels, copies and waits in a step.

    Waits, including ``blocking``, are those of the whole step; everything else is counted only
    within graphs.
    """

    kernels: int  # including ``bucket_copies``
    bucket_copies: int  # kernels that copy into and out of packed buffers
    collectives: int  # launches
    host_copies: int  # tensors copied between host and device
    host_waits: int  # waits of the host for the device, including ``blocking``
    blocking: tuple[str, ...]  # names of the copies and synchronizations that block the host


def count(actions: Sequence[Action], calls: Iterable[GraphCall]) -> Counts:
    """Count kernels, copies and waits in a step; ``calls`` hold positions in ``actions``."""
    in_graphs = [action for call in calls for action in actions[slice(*call.actions)]]
    work = [action for action in in_graphs if isinstance(action, Work)]
    return Counts(
        kernels=sum(action.kernels for action in work),
        bucket_copies=sum(w.kernels for w in work if w.name.startswith(_BUCKET_COPIES)),
        collectives=sum(w.name.startswith("_c10d_functional.") for w in work),
        host_copies=sum(w.name.startswith("aten.copy_") and not w.kernels for w in work),
        host_waits=sum(isinstance(a, WaitEvent) and a.stream == HOST for a in actions),
        blocking=tuple(a.name for a in actions if isinstance(a, Work) and a.blocks_host),
    )


# --- memory --------------------------------------------------------------------------------------

# Allocation granularity of the caching allocator (c10/cuda/CUDACachingAllocator.cpp).
ROUNDING = 512


def peak_bytes(actions: Sequence[Action], call: GraphCall) -> int:
    """Return the peak device memory of one graph call, including its arguments."""
    sizes = _sizes(actions)
    arguments = {block for block in call.arguments if block in sizes}
    # Only arguments and new blocks count; the call may also free other blocks.
    during = actions[slice(*call.actions)]
    counted = arguments | {a.block for a in during if isinstance(a, Allocate)}
    total = sum(sizes[block] for block in arguments)
    known = {block: size for block, size in sizes.items() if block in counted}
    return max(chain([total], _alive_bytes(during, total, known)))


def peak_bytes_of_step(actions: Sequence[Action]) -> int:
    """Return the peak device memory of a step, including memory allocated before it."""
    return max(_alive_bytes(actions, 0, _sizes(actions)), default=0)


def planned_peak_bytes(plan: Plan) -> int:
    """Return the peak device memory that a plan predicts for its graph."""
    return max(live_bytes.alive_bytes(plan.problem, plan.buckets), default=0)


def _sizes(actions: Sequence[Action]) -> dict[int, int]:
    return {
        action.block: -(-action.num_bytes // ROUNDING) * ROUNDING
        for action in actions
        if isinstance(action, Allocate) and action.stream != HOST
    }


def _alive_bytes(actions: Sequence[Action], total: int, sizes: Mapping[int, int]) -> Iterator[int]:
    for action in actions:
        if isinstance(action, Allocate):
            total += sizes.get(action.block, 0)
        elif isinstance(action, Free):
            total -= sizes.get(action.block, 0)
        yield total


# --- order ---------------------------------------------------------------------------------------

_OPS = {
    TransferKind.ALL_GATHER: "all_gather_into_tensor",
    TransferKind.REDUCE_SCATTER: "reduce_scatter_tensor",
    TransferKind.ALL_REDUCE: "all_reduce",
    TransferKind.ALL_REDUCE_MAX: "all_reduce",
    TransferKind.ALL_REDUCE_SHARDS: "all_reduce",
    TransferKind.COPY_TO_DEVICE: "copy_to_device",
    TransferKind.COPY_TO_HOST: "copy_to_host",
}


def find_plan(plans: Sequence[Plan], call: GraphCall) -> Plan | None:
    """Return the most similar plan with the same number of launches as ``call``, or None."""
    same = [plan for plan in plans if len(_planned(plan)[0]) == len(call.launches)]
    return min(same, key=lambda plan: len(_differences(plan, call)), default=None)


def order_differences(plans: Sequence[Plan], call: GraphCall) -> list[str]:
    """Describe how the launches and waits of a call differ from the most similar of ``plans``."""
    if plan := find_plan(plans, call):
        return _differences(plan, call)
    counts = " or ".join(f"{len(_planned(plan)[0])} ({plan.graph})" for plan in plans)
    return [f"{len(call.launches)} launches instead of {counts}"]


def _planned(plan: Plan) -> tuple[list[Launch], list[int]]:
    """Return a plan's launches, and the order of launches and waits, as in ``GraphCall.order``."""
    problem, num_buckets = plan.problem, len(plan.buckets)
    users = problem.user_collectives
    launches: list[Launch] = []
    order, first = list[int](), dict[int, int]()
    events = events_by_step(problem.num_steps, plan.buckets, users)
    for number, is_wait in chain.from_iterable(events):
        user = users[number - num_buckets] if number >= num_buckets else None
        sent = _of_user(user) if user else _of_bucket(plan, plan.buckets[number])
        if not is_wait:
            first[number] = len(launches)
            launches += sent
        elif user and user.wait == problem.num_steps:
            continue  # the graph never waits for it
        numbers = range(first[number], first[number] + len(sent))
        order += [~i for i in numbers] if is_wait else numbers
    return launches, order


def _of_bucket(plan: Plan, bucket: Bucket) -> list[Launch]:
    op = "all_to_all_single" if plan.exchanges(bucket) else _OPS[bucket.kind]
    return [Launch(op, bucket.group)] * plan.num_launches(bucket)


def _of_user(user: UserCollective) -> list[Launch]:
    if user.op == "shard_dim_alltoall":  # an operator of DTensor, which the recorder does not see
        return []
    return [Launch(user.op.removesuffix("_coalesced"), user.group)]


def _differences(plan: Plan, call: GraphCall) -> list[str]:
    planned, expected = _planned(plan)
    differences = []
    for number, (launch, (op, group)) in enumerate(zip(call.launches, planned)):
        name = launch.op.split(".")[1].removesuffix("_").removesuffix("_coalesced")
        known = "" not in (launch.group, group)  # the plan lacks groups that the graph computes
        if name != op or (known and launch.group != group):
            differences.append(
                f"{plan.graph}: launch {number} is {launch.op} in group {launch.group!r} instead "
                f"of {op} in {group!r}"
            )
    differences += [
        f"{plan.graph}: {_describe(ours)} instead of {_describe(theirs)}"
        for ours, theirs in zip_longest(_sort_waits(call.order), _sort_waits(expected))
        if ours != theirs
    ]
    return differences


def _sort_waits(order: Sequence[int]) -> list[int]:
    # Inductor may swap adjacent waits: sort each run of waits by number.
    by_kind = groupby(order, key=lambda number: number < 0)
    return [number for is_wait, run in by_kind for number in (sorted(run) if is_wait else run)]


def _describe(number: int | None) -> str:
    if number is None:
        return "the end"
    return f"launch {number}" if number >= 0 else f"the wait for launch {~number}"
