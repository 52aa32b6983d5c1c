"""Gathers, reductions and exchanges outside of any graph, as calls that all ranks log.

A rank may leave a graph that its peers run: where Dynamo has compiled a function too often, say,
it runs that in Python from then on. So a gather that is new inside of compiled code waits until all
ranks have come to it, before anything is sent. Plain calls of a model, and reductions, whose order
follows from that of the gathers, are only logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .._torch.distributed import process_group
from .._torch.dynamo import at_recompile_limit
from .._torch.frames import CompiledCall, compiled_call, describe_code
from ..consensus.call_log import CallLog, call_log_of
from ..consensus.difference import BY_ALL_RANKS, LIMIT
from .mesh_groups import MeshGroups


@contextmanager
def eager_gather(groups: MeshGroups, fqns: Sequence[str]) -> Iterator[None]:
    """Log a gather of parameters of one module, that is made in this context.

    Raises:
        BackendError: other ranks do something else.
    """
    call_log, call = _call_log(groups), compiled_call()
    what = f"a gather of {fqns[0]!r} outside of a graph"
    if call.backend is None:
        call_log.run(what)
    else:
        plan_id = f"{what}, in compiled code"
        call_log.announce(plan_id, "\n".join([plan_id + _reason(call), *fqns]))
    with _explained(call_log):
        yield


@contextmanager
def eager_reduction(groups: MeshGroups, fqns: Sequence[str]) -> Iterator[None]:
    """Log a reduction of gradients that is made in this context.

    Raises:
        BackendError: other ranks do something else.
    """
    call_log = _call_log(groups)
    call_log.run(f"a reduction of gradients of {fqns[0]!r} outside of a graph")
    with _explained(call_log):
        yield


@contextmanager
def agreed_exchange(
    groups: MeshGroups, plan_id: str, text: str, *, is_new: bool = False
) -> Iterator[None]:
    """Log an exchange that is made in this context; where it is new here, wait until all agree.

    Args:
        plan_id: a hash of ``text``.
        text: what is exchanged; its first line says what for.
        is_new: wait, also if this rank knows ``text``. Where each rank does so unless it repeats
            its last exchange of this kind, nobody meets another one than its own.

    Raises:
        BackendError: other ranks do something else.
    """
    call_log = _call_log(groups)
    if is_new:
        call_log.first_run(plan_id, text)
    else:
        call_log.announce(plan_id, text)
    with _explained(call_log):
        yield


def agree_on_gathering(groups: MeshGroups, what: str, name: str, remedy: str) -> None:
    """Wait until all ranks have come to gather, or to save, all there is.

    Args:
        what: the function that all ranks have to call.
        name: what is gathered or saved, such as the model's class.
        remedy: what to write instead of a call on one rank.

    Raises:
        BackendError: a rank does something else, has left, or never comes.
    """
    plan_id = f"{what} of {name}, {BY_ALL_RANKS}: {remedy}"
    with agreed_exchange(groups, plan_id, plan_id, is_new=True):
        pass


def _call_log(groups: MeshGroups) -> CallLog:
    """Return the log of all ranks of the mesh, which releases ranks in any of its groups."""
    call_log = call_log_of(process_group(groups.all_ranks))
    for name in filter(None, (groups.shards, groups.replicas)):
        call_log.involve(process_group(name))
    return call_log


@contextmanager
def _explained(call_log: CallLog) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        call_log.explain(error)
        raise


def _reason(call: CompiledCall) -> str:
    """Return why the function that reads a parameter is not compiled, as far as that is known."""
    limited = [describe_code(code) for code in call.codes if at_recompile_limit(code)]
    return f": {LIMIT} for {limited[0]}" if limited else ""
