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
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ._torch import BackendError, process_group
from .agreement import Agreement, agreement_of
from .plan import BACKWARD, Bucket, Plan, Problem, Transfer


class Decisions:
    """The plans that the graphs of one backend follow."""

    def __init__(self) -> None:
        self._decided: dict[str, list[Plan]] = {}

    def __call__(self, plans: Sequence[Plan], context: str) -> list[Plan]:
        """The plans to follow in place of ``plans``, those of one Dynamo graph on this rank.

        Args:
            context: what plans depend on besides the graph.

        Raises:
            BackendError: ranks ask about graphs that communicate something else.
        """
        text = f"{_structure(plans)}\n{context}"
        if text not in self._decided:
            self._decided[text] = list(plans)
            for agreement in _agreements(plans):
                made = agreement.decide(_digest(text), lambda: _to_json(plans), text)
                self._decided[text] = [Plan.from_json(plan) for plan in json.loads(made)]
        return self._decided[text]


def follow(problem: Problem, plan: Plan) -> tuple[Bucket, ...]:
    """The buckets of ``plan``, for the same transfers, in their order, at steps of ``problem``.

    Raises:
        BackendError: this problem does not allow their order.
    """
    end, buckets = problem.num_steps, plan.buckets
    ours, theirs = (map(_anywhere, of.transfers) for of in (problem, plan.problem))
    if list(ours) != list(theirs):
        raise BackendError(
            f"the {problem.graph} graph gathers or reduces other parameters than the first rank's"
        )
    transfers = [[problem.transfers[i] for i in bucket.transfers] for bucket in buckets]
    due = [min([end, *(t.due for t in of)]) for of in transfers]
    earliest = list(accumulate((max(t.ready for t in of) for of in transfers), max))
    latest = list(accumulate(reversed(due), min))[::-1]
    placed = []
    for bucket, *bounds, wait in zip(buckets, earliest, latest, due):
        if bounds[0] > bounds[1]:
            raise BackendError(
                f"the {problem.graph} graph cannot follow the first rank's plan: {bucket} would be "
                f"launched at step {bounds[0]} at the earliest and {bounds[1]} at the latest"
            )
        launch = min(max(bucket.launch, bounds[0]), bounds[1])
        wait = wait if wait < end else min(max(bucket.wait, launch), end)
        placed.append(dataclasses.replace(bucket, launch=launch, wait=wait))
    return tuple(placed)


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
            for t in plan.problem.transfers
        }
        title = plan.graph if plan.graph == BACKWARD else plan.title()
        lines += [title, *sorted([*needed.values(), *kept])]
        kept = [line for t, line in needed.items() if t.param in plan.kept]
    return "\n".join(lines)


def _anywhere(transfer: Transfer) -> Transfer:
    return dataclasses.replace(transfer, ready=0, due=0, last=0)


def logged(compiled: Callable[..., Any], plans: Sequence[Plan]) -> Callable[..., Any]:
    """``compiled``, every call of it with the other ranks' calls: see ``Agreement``."""
    text = "\n".join(plan.wire() for plan in plans)
    for agreement in _agreements(plans):
        compiled = _logged(compiled, agreement, _digest(text), text)
    return compiled


def _logged(
    compiled: Callable[..., Any], agreement: Agreement, plan_id: str, text: str
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


def _agreements(plans: Sequence[Plan]) -> list[Agreement]:
    """Of the groups in which ``plans`` communicate."""
    groups = dict.fromkeys(bucket.group for plan in plans for bucket in plan.buckets)
    return [agreement_of(process_group(name)) for name in groups]


def _to_json(plans: Sequence[Plan]) -> str:
    return json.dumps([plan.to_json() for plan in plans])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
