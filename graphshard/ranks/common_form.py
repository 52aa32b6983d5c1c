"""Plans in a form that all ranks share, and the texts by which ranks compare them.

Ranks need not trace a model identically: a batch of one sample, for example, may swap two tensors,
and ranks may meet parameters in different orders. So nothing that ranks share depends on the order
of a trace: a parameter is identified by its name, a process group by a number, and a transfer by
its contents. Each rank replaces names and numbers by its own graph inputs and groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..kinds import GraphKind, TransferKind
from ..planning.offload import without_host_copies
from ..planning.plan import Plan, PlanParam, Transfer
from .differences import INFERENCE, TRAINING

_NOT_COMMON = {"param", "kind", "ready", "due", "last", "stride", "replica_stride", "grad_bytes"}
"""Fields that the text of a transfer leaves out: the text starts with them anyway, or they may
differ between ranks. The gradient of a batch of one sample, for example, may be an expanded tensor.
"""


def group_numbers(plans: Sequence[Plan]) -> dict[str, str]:
    """Return "#0", "#1", ... for the names of the groups in which ``plans`` communicate.

    Group names differ between ranks. All ranks give the same number to their groups along the same
    axis of the mesh.
    """
    described = [
        (plan.fqn_of(t), t.kind, t.dtype, t.num_bytes, t.group, t.replicas)
        for plan in plans
        for t in plan.problem.transfers
    ]
    # Leave out the names of groups, which differ between ranks.
    described.sort(key=lambda facts: facts[:-2])
    names = [name for *_, group, replicas in described for name in (group, replicas)]
    return {name: f"#{i}" for i, name in enumerate(filter(None, dict.fromkeys(names)))}


def with_group_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return ``plan`` with every group name replaced by its entry in ``names``."""
    transfers = tuple(
        dataclasses.replace(t, group=names.get(t.group, ""), replicas=names.get(t.replicas, ""))
        for t in plan.problem.transfers
    )
    buckets = tuple(dataclasses.replace(b, group=names.get(b.group, "")) for b in plan.buckets)
    problem = dataclasses.replace(plan.problem, transfers=transfers)
    return dataclasses.replace(plan, problem=problem, buckets=buckets)


def with_inputs_of(plans: Sequence[Plan], own_plans: Sequence[Plan]) -> list[Plan]:
    """Return another rank's plans with this rank's graph inputs.

    Graphs share plans even if they differ in parameters that never travel. These parameters get the
    input -1.

    Args:
        plans: the other rank's plans for all graphs of one Dynamo graph.
        own_plans: this rank's plans for the same graphs.
    """
    own, theirs = (
        _inputs_by_fqn([param for plan in some for param in _travelling(plan)])
        for some in (own_plans, plans)
    )
    inputs = {i: own[fqn][k] for fqn, of_fqn in theirs.items() for k, i in enumerate(of_fqn)}
    return [
        dataclasses.replace(
            plan,
            params=tuple(
                dataclasses.replace(param, input=inputs.get(param.input, -1))
                for param in plan.params
            ),
        )
        for plan in plans
    ]


def _travelling(plan: Plan) -> list[PlanParam]:
    """Return the parameters that the plan's graph gathers, reduces or keeps unsharded."""
    travelling = {transfer.param for transfer in plan.problem.transfers} | set(plan.kept)
    return [param for i, param in enumerate(plan.params) if i in travelling]


def _inputs_by_fqn(params: Sequence[PlanParam]) -> dict[str, list[int]]:
    """Return the inputs by parameter name; two models may each have a parameter of that name."""
    inputs: dict[str, list[int]] = {}
    for param in sorted(params, key=lambda param: param.input):
        of_fqn = inputs.setdefault(param.fqn, [])
        if param.input not in of_fqn:
            of_fqn.append(param.input)
    return inputs


def communication_text(plans: Sequence[Plan]) -> str:
    """Describe what graphs must have in common to follow one plan: what they gather and reduce.

    Excludes which parameters stay unsharded, the order of transfers, and the steps at which they
    are ready or due: all of these may depend on a rank's batch size.
    """
    kinds = {plan.graph for plan in plans}
    lines = [INFERENCE if kinds == {GraphKind.INFERENCE} else TRAINING]
    kept: list[str] = []
    for plan in plans:
        transfers = without_host_copies(plan.problem).transfers
        described = {transfer: _transfer_text(plan, transfer) for transfer in transfers}
        lines += [f"{plan.graph} graph", *sorted([*described.values(), *kept])]
        kept = [line for transfer, line in described.items() if transfer.param in plan.kept]
    return "\n".join(lines)


def collectives_text(plans: Sequence[Plan]) -> str:
    """Describe the collectives that graphs run, in order."""
    return "\n".join(plan.collectives_text() for plan in plans)


def without_steps(transfer: Transfer) -> Transfer:
    """Return ``transfer`` with constants for the fields that may differ between ranks.

    These are steps, strides and the bytes of gradients.
    """
    return dataclasses.replace(
        transfer, ready=0, due=0, last=0, stride=1, replica_stride=1, grad_bytes=0
    )


def _transfer_text(plan: Plan, transfer: Transfer) -> str:
    """Describe all that ranks must have in common about a transfer, its parameter first."""
    names = (field.name for field in dataclasses.fields(transfer))
    facts = {name: getattr(transfer, name) for name in names if name not in _NOT_COMMON}
    param = None if transfer.param is None else plan.params[transfer.param]
    if param is not None:
        facts |= {"shape": param.shape, "stored": param.dtype, "padded_rows": param.padded_rows}
    elif transfer.kind == TransferKind.ALL_REDUCE_MAX:
        facts["of"] = " ".join(_float8_names(plan))
    name = "scales" if param is None else param.fqn
    return f"{transfer.kind} of {name}: " + ", ".join(f"{k} {v}" for k, v in facts.items())


def _float8_names(plan: Plan) -> list[str]:
    """Return the names of the parameters that are gathered in fp8, in the order of their scales.

    That order comes from a rank's trace, and must be the same on all ranks.
    """
    gathered = {
        transfer.param
        for transfer in plan.problem.transfers
        if transfer.kind == TransferKind.ALL_GATHER and "float8" in transfer.dtype
    }
    params = [plan.params[i] for i in gathered if i is not None]
    return [param.fqn for param in sorted(params, key=lambda param: param.input)]


def kept_inputs(plan: Plan) -> set[int]:
    """Return the graph inputs of the parameters that ``plan`` keeps unsharded for backward."""
    assert plan.graph == GraphKind.FORWARD
    return {plan.params[i].input for i in plan.kept}
