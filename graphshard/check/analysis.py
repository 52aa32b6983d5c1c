"""Analyze a recorded step: kernels and waits, peak memory, and order compared with the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest

from ..kinds import TransferKind
from ..planning import live_bytes
from ..planning.plan import Plan, events_by_step
from .actions import HOST, Action, Allocate, Free, GraphCall, WaitEvent, Work

# --- counts --------------------------------------------------------------------------------------

_BUCKET_COPIES = ("aten._foreach_copy_", "aten._chunk_cat", "aten.split_with_sizes_copy")


@dataclass(frozen=True)
class Counts:
    """Numbers of kernels, copies and waits in a step.

    Waits are counted over the whole step, everything else only within its graphs.

    Attributes:
        kernels: number of kernels, including ``bucket_copies``.
        bucket_copies: number of kernels that copy into and out of packed buffers.
        collectives: number of collective launches.
        host_copies: number of tensors copied between host and device.
        host_waits: number of times that the host waits for the device, including ``blocking``.
        blocking: names of the copies and synchronizations that block the host.
    """

    kernels: int
    bucket_copies: int
    collectives: int
    host_copies: int
    host_waits: int
    blocking: tuple[str, ...]


def count(actions: Sequence[Action], calls: Iterable[GraphCall]) -> Counts:
    """Count the actions of a step; ``calls`` hold positions in ``actions``."""
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
    # Ignore blocks that are not in ``sizes``.
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
    """Return the plan most similar to a call, among plans with as many launches, or None."""
    call = _without_others(plans, call)
    same = [plan for plan in plans if _num_launches(plan) == len(call.launches)]
    return min(same, key=lambda plan: len(_differences(plan, call)), default=None)


def order_differences(plans: Sequence[Plan], call: GraphCall) -> list[str]:
    """Describe each difference in order between a call and the most similar of ``plans``."""
    call = _without_others(plans, call)
    if plan := find_plan(plans, call):
        return _differences(plan, call)
    counts = " or ".join(f"{_num_launches(plan)} ({plan.graph})" for plan in plans)
    return [f"{len(call.launches)} launches instead of {counts}"]


def _without_others(plans: Sequence[Plan], call: GraphCall) -> GraphCall:
    """Return ``call`` without launches in groups that no plan uses (tensor parallelism)."""
    groups = {"", *(bucket.group for plan in plans for bucket in plan.buckets)}
    kept = [i for i, launch in enumerate(call.launches) if launch.group in groups]
    number = {old: new for new, old in enumerate(kept)}
    return dataclasses.replace(
        call,
        launches=[call.launches[i] for i in kept],
        order=[number[i] if i >= 0 else ~number[~i] for i in call.order if max(i, ~i) in number],
    )


def _num_launches(plan: Plan) -> int:
    return sum(map(plan.num_launches, plan.buckets))


def _differences(plan: Plan, call: GraphCall) -> list[str]:
    events = [
        (event.bucket, part, event.is_wait)
        for event in chain.from_iterable(events_by_step(plan.problem.num_steps, plan.buckets))
        for part in range(plan.num_launches(plan.buckets[event.bucket]))
    ]
    planned = [(bucket, part) for bucket, part, is_wait in events if not is_wait]
    number_of = {launch: number for number, launch in enumerate(planned)}
    differences = []
    for number, launch in enumerate(call.launches):
        bucket = plan.buckets[planned[number][0]]
        op = "all_to_all_single" if plan.exchanges(bucket) else _OPS[bucket.kind]
        if not _launches(launch.op, launch.group, op, bucket.group):
            differences.append(
                f"{plan.graph}: launch {number} is {launch.op} in group {launch.group!r} instead "
                f"of {op} in {bucket.group!r}"
            )
    numbers = ((number_of[bucket, part], is_wait) for bucket, part, is_wait in events)
    expected = [~number if is_wait else number for number, is_wait in numbers]
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


def _launches(op: str, group: str, planned_op: str, planned_group: str) -> bool:
    name = op.split(".")[1].removesuffix("_").removesuffix("_coalesced")
    return name == planned_op and group in (planned_group, "")


def _describe(number: int | None) -> str:
    if number is None:
        return "the end"
    return f"launch {number}" if number >= 0 else f"the wait for launch {~number}"
