"""One plan on all ranks, for graphs that each rank compiles by itself.

A plan follows from predicted times, and those from the sizes of a rank's batch. So what travels in
which bucket, and in which order, is what the first rank of the group decided: a rank that decided
otherwise compiles again. When a bucket is launched and waited for, each rank may say for itself.

    every rank   compile ─► the first rank's plans for these transfers ─► not mine? compile again
    every call   the agreement's log of calls ─► run the graph

Transfers that were decided about before keep their buckets, so a rank may compile again, for another
batch size, while its peers do not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from .._torch.distributed import process_group
from ..errors import BackendError
from ..kinds import HOST_COPIES, GraphKind, TransferKind
from ..planning.host_copies import without_host_copies
from ..planning.plan import Bucket, Plan, Problem, Transfer
from .call_log import CallLog, call_log_of


class PlanConsensus:
    """The plans that the graphs of one backend follow."""

    def __init__(self) -> None:
        self._decided: dict[tuple[str, ...], list[Plan]] = {}

    def __call__(self, plans: Sequence[Plan], context: str, groups: Sequence[str]) -> list[Plan]:
        """The plans to follow in place of ``plans``, those of one Dynamo graph on this rank.

        Args:
            context: what plans depend on besides the graph.
            groups: of all ranks that have this graph.

        Raises:
            BackendError: ranks ask about graphs that communicate something else.
        """
        names = _groups_of(plans)
        numbers = {name: f"#{i}" for i, name in enumerate(names)}
        common = [_renamed(plan, numbers) for plan in plans]
        text = f"{_structure(common)}\n{context}"
        key = (text, *groups)
        if key not in self._decided:
            for agreement in _agreements(common, groups):
                made = agreement.choose_on_first_rank(
                    _digest(text), partial(_to_json, common), text
                )
                common = [Plan.from_json(plan) for plan in json.loads(made)]
            self._decided[key] = common
        own = {number: name for name, number in numbers.items()}
        return [_renamed(plan, own) for plan in self._decided[key]]


def _groups_of(plans: Sequence[Plan]) -> list[str]:
    """The groups in which ``plans`` communicate, in an order that all ranks have."""
    transfers = [transfer for plan in plans for transfer in plan.problem.transfers]
    names = [name for transfer in transfers for name in (transfer.group, transfer.replicas)]
    return [name for name in dict.fromkeys(names) if name]


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """With other names of groups: those of one part of a mesh are not those of another."""
    transfers = tuple(
        dataclasses.replace(t, group=names.get(t.group, ""), replicas=names.get(t.replicas, ""))
        for t in plan.problem.transfers
    )
    buckets = tuple(dataclasses.replace(b, group=names.get(b.group, "")) for b in plan.buckets)
    problem = dataclasses.replace(plan.problem, transfers=transfers)
    return dataclasses.replace(plan, problem=problem, buckets=buckets)


def follow(problem: Problem, plan: Plan) -> tuple[Bucket, ...]:
    """The collectives of ``plan``, for the same transfers, in their order, at steps of ``problem``.

    Raises:
        BackendError: this problem does not allow their order.
    """
    end, buckets = problem.num_steps, [b for b in plan.buckets if b.kind not in HOST_COPIES]
    of_plan = without_host_copies(plan.problem)
    ours, theirs = (map(_anywhere, of.transfers) for of in (problem, of_plan))
    if list(ours) != list(theirs):
        raise BackendError(
            f"the {problem.graph} graph gathers or reduces other parameters than the first rank's"
        )
    transfers = [[problem.transfers[i] for i in bucket.transfers] for bucket in buckets]
    due = [min([end, *(t.due for t in of)]) for of in transfers]
    earliest = list(accumulate((max(t.ready for t in of) for of in transfers), max))
    latest = list(accumulate(reversed(due), min))[::-1]
    placed: list[Bucket] = []
    for bucket, *bounds, wait in zip(buckets, earliest, latest, due):
        if bounds[0] > bounds[1]:
            raise BackendError(
                f"the {problem.graph} graph cannot follow the first rank's plan: {bucket} would be "
                f"launched at step {bounds[0]} at the earliest and {bounds[1]} at the latest"
            )
        launch = min(max(bucket.launch, bounds[0]), bounds[1])
        wait = wait if wait < end else min(max(bucket.wait, launch), end)
        placed.append(dataclasses.replace(bucket, launch=launch, wait=wait))
    return tuple(_waited_for(bucket, placed) for bucket in placed)


def _waited_for(bucket: Bucket, placed: Sequence[Bucket]) -> Bucket:
    """What is averaged over replicas is waited for where that is launched."""
    then = [
        b
        for b in placed
        if b.kind == TransferKind.ALL_REDUCE_SHARDS and b.buffers == bucket.buffers
    ]
    if not then or bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        return bucket
    return dataclasses.replace(bucket, wait=then[0].launch)


def kept_inputs(plan: Plan, forward: Problem) -> set[int]:
    """Graph inputs of the parameters that ``plan`` keeps for backward, in a graph whose symbolic
    sizes may have moved them.

    Args:
        forward: the problem of that graph; ``Transfer.param`` is a graph input.
    """
    inputs = [param.input for param in plan.params]
    theirs = sorted(inputs[t.param] for t in plan.problem.transfers if t.param is not None)
    ours = sorted(t.param for t in forward.transfers if t.param is not None)
    moved = dict(zip(theirs, ours, strict=True))
    return {moved[inputs[i]] for i in plan.kept}


def _structure(plans: Sequence[Plan]) -> str:
    """What has to be equal for graphs to follow one plan: what they need, and what they reduce.

    Not whether a parameter stays gathered, nor between which steps something is there: that may
    depend on the sizes of a rank's batch.
    """
    lines: list[str] = []
    kept: list[str] = []
    for plan in plans:
        # Symbolic sizes are inputs, too: not every rank's graph has a parameter at the same place.
        params = [f"{dataclasses.replace(param, input=0)}" for param in plan.params]
        needed = {
            t: f"{'' if t.param is None else params[t.param]} {dataclasses.replace(_anywhere(t), param=0)}"
            for t in without_host_copies(plan.problem).transfers
        }
        title = plan.graph if plan.graph == GraphKind.BACKWARD else plan.title()
        lines += [title, *sorted([*needed.values(), *kept])]
        kept = [line for t, line in needed.items() if t.param in plan.kept]
    return "\n".join(lines)


def _anywhere(transfer: Transfer) -> Transfer:
    return dataclasses.replace(transfer, ready=0, due=0, last=0, stride=1, replica_stride=1)


def with_call_log(
    compiled: Callable[..., Any], plans: Sequence[Plan], groups: Sequence[str]
) -> Callable[..., Any]:
    """``compiled``, every call of it with the calls of the other ranks of ``groups``: see ``Agreement``."""
    numbers = {name: f"#{i}" for i, name in enumerate(_groups_of(plans))}
    text = "\n".join(_renamed(plan, numbers).collectives_text() for plan in plans)
    for agreement in _agreements(plans, groups):
        for name in numbers:
            agreement.involve(process_group(name))
        compiled = _logged(compiled, agreement, _digest(text), text)
    return compiled


def _logged(
    compiled: Callable[..., Any], agreement: CallLog, plan_id: str, text: str
) -> Callable[..., Any]:
    is_first = True

    def call(*args: Any) -> Any:
        nonlocal is_first
        if is_first:
            agreement.first_run(plan_id, text)
            is_first = False
        else:
            agreement.run(plan_id)
        try:
            return compiled(*args)
        except RuntimeError as error:
            agreement.explain(error)
            raise

    return call


def _agreements(plans: Sequence[Plan], groups: Sequence[str]) -> list[CallLog]:
    """Of ``groups``, if ``plans`` communicate at all."""
    communicate = any(plan.buckets for plan in plans)
    return [call_log_of(process_group(name)) for name in groups] if communicate else []


def _to_json(plans: Sequence[Plan]) -> str:
    return json.dumps([plan.to_json() for plan in plans])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
