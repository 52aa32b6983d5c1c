"""Compare the launches and waits of a graph run with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, zip_longest

from ..kinds import TransferKind
from ..planning.plan import Bucket, Plan, events_by_step
from .runs import GraphCall

_OPS = {
    TransferKind.ALL_GATHER: "all_gather_into_tensor",
    TransferKind.REDUCE_SCATTER: "reduce_scatter_tensor",
    TransferKind.ALL_REDUCE: "all_reduce",
    TransferKind.ALL_REDUCE_MAX: "all_reduce",
    TransferKind.ALL_REDUCE_SHARDS: "all_reduce",
    TransferKind.COPY_TO_DEVICE: "copy_to_device",
    TransferKind.COPY_TO_HOST: "copy_to_host",
}


def find_plan(plans: Sequence[Plan], run: GraphCall) -> Plan | None:
    """Return the plan that a run most likely followed.

    It is the plan with as many launches from which the run differs least; None if no plan has as
    many launches.
    """
    same = [plan for plan in plans if len(plan.buckets) == len(run.launches)]
    return min(same, key=lambda plan: len(_differences(plan, run)), default=None)


def order_faults(plans: Sequence[Plan], run: GraphCall) -> list[str]:
    """Return one sentence for each difference between a run and its plan.

    Args:
        plans: plans of all graphs.
    """
    if plan := find_plan(plans, run):
        return _differences(plan, run)
    counts = " or ".join(f"{len(plan.buckets)} ({plan.graph})" for plan in plans)
    return [f"{len(run.launches)} launches instead of {counts}"]


def _differences(plan: Plan, run: GraphCall) -> list[str]:
    events = list(chain.from_iterable(events_by_step(plan.problem.num_steps, plan.buckets)))
    launched = [event.bucket for event in events if not event.is_wait]
    number_of = {bucket: number for number, bucket in enumerate(launched)}
    found = []
    for number, launch in enumerate(run.launches):
        bucket = plan.buckets[launched[number]]
        if not _is(launch.op, launch.group, bucket):
            found.append(
                f"{plan.graph}: launch {number} is {launch.op} in group {launch.group!r} instead "
                f"of {bucket.kind} in {bucket.group!r}"
            )
    expected = [~number_of[b] if is_wait else number_of[b] for b, is_wait in events]
    found += [
        f"{plan.graph}: {_describe(ours)} comes where the plan has {_describe(planned)}"
        for ours, planned in zip_longest(_settled(run.order), _settled(expected))
        if ours != planned
    ]
    return found


def _settled(order: Sequence[int]) -> list[int]:
    """Sort each series of adjacent waits by number, because Inductor may swap adjacent waits."""
    by_kind = groupby(order, key=lambda number: number < 0)
    return [number for is_wait, run in by_kind for number in (sorted(run) if is_wait else run)]


def _is(op: str, group: str, bucket: Bucket) -> bool:
    name = op.split(".")[1].removesuffix("_").removesuffix("_coalesced")
    return name == _OPS[bucket.kind] and (group == bucket.group or not group)


def _describe(number: int | None) -> str:
    if number is None:
        return "the end"
    return f"launch {number}" if number >= 0 else f"the wait for launch {~number}"
