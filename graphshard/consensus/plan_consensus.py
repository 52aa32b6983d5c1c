"""One plan on all ranks, for graphs that each rank compiles by itself.

A plan follows from predicted times, and those from the sizes of a rank's batch. So the first rank
of the group chooses which transfers each bucket carries, and in which order buckets are launched; a
rank whose own plan differs compiles again. Each rank chooses for itself at which steps it launches
a bucket and waits for it.

    every rank   compile ─► the first rank's plans for these transfers ─► not mine? compile again
    every call   the call log of the group ─► run the graph

Transfers that the first rank has planned before keep their buckets, so a rank may compile again,
for another batch size, while its peers do not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from .._torch.distributed import process_group
from ..errors import BackendError
from ..kinds import HOST_COPIES, GraphKind, TransferKind
from ..planning.host_copies import without_host_copies
from ..planning.plan import Bucket, Plan, Problem, Transfer
from .call_log import CallLog, call_log_of

R = TypeVar("R")


@dataclass(frozen=True)
class _GraphKey:
    """The things that ranks share to follow one plan.

    Attributes:
        text: what the graphs communicate, and what their plans depend on besides.
        groups: names of the process groups of all ranks that have the graphs.
    """

    text: str
    groups: tuple[str, ...]


class PlanConsensus:
    """The first rank's plans for the graphs of one backend, as far as this rank has asked."""

    def __init__(self) -> None:
        self._plans: dict[_GraphKey, list[Plan]] = {}

    def common_plans(
        self, plans: Sequence[Plan], context: str, groups: Sequence[str]
    ) -> list[Plan]:
        """Return the plans that all ranks follow in place of their own.

        Args:
            plans: this rank's plans for one Dynamo graph.
            context: what plans depend on besides the graph.
            groups: names of the process groups of all ranks that have this graph.

        Raises:
            BackendError: other ranks ask about graphs that communicate something else.
        """
        numbers = _group_numbers(plans)
        common = [_with_group_names(plan, numbers) for plan in plans]
        key = _GraphKey(f"{_communication_text(common)}\n{context}", tuple(groups))
        if key not in self._plans:
            for call_log in _call_logs(common, groups):
                text = call_log.choose_on_first_rank(
                    key=_digest(key.text), choose=partial(_to_json, common), text=key.text
                )
                common = [Plan.from_json(plan_json) for plan_json in json.loads(text)]
            self._plans[key] = common
        names = {number: name for name, number in numbers.items()}
        return [_with_group_names(plan, names) for plan in self._plans[key]]


def _group_numbers(plans: Sequence[Plan]) -> dict[str, str]:
    """Return "#0", "#1", ... for the names of the groups in which ``plans`` communicate.

    All ranks give the same number to their groups along one axis of the mesh, whose names differ.
    """
    transfers = [transfer for plan in plans for transfer in plan.problem.transfers]
    names = [name for transfer in transfers for name in (transfer.group, transfer.replicas)]
    return {name: f"#{i}" for i, name in enumerate(filter(None, dict.fromkeys(names)))}


def _with_group_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Replace every group name in ``plan`` by what ``names`` has for it."""
    transfers = tuple(
        dataclasses.replace(t, group=names.get(t.group, ""), replicas=names.get(t.replicas, ""))
        for t in plan.problem.transfers
    )
    buckets = tuple(dataclasses.replace(b, group=names.get(b.group, "")) for b in plan.buckets)
    problem = dataclasses.replace(plan.problem, transfers=transfers)
    return dataclasses.replace(plan, problem=problem, buckets=buckets)


class _LaunchRange(NamedTuple):
    """The steps at which a bucket can be launched without changing the order of launches."""

    earliest: int
    latest: int


def follow(problem: Problem, plan: Plan) -> tuple[Bucket, ...]:
    """Return the buckets of ``plan``, in their order, launched and waited for in ``problem``.

    A bucket stays at its steps as far as ``problem`` has the transfers ready and not yet due there.

    Args:
        problem: this rank's graph.
        plan: the first rank's plan for the same transfers, perhaps with other steps.

    Raises:
        BackendError: this problem has other transfers, or does not allow their order.
    """
    end, buckets = problem.num_steps, [b for b in plan.buckets if b.kind not in HOST_COPIES]
    ours = [_without_steps(t) for t in problem.transfers]
    if ours != [_without_steps(t) for t in without_host_copies(plan.problem).transfers]:
        raise BackendError(
            f"the {problem.graph} graph gathers or reduces other parameters than the first rank's"
        )
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


def _launch_ranges(
    bucket_transfers: Sequence[Sequence[Transfer]], due: Sequence[int]
) -> list[_LaunchRange]:
    """Return for each bucket, in launch order, the steps between those of its neighbours."""
    ready = [max(t.ready for t in transfers) for transfers in bucket_transfers]
    earliest = accumulate(ready, max)
    latest = list(accumulate(reversed(due), min))[::-1]
    return [_LaunchRange(*bounds) for bounds in zip(earliest, latest)]


def _waited_before_replicas(bucket: Bucket, buckets: Sequence[Bucket]) -> Bucket:
    """Have ``bucket`` waited for where the average over replicas of its shards is launched."""
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        return bucket
    averages = [
        other
        for other in buckets
        if other.kind == TransferKind.ALL_REDUCE_SHARDS and other.buffers == bucket.buffers
    ]
    return dataclasses.replace(bucket, wait=averages[0].launch) if averages else bucket


def kept_inputs(plan: Plan, forward: Problem) -> set[int]:
    """Return the graph inputs of the parameters that ``plan`` keeps unsharded for backward.

    Args:
        plan: of a graph with the same parameters; symbolic sizes, which are inputs too, may have
            moved them.
        forward: the problem of the graph; its ``Transfer.param`` is a graph input.
    """
    plan_inputs = [param.input for param in plan.params]
    theirs = sorted(plan_inputs[t.param] for t in plan.problem.transfers if t.param is not None)
    ours = sorted(t.param for t in forward.transfers if t.param is not None)
    moved = dict(zip(theirs, ours, strict=True))
    return {moved[plan_inputs[i]] for i in plan.kept}


def _communication_text(plans: Sequence[Plan]) -> str:
    """Describe what graphs need to have in common to follow one plan: what they gather and reduce.

    Left out are which parameters stay unsharded and at which steps a transfer is ready or due: they
    may depend on the sizes of a rank's batch.
    """
    lines: list[str] = []
    kept: list[str] = []
    for plan in plans:
        # Symbolic sizes are inputs, too: not every rank's graph has a parameter at the same place.
        params = [f"{dataclasses.replace(param, input=0)}" for param in plan.params]
        transfer_lines: dict[Transfer, str] = {}
        for transfer in without_host_copies(plan.problem).transfers:
            param = "" if transfer.param is None else params[transfer.param]
            common = dataclasses.replace(_without_steps(transfer), param=0)
            transfer_lines[transfer] = f"{param} {common}"
        title = plan.graph if plan.graph == GraphKind.BACKWARD else plan.title()
        lines += [title, *sorted([*transfer_lines.values(), *kept])]
        kept = [line for transfer, line in transfer_lines.items() if transfer.param in plan.kept]
    return "\n".join(lines)


def _without_steps(transfer: Transfer) -> Transfer:
    """Set to constants what may differ between ranks: steps, and distances between ranks."""
    return dataclasses.replace(transfer, ready=0, due=0, last=0, stride=1, replica_stride=1)


def log_every_call(
    compiled: Callable[..., R], plans: Sequence[Plan], groups: Sequence[str]
) -> Callable[..., R]:
    """Wrap a compiled graph so that each call of it is logged with those of the other ranks.

    Args:
        plans: what the graph runs; without collectives, ``compiled`` itself is returned.
        groups: names of the process groups of all ranks that have this graph.
    """
    numbers = _group_numbers(plans)
    text = "\n".join(_with_group_names(plan, numbers).collectives_text() for plan in plans)
    for call_log in _call_logs(plans, groups):
        for name in numbers:
            call_log.involve(process_group(name))
        compiled = _logged(compiled, call_log, _digest(text), text)
    return compiled


def _logged(
    compiled: Callable[..., R], call_log: CallLog, plan_id: str, text: str
) -> Callable[..., R]:
    is_first = True

    def call(*args: object) -> R:
        nonlocal is_first
        if is_first:
            call_log.first_run(plan_id, text)
            is_first = False
        else:
            call_log.run(plan_id)
        try:
            return compiled(*args)
        except RuntimeError as error:
            call_log.explain(error)
            raise

    return call


def _call_logs(plans: Sequence[Plan], groups: Sequence[str]) -> list[CallLog]:
    """Return the call logs of ``groups``; none if ``plans`` do not communicate."""
    communicate = any(plan.buckets for plan in plans)
    return [call_log_of(process_group(name)) for name in groups] if communicate else []


def _to_json(plans: Sequence[Plan]) -> str:
    return json.dumps([plan.to_json() for plan in plans])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
