"""Log collectives outside of any graph, so that ranks that diverge raise instead of hanging.

A rank may leave a graph that its peers still run: past Dynamo's recompile limit, a function runs in
Python. So within a call of compiled code, a gather that is new to this rank first waits until all
ranks have reached it. Gathers in plain calls of a model are only logged, and so are reductions,
whose order follows from that of the gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .._torch.distributed import process_group
from .._torch.dynamo import at_recompile_limit
from .._torch.frames import CompiledCall, compiled_call, describe_code
from ..ranks.call_log import CallLog, call_log_of
from ..ranks.differences import BY_ALL_RANKS, LIMIT
from .mesh_groups import MeshGroups


@contextmanager
def eager_gather(groups: MeshGroups, fqns: Sequence[str]) -> Iterator[None]:
    """Log the gather of one module's parameters that runs in this context.

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
    with _raising_posted_fault(call_log):
        yield


@contextmanager
def eager_reduction(groups: MeshGroups, fqns: Sequence[str]) -> Iterator[None]:
    """Log the reduction of gradients that runs in this context.

    Raises:
        BackendError: other ranks do something else.
    """
    call_log = _call_log(groups)
    call_log.run(f"a reduction of gradients of {fqns[0]!r} outside of a graph")
    with _raising_posted_fault(call_log):
        yield


@contextmanager
def agreed_exchange(
    groups: MeshGroups, plan_id: str, text: str, *, is_new: bool = False
) -> Iterator[None]:
    """Log the exchange that runs in this context; if it is new, wait until all ranks agree.

    Args:
        plan_id: hash of ``text``.
        text: description of the exchange; its first line names the purpose.
        is_new: whether to wait even if this rank knows ``text``. If every rank passes True unless
            it repeats its last exchange of this kind, different exchanges never run together.

    Raises:
        BackendError: other ranks do something else.
    """
    call_log = _call_log(groups)
    if is_new:
        call_log.first_run(plan_id, text)
    else:
        call_log.announce(plan_id, text)
    with _raising_posted_fault(call_log):
        yield


def agree_on_gathering(groups: MeshGroups, what: str, name: str, remedy: str) -> None:
    """Wait until all ranks have reached a call that gathers or saves a model.

    Args:
        what: name of the function that all ranks have to call.
        name: name of what is gathered or saved, such as the model's class.
        remedy: code to write instead of a call on one rank, for the error.

    Raises:
        BackendError: a rank does something else, has exited, or does not call it in time.
    """
    plan_id = f"{what} of {name}, {BY_ALL_RANKS}: {remedy}"
    with agreed_exchange(groups, plan_id, plan_id, is_new=True):
        pass


def _call_log(groups: MeshGroups) -> CallLog:
    """Return the mesh's call log, which on a fault releases ranks blocked in any of its groups."""
    call_log = call_log_of(process_group(groups.all_ranks))
    for name in filter(None, (groups.shards, groups.replicas)):
        call_log.release_also(process_group(name))
    return call_log


@contextmanager
def _raising_posted_fault(call_log: CallLog) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        call_log.raise_posted_fault(error)
        raise


def _reason(call: CompiledCall) -> str:
    """Return why the function that reads a parameter is not compiled, or "" if unknown."""
    limited = [describe_code(code) for code in call.codes if at_recompile_limit(code)]
    return f": {LIMIT} for {limited[0]}" if limited else ""
