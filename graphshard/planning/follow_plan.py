"""Place the buckets of the first rank's plan in this rank's graph, in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import BackendError
from ..kinds import HOST_COPIES
from .buckets import next_in_chain
from .offload import without_host_copies
from .plan import RANK_DEPENDENT, Bucket, Plan, PlanParam, Problem, Transfer


class _LaunchRange(NamedTuple):
    """Steps at which a bucket can be launched without changing the order of launches."""

    earliest: int
    latest: int


def follow_plan(problem: Problem, params: Sequence[PlanParam], plan: Plan) -> tuple[Bucket, ...]:
    """Return the collectives of ``plan`` in order, with launches and waits that fit ``problem``.

    A bucket keeps its position among the user collectives. Its launch moves to the nearest step at
    which its transfers are ready in ``problem`` and not yet due. Its wait moves to the step at
    which the bucket is due. If that is the end of the graph, the wait stays, but comes no earlier
    than the launch and no later than the end. The wait for a reduction that is then averaged over
    replicas moves to the launch of the average.

    Args:
        plan: first rank's plan for the same transfers and user collectives (compared by
            ``ranks.plan_consensus``), possibly with transfers in a different order and with
            different steps. ``PlanParam.input`` already refers to this rank's graph inputs.

    Raises:
        BackendError: ``problem`` does not allow the order of the buckets.
    """
    end, buckets = problem.num_steps, _buckets_for(problem, params, plan)
    bucket_transfers = [[problem.transfers[i] for i in bucket.transfers] for bucket in buckets]
    due = [min([end, *(t.due for t in transfers)]) for transfers in bucket_transfers]
    sections = [_section(problem, plan, bucket) for bucket in buckets]
    ranges = _launch_ranges(bucket_transfers, due, sections)
    placed: list[Bucket] = []
    for bucket, bounds, wait in zip(buckets, ranges, due):
        if bounds.earliest > bounds.latest:
            fqns = {param.input: param.fqn for param in plan.params}
            own = (problem.transfers[i].param for i in bucket.transfers)
            names = dict.fromkeys(fqns[params[i].input] for i in own if i is not None)
            raise BackendError(
                f"the {problem.graph} graph cannot follow the first rank's plan: the {bucket.kind} "
                f"of {', '.join(names) or 'fp8 maxima'} cannot be launched before step "
                f"{bounds.earliest}, but must be launched by step {bounds.latest}. Use the same "
                "model and similar batches on all ranks"
            )
        launch = min(max(bucket.launch, bounds.earliest), bounds.latest)
        wait = wait if wait < end else min(max(bucket.wait, launch), end)
        placed.append(dataclasses.replace(bucket, launch=launch, wait=wait))
    averages = next_in_chain(placed)  # without host copies, only averages continue a chain
    return tuple(
        dataclasses.replace(b, wait=placed[averages[i]].launch) if i in averages else b
        for i, b in enumerate(placed)
    )


def _section(problem: Problem, plan: Plan, bucket: Bucket) -> _LaunchRange:
    """Return the steps between the same user collectives as the bucket's launch in ``plan``."""
    number, users = plan.problem.num_user_launches(bucket.launch), problem.user_collectives
    return _LaunchRange(
        earliest=users[number - 1].launch + 1 if number else 0,
        latest=users[number].launch if number < len(users) else problem.num_steps,
    )


def _buckets_for(problem: Problem, params: Sequence[PlanParam], plan: Plan) -> list[Bucket]:
    ours = _positions(problem.transfers, params)
    theirs = _positions(without_host_copies(plan.problem).transfers, plan.params)
    moved = {i: j for t in theirs for i, j in zip(theirs[t], ours[t], strict=True)}
    return [
        dataclasses.replace(b, buffers=tuple(tuple(moved[i] for i in buf) for buf in b.buffers))
        for b in plan.buckets
        if b.kind not in HOST_COPIES
    ]


def _positions(
    transfers: Sequence[Transfer], params: Sequence[PlanParam]
) -> dict[Transfer, list[int]]:
    """Map each transfer, without its rank-dependent fields, to its positions in ``transfers``."""
    positions: dict[Transfer, list[int]] = {}
    for i, t in enumerate(transfers):
        number = None if t.param is None else params[t.param].input
        # Transfers that differ only in steps share a key and are matched in order.
        common = dataclasses.replace(t, param=number, **RANK_DEPENDENT)
        positions.setdefault(common, []).append(i)
    return positions


def _launch_ranges(
    bucket_transfers: Sequence[Sequence[Transfer]],
    due: Sequence[int],
    sections: Sequence[_LaunchRange],
) -> list[_LaunchRange]:
    ready = (max(t.ready for t in transfers) for transfers in bucket_transfers)
    # Buckets are in launch order: none may be launched before an earlier one, or after a later one.
    earliest = accumulate(map(max, ready, (section.earliest for section in sections)), max)
    last = [min(step, section.latest) for step, section in zip(due, sections)]
    latest = list(accumulate(reversed(last), min))[::-1]
    return [_LaunchRange(*bounds) for bounds in zip(earliest, latest)]
