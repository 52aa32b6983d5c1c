"""Make all ranks follow one plan for the graphs that each rank compiles by itself.

A plan follows from predicted times, which depend on a rank's batch size. Therefore the first rank
of the group chooses the transfers of each bucket and the order in which buckets are launched; a
rank whose own plan differs compiles again. Each rank chooses by itself at which steps it launches a
bucket and waits for it (``planning.follow_plan``).

    every rank   compile ─► the first rank's plans for these transfers ─► differ? compile again
    every call   the call log of the group ─► run the graph

Transfers that the first rank has planned before keep their buckets: a rank may compile again, for
another batch size, while its peers do not.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .._torch.autograd import on_graph_error
from .._torch.distributed import process_group
from ..kinds import GraphKind, TransferKind
from ..planning.offload import without_host_copies
from ..planning.plan import RANK_DEPENDENT, Plan, PlanParam, Transfer
from .agree import broadcast_from_rank, digest, max_over_ranks
from .call_log import CallLog, call_log_of
from .calls import BACKWARD, CHOICE_AGAIN, INFERENCE, TRAINING

R = TypeVar("R")

# Fields omitted from the text of a transfer, which starts with its kind and parameter anyway.
_OMITTED = {"param", "kind", *RANK_DEPENDENT}

# A text that ranks must share to follow a plan, and their groups; not the names of groups, because
# a process may destroy all groups and create others with the same names, for other ranks.
_Key = tuple[str, tuple[weakref.ref[dist.ProcessGroup], ...]]


class CommonChoice(NamedTuple):
    """A choice that the first rank has made for all ranks.

    Attributes:
        is_latest: function that returns whether no later choice has replaced this one.
    """

    text: str
    is_latest: Callable[[], bool]


def _latest(known: Sequence[str], chosen: str) -> CommonChoice:
    count = len(known)
    return CommonChoice(chosen, lambda: len(known) == count)


class PlanConsensus:
    """Cache of the first rank's plans and choices for the graphs of one backend."""

    def __init__(self) -> None:
        self._plans: dict[_Key, list[Plan]] = {}
        self._choices: dict[_Key, list[str]] = {}

    def common_choice(
        self,
        about: str,
        choose: Callable[[int], str],
        groups: Sequence[str],
        *,
        serves: Callable[[str], bool],
        excess: Callable[[str], int],
        failed: Callable[[str], bool],
    ) -> CommonChoice:
        """Return a choice that the first rank makes for all ranks before they plan.

        If this rank can use the last choice, it is returned without communication, because a rank
        may compile again while its peers do not. Otherwise all ranks must call this: the first rank
        makes a choice for all, and chooses again until no rank reports an excess. Results of
        earlier choices must not be used any more: another rank may use those of the new one.

        Args:
            about: subject of the choice; equal on all ranks.
            choose: function that makes a choice, given the largest excess that any rank reported
                for the last one (0 at first). "" is no choice: it ends the search and is not kept.
            groups: names of the process groups of all ranks that must agree.
            serves: function that returns whether this rank can use the last choice.
            excess: function that returns 0 if a new choice fits this rank, else a measure of how
                far it exceeds the limit.
            failed: function that returns whether a choice is an error, which is not kept.
        """
        known = self._choices.setdefault(_key(about, groups), [])
        if known and serves(known[-1]):
            return _latest(known, known[-1])
        text = f"{CHOICE_AGAIN} (no. {len(known) + 1}): {about}" if known else about
        largest = 0
        while True:  # until no rank has an excess
            chosen = choose_on_first_rank(
                partial(choose, largest), about.splitlines()[0], text, groups
            )
            largest = _max_over_groups(excess(chosen) if chosen else 0, groups)
            if not largest:
                break
        if chosen and not failed(chosen):
            known.append(chosen)
        return _latest(known, chosen)

    def common_plans(
        self, plans: Sequence[Plan], context: str, groups: Sequence[str]
    ) -> list[Plan]:
        """Return the first rank's plans for these graphs, to follow instead of ``plans``.

        Plans that this rank already has for the same communication and ``context`` are returned
        without communication. Otherwise all ranks must call this, if the plans have buckets.

        Args:
            context: text of everything other than the graph that plans depend on.
            groups: names of the process groups of all ranks that have this graph.

        Raises:
            BackendError: the graphs of other ranks communicate different data; otherwise as
                :func:`choose_on_first_rank`.
        """
        numbers = _group_numbers(plans)
        common = [_with_group_names(plan, numbers) for plan in plans]
        text = f"{_communication_text(common)}\n{context}"
        key = _key(text, groups)
        if key not in self._plans:
            if _communicate(common):
                own = json.dumps([plan.to_json() for plan in common])
                chosen = choose_on_first_rank(lambda: own, "plans", text, groups)
                common = [Plan.from_json(plan_json) for plan_json in json.loads(chosen)]
            self._plans[key] = common
        names = {number: name for name, number in numbers.items()}
        return _with_inputs_of([_with_group_names(p, names) for p in self._plans[key]], plans)


def _key(text: str, groups: Sequence[str]) -> _Key:
    return text, tuple(weakref.ref(process_group(name)) for name in groups)


def choose_on_first_rank(
    choose: Callable[[], str], what: str, text: str, groups: Sequence[str]
) -> str:
    """Return, on every rank of ``groups``, the result of ``choose()`` on the first rank.

    Each group's call log records a call: all ranks must make it, with the same ``text``. A rank
    without peers in any group makes its own choice.

    Args:
        what: name of the choice, used in errors.
        text: subject of the choice; an error shows its first line that differs.
        groups: names of the process groups of all participating ranks.

    Raises:
        BackendError: ranks differ; a rank has left, or does not arrive within the group's timeout;
            or ``choose`` raised on the first rank, which raises the original error.
    """
    for name in groups:
        group = process_group(name)
        call_log, chosen = call_log_of(group), ""
        if call_log.is_alone:
            continue
        if group.rank() == 0:
            try:
                chosen = choose()
            except BaseException as error:
                call_log.post_error(f"rank {dist.get_rank()} cannot choose {what}: {error!r}")
                raise
        call_log.first_run(f"choice {digest(text)}", text)
        with call_log.raising_posted_error():
            chosen = broadcast_from_rank(chosen, 0, name)
        choose = partial(str, chosen)  # the first rank of the next group passes it on
    return choose()


def _max_over_groups(number: int, groups: Sequence[str]) -> int:
    for name in groups:
        with call_log_of(process_group(name)).raising_posted_error():
            [number] = max_over_ranks([number], name)
    return number


def log_every_call(
    compiled: Callable[..., R], plans: Sequence[Plan], groups: Sequence[str]
) -> Callable[..., R]:
    """Wrap a compiled graph to log its runs in the call logs of ``groups``.

    Forward runs are logged if the graph or its backward graph communicates; backward runs, only if
    the backward graph does.
    """
    numbers = _group_numbers(plans)
    common = [_with_group_names(plan, numbers) for plan in plans]
    text = f"{_communication_text(common)}\n{collectives_text(common)}"
    logs_backward = _communicate([plan for plan in plans if plan.graph == GraphKind.BACKWARD])
    for group in groups if _communicate(plans) else ():
        compiled = _logged(compiled, group, list(numbers), text, logs_backward)
    return compiled


def _logged(
    compiled: Callable[..., R],
    group: str,
    released: Sequence[str],
    text: str,
    logs_backward: bool,
) -> Callable[..., R]:
    call_log: CallLog | None = None
    plan_id, backward_text = digest(text), f"{BACKWARD} {text}"
    backward_id = digest(backward_text)
    known: set[tuple[str, str]] = set()  # calls, and the calls that they have followed

    def raise_posted_error(error: BaseException) -> None:
        assert call_log is not None  # set by ``call``
        call_log.raise_posted_error(error)

    def log(plan_id: str, text: str, changes_mode: bool) -> None:
        assert call_log is not None
        # If a rank skips backward, for example, an order of calls is new to it. Its peers would
        # notice only when they hang, or never if only gradients of replicated parameters mix.
        order = call_log.last_plan_id, plan_id
        if changes_mode or order not in known:
            known.add(order)
            call_log.first_run(plan_id, text)
        else:
            call_log.run(plan_id)

    def log_backward(_: object) -> None:
        log(backward_id, backward_text, False)

    run = on_graph_error(compiled, raise_posted_error, log_backward if logs_backward else None)

    def call(*args: object) -> R:
        nonlocal call_log
        current = call_log_of(process_group(group))
        if current is not call_log:  # the first call, or the first one in a new group of this name
            call_log = current
            known.clear()
            for name in released:
                call_log.release_also(process_group(name))
        log(plan_id, text, call_log.enters_mode(torch.is_grad_enabled()))
        return run(*args)

    return call


def _communicate(plans: Sequence[Plan]) -> bool:
    return any(plan.buckets for plan in plans)


# --- plans in a form that all ranks share ------------------------------------------------------

# Ranks need not trace a model identically: a batch of one sample, for example, may change the order
# of tensors, and ranks may trace parameters in different orders. The shared form therefore does not
# depend on the order of a trace: a parameter is identified by its name, a process group by a
# number, and a transfer by its contents. Each rank maps these to its own graph inputs and groups.


def _group_numbers(plans: Sequence[Plan]) -> dict[str, str]:
    """Map the names of the groups in which ``plans`` communicate to "#0", "#1", ...

    All ranks give the same number to their groups along the same axis of the mesh. Groups that only
    the user's collectives use share a number if they have the same ranks.
    """
    described = [
        (plan.fqn_of(t), t.kind, t.dtype, t.num_bytes, t.group, t.replicas)
        for plan in plans
        for t in plan.problem.transfers
    ]
    # Sort without the names of groups, which differ between ranks.
    described.sort(key=lambda facts: facts[:-2])
    names = [name for *_, group, replicas in described for name in (group, replicas)]
    numbers = {name: f"#{i}" for i, name in enumerate(filter(None, dict.fromkeys(names)))}
    # Equal meshes share DTensor's cache of shardings: an op on given shapes uses the groups of the
    # mesh on which it ran first. That mesh may differ between ranks.
    num_ours, by_ranks = len(numbers), dict[tuple[int, ...], str]()
    for name in (user.group for plan in plans for user in plan.problem.user_collectives):
        if name and name not in numbers:
            ranks = tuple(dist.get_process_group_ranks(process_group(name)))
            numbers[name] = by_ranks.setdefault(ranks, f"#{num_ours + len(by_ranks)}")
    return numbers


def _with_group_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    transfers = tuple(
        dataclasses.replace(t, group=names.get(t.group, ""), replicas=names.get(t.replicas, ""))
        for t in plan.problem.transfers
    )
    buckets = tuple(dataclasses.replace(b, group=names.get(b.group, "")) for b in plan.buckets)
    users = tuple(
        dataclasses.replace(user, group=names.get(user.group, ""))
        for user in plan.problem.user_collectives
    )
    problem = dataclasses.replace(plan.problem, transfers=transfers, user_collectives=users)
    return dataclasses.replace(plan, problem=problem, buckets=buckets)


def _with_inputs_of(plans: Sequence[Plan], own_plans: Sequence[Plan]) -> list[Plan]:
    """Return the first rank's ``plans`` with the numbers of graph inputs from ``own_plans``.

    A parameter that no plan transfers gets the number -1. The groups of the user's collectives also
    come from ``own_plans``.
    """
    # Graphs that differ only in parameters that are not sent share plans.
    own, theirs = (
        _inputs_by_fqn([param for plan in some for param in _travelling(plan)])
        for some in (own_plans, plans)
    )
    inputs = {i: own[fqn][k] for fqn, of_fqn in theirs.items() for k, i in enumerate(of_fqn)}
    followed = []
    for plan, own_plan in zip(plans, own_plans, strict=True):
        params = tuple(
            dataclasses.replace(param, input=inputs.get(param.input, -1)) for param in plan.params
        )
        problem, own_users = plan.problem, own_plan.problem.user_collectives
        pairs = zip(problem.user_collectives, own_users, strict=True)
        users = tuple(dataclasses.replace(user, group=mine.group) for user, mine in pairs)
        problem = dataclasses.replace(problem, user_collectives=users)
        followed.append(dataclasses.replace(plan, params=params, problem=problem))
    return followed


def _travelling(plan: Plan) -> list[PlanParam]:
    travelling = {transfer.param for transfer in plan.problem.transfers} | set(plan.kept)
    return [param for i, param in enumerate(plan.params) if i in travelling]


def _inputs_by_fqn(params: Sequence[PlanParam]) -> dict[str, list[int]]:
    """Return the positions of graph inputs, keyed by FQN; several if models share the name."""
    inputs: dict[str, list[int]] = {}
    for param in sorted(params, key=lambda param: param.input):
        of_fqn = inputs.setdefault(param.fqn, [])
        if param.input not in of_fqn:
            of_fqn.append(param.input)
    return inputs


def _communication_text(plans: Sequence[Plan]) -> str:
    """Describe the communication that graphs must have in common to follow one plan."""
    # Excludes the parameters that stay unsharded, the order of transfers, and the steps at which
    # they are ready or due: all of these may depend on a rank's batch size.
    kinds = {plan.graph for plan in plans}
    lines = [INFERENCE if kinds == {GraphKind.INFERENCE} else TRAINING]
    kept: list[str] = []
    for plan in plans:
        transfers = without_host_copies(plan.problem).transfers
        described = [(transfer, _transfer_text(plan, transfer)) for transfer in transfers]
        lines += [f"{plan.graph} graph", *sorted([*(line for _, line in described), *kept])]
        # In order: all launches, ours and the user's, have one order on all ranks.
        if users := plan.problem.user_collectives:
            names = ", ".join(map(str, users))
            lines.append(f"user collectives of the {plan.graph} graph: {names}")
        kept = [line for transfer, line in described if transfer.param in plan.kept]
    return "\n".join(lines)


def collectives_text(plans: Sequence[Plan]) -> str:
    """Describe the collectives that graphs run, in order."""
    return "\n".join(plan.collectives_text() for plan in plans)


def _transfer_text(plan: Plan, transfer: Transfer) -> str:
    """Describe a transfer: its kind, its parameter, and the properties that ranks must share."""
    names = (field.name for field in dataclasses.fields(transfer))
    facts = {name: getattr(transfer, name) for name in names if name not in _OMITTED}
    param = None if transfer.param is None else plan.params[transfer.param]
    if param is not None:
        facts |= {"shape": param.shape, "stored": param.dtype, "padded_rows": param.padded_rows}
    elif transfer.kind == TransferKind.ALL_REDUCE_MAX:
        facts["of"] = " ".join(_float8_names(plan))
    name = "scales" if param is None else param.fqn
    return f"{transfer.kind} of {name}: " + ", ".join(f"{k} {v}" for k, v in facts.items())


def _float8_names(plan: Plan) -> list[str]:
    """Return the names of the parameters that are gathered in fp8, in the order of their scales."""
    # That order comes from a rank's trace, and must be the same on all ranks.
    gathered = {
        transfer.param
        for transfer in plan.problem.transfers
        if transfer.kind == TransferKind.ALL_GATHER and "float8" in transfer.dtype
    }
    params = [plan.params[i] for i in gathered if i is not None]
    return [param.fqn for param in sorted(params, key=lambda param: param.input)]
