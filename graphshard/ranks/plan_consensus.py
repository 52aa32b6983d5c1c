"""One plan on all ranks, for graphs that each rank compiles by itself.

A plan follows from predicted times, which depend on a rank's batch size. So the first rank of the
group chooses which transfers each bucket carries and the order in which buckets are launched; a
rank whose own plan differs compiles again. Each rank chooses by itself at which steps it launches a
bucket and waits for it.

    every rank   compile ─► the first rank's plans for these transfers ─► differ? compile again
    every call   the call log of the group ─► run the graph

Transfers that the first rank has planned before keep their buckets, so a rank may compile again,
for another batch size, while its peers do not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .._torch.autograd import on_backward_error
from .._torch.distributed import device_for, process_group
from ..errors import BackendError
from ..kinds import HOST_COPIES, TransferKind
from ..planning.offload import without_host_copies
from ..planning.plan import Bucket, Plan, PlanParam, Problem, Transfer
from .call_log import CallLog, call_log_of
from .common_form import (
    collectives_text,
    communication_text,
    group_numbers,
    with_group_names,
    with_inputs_of,
    without_steps,
)
from .differences import ANEW
from .store import digest

R = TypeVar("R")


@dataclass(frozen=True)
class _GraphKey:
    """The facts that ranks must share to follow one plan.

    Attributes:
        text: what the graphs communicate, and what else their plans depend on.
        groups: names of the process groups of all ranks that have the graphs.
    """

    text: str
    groups: tuple[str, ...]


class PlanConsensus:
    """The first rank's plans for one backend's graphs, as far as this rank has asked for them."""

    def __init__(self) -> None:
        self._plans: dict[_GraphKey, list[Plan]] = {}
        self._choices: dict[_GraphKey, list[str]] = {}

    def common_choice(
        self,
        about: str,
        choose: Callable[[int], str],
        groups: Sequence[str],
        *,
        serves: Callable[[str], bool],
        excess: Callable[[str], int],
    ) -> str:
        """Return what the first rank chooses for all ranks, before there is a plan.

        If an earlier choice about the same subject serves this rank, returns that one without
        communication. This lets a rank compile again while its peers do not. Otherwise the first
        rank makes a new choice, and all ranks must call this.

        Args:
            about: subject of the choice; equal on all ranks.
            choose: function that makes the choice on the first rank, given the largest excess of
                any rank under the previous attempt (0 at first). "" means no choice and is not
                remembered.
            groups: names of the process groups of all ranks that have to choose.
            serves: function that returns whether an earlier choice serves this rank; the oldest one
                that does is taken.
            excess: function that returns how badly a new choice suits this rank; 0 if it serves.
                While any rank returns more, the first rank chooses again.
        """
        known = self._choices.setdefault(_GraphKey(about, tuple(groups)), [])
        if (earlier := next(filter(serves, known), None)) is not None:
            return earlier
        text, most = f"{ANEW} (no. {len(known) + 1}): {about}" if known else about, 0
        while True:
            chosen = _chosen_by_first(partial(choose, most), text, groups)
            most = _largest(excess(chosen) if chosen else 0, groups)
            if not most:
                break
        known += [chosen] if chosen else []
        return chosen

    def common_plans(
        self, plans: Sequence[Plan], context: str, groups: Sequence[str]
    ) -> list[Plan]:
        """Return the plans that all ranks follow instead of their own.

        Args:
            plans: this rank's plans for one Dynamo graph.
            context: what plans depend on in addition to the graph.
            groups: names of the process groups of all ranks that have this graph.

        Raises:
            BackendError: other ranks ask about graphs that communicate something else.
        """
        numbers = group_numbers(plans)
        common = [with_group_names(plan, numbers) for plan in plans]
        key = _GraphKey(f"{communication_text(common)}\n{context}", tuple(groups))
        if key not in self._plans:
            for call_log in _call_logs(common, groups):
                text = call_log.choose_on_first_rank(
                    key=digest(key.text), choose=partial(_to_json, common), text=key.text
                )
                common = [Plan.from_json(plan_json) for plan_json in json.loads(text)]
            self._plans[key] = common
        names = {number: name for name, number in numbers.items()}
        return with_inputs_of([with_group_names(p, names) for p in self._plans[key]], plans)


def _chosen_by_first(choose: Callable[[], str], text: str, groups: Sequence[str]) -> str:
    """Return what ``choose`` returns on the first rank of all groups."""
    for name in groups:
        chosen = call_log_of(process_group(name)).choose_on_first_rank(
            digest(text), choose, text, elsewhere=str
        )
        choose = partial(str, chosen)
    return choose()


def _largest(number: int, groups: Sequence[str]) -> int:
    """Return the largest number of any rank; runs one collective in each group."""
    for name in groups:
        group = process_group(name)
        largest = torch.tensor(number, device=device_for(group))
        try:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            number = int(largest)
        except RuntimeError as error:
            call_log_of(group).raise_posted_fault(error)
            raise
    return number


class _LaunchRange(NamedTuple):
    """The steps at which a bucket can be launched without changing the order of launches."""

    earliest: int
    latest: int


def place_buckets(problem: Problem, params: Sequence[PlanParam], plan: Plan) -> tuple[Bucket, ...]:
    """Return the buckets of ``plan``, in their order, with launches and waits that fit ``problem``.

    A bucket keeps its steps as far as its transfers are ready and not yet due there in ``problem``.

    Args:
        problem: this rank's graph.
        params: parameters of ``problem``.
        plan: the first rank's plan for the same transfers, possibly in another order and with other
            steps; its parameters are identified by this rank's graph inputs.

    Raises:
        BackendError: ``problem`` has other transfers, or does not allow their order.
    """
    end, buckets = problem.num_steps, _buckets_for(problem, params, plan)
    bucket_transfers = [[problem.transfers[i] for i in bucket.transfers] for bucket in buckets]
    due = [min([end, *(t.due for t in transfers)]) for transfers in bucket_transfers]
    ranges = _launch_ranges(bucket_transfers, due)
    placed: list[Bucket] = []
    for bucket, bounds, wait in zip(buckets, ranges, due):
        if bounds.earliest > bounds.latest:
            raise BackendError(
                f"the {problem.graph} graph cannot follow the first rank's plan: {bucket} would be "
                f"launched at step {bounds.earliest} at the earliest and {bounds.latest} at the "
                "latest"
            )
        launch = min(max(bucket.launch, bounds.earliest), bounds.latest)
        wait = wait if wait < end else min(max(bucket.wait, launch), end)
        placed.append(dataclasses.replace(bucket, launch=launch, wait=wait))
    return tuple(_waited_before_replicas(bucket, placed) for bucket in placed)


def _buckets_for(problem: Problem, params: Sequence[PlanParam], plan: Plan) -> list[Bucket]:
    """Return the collectives of ``plan`` as buckets of the transfers in ``problem``.

    Raises:
        BackendError: ``problem`` has other transfers.
    """
    collectives = without_host_copies(plan.problem).transfers
    ours = _positions(problem.transfers)
    theirs = _positions(_numbered(collectives, plan.params, params))
    if {t: len(positions) for t, positions in ours.items()} != {
        t: len(positions) for t, positions in theirs.items()
    }:
        raise BackendError(
            f"the {problem.graph} graph gathers or reduces other parameters than the first rank's"
        )
    moved = {i: j for t, positions in theirs.items() for i, j in zip(positions, ours[t])}
    return [
        dataclasses.replace(b, buffers=tuple(tuple(moved[i] for i in buf) for buf in b.buffers))
        for b in plan.buckets
        if b.kind not in HOST_COPIES
    ]


def _numbered(
    transfers: Sequence[Transfer], theirs: Sequence[PlanParam], ours: Sequence[PlanParam]
) -> list[Transfer]:
    """Number the parameters of ``transfers`` by their positions in ``ours``; -1 if missing."""
    numbers = {param.input: i for i, param in enumerate(ours)}
    return [
        t
        if t.param is None
        else dataclasses.replace(t, param=numbers.get(theirs[t.param].input, -1))
        for t in transfers
    ]


def _positions(transfers: Sequence[Transfer]) -> dict[Transfer, list[int]]:
    """Return the positions of each transfer; transfers that differ only in steps share a key."""
    positions: dict[Transfer, list[int]] = {}
    for i, transfer in enumerate(transfers):
        positions.setdefault(without_steps(transfer), []).append(i)
    return positions


def _launch_ranges(
    bucket_transfers: Sequence[Sequence[Transfer]], due: Sequence[int]
) -> list[_LaunchRange]:
    """Return the steps at which each bucket can be launched; buckets are in launch order."""
    ready = [max(t.ready for t in transfers) for transfers in bucket_transfers]
    earliest = accumulate(ready, max)
    latest = list(accumulate(reversed(due), min))[::-1]
    return [_LaunchRange(*bounds) for bounds in zip(earliest, latest)]


def _waited_before_replicas(bucket: Bucket, buckets: Sequence[Bucket]) -> Bucket:
    """Move the wait of ``bucket`` to the launch of the all-reduce of its shards over replicas."""
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        return bucket
    averages = [
        other
        for other in buckets
        if other.kind == TransferKind.ALL_REDUCE_SHARDS and other.buffers == bucket.buffers
    ]
    return dataclasses.replace(bucket, wait=averages[0].launch) if averages else bucket


def log_every_call(
    compiled: Callable[..., R], plans: Sequence[Plan], groups: Sequence[str]
) -> Callable[..., R]:
    """Wrap a compiled graph so that each of its calls goes into the call logs of its groups.

    Args:
        plans: plans that the graph runs; if they have no collectives, ``compiled`` is returned as
            is.
        groups: names of the process groups of all ranks that have this graph.
    """
    numbers = group_numbers(plans)
    common = [with_group_names(plan, numbers) for plan in plans]
    text = f"{communication_text(common)}\n{collectives_text(common)}"
    for call_log in _call_logs(plans, groups):
        for name in numbers:
            call_log.release_also(process_group(name))
        compiled = _logged(compiled, call_log, digest(text), text)
    return compiled


def _logged(
    compiled: Callable[..., R], call_log: CallLog, plan_id: str, text: str
) -> Callable[..., R]:
    is_first = True

    def call(*args: object) -> R:
        nonlocal is_first
        # ``enters_mode`` comes first, since it has to see the mode of every run.
        if call_log.enters_mode(torch.is_grad_enabled()) or is_first:
            call_log.first_run(plan_id, text)
        else:
            call_log.run(plan_id)
        try:
            outputs = compiled(*args)
        except RuntimeError as error:
            call_log.raise_posted_fault(error)
            raise
        if is_first and isinstance(outputs, Sequence):
            on_backward_error(outputs, call_log.raise_posted_fault)
        is_first = False
        return outputs

    return call


def _call_logs(plans: Sequence[Plan], groups: Sequence[str]) -> list[CallLog]:
    """Return the call logs of ``groups``; none if ``plans`` have no collectives."""
    communicate = any(plan.buckets for plan in plans)
    return [call_log_of(process_group(name)) for name in groups] if communicate else []


def _to_json(plans: Sequence[Plan]) -> str:
    return json.dumps([plan.to_json() for plan in plans])
