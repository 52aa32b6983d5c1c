"""The call log of a process group: all ranks make the same calls in order, or all raise.

Each rank compiles by itself, and a guard that fails on one rank's data may give that rank a
different graph. Graphs with different collectives hang or mix up data. Each rank therefore numbers
its calls to compiled graphs and logs their plans, and ranks compare calls through the group's
store:

    a rank      runs a graph for the first time, or for the first time after a given call, makes an
                eager gather for the first time, changes the grad mode (gloo only), or has made no
                call for a few seconds (the first rank also posts periodically)
                ─► posts "call 7 runs plan P"
    the others  compare with their own call 7, past or future ─► agree, or post an error
    a rank      waits for a peer that is blocked in a collective, which the waiting rank would
                only reach later (``watcher``) ─► posts an error
    an error    stops all ranks: a waiting rank raises, and a collective that blocks a rank is
                aborted

No comparison depends on timing, because ranks may reach a compile minutes apart. A call that no
rank has posted about does not touch the store.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist

from .._torch.distributed import has_fake_ranks, is_lost_peer
from ..errors import BackendError
from .calls import CALL_TOGETHER, CallHistory
from .members import Members
from .watcher import Watcher

_FORKED = (
    "a forked process, such as a worker of a DataLoader, cannot use a sharded model, because it "
    "has no connections to other ranks: call the model in the rank's own process, or give the "
    "worker an unsharded copy"
)

READ_S = 10.0  # longest wait for the watcher to read events that are already in the store


class CallLog:
    """One rank's side of a group's call log; :func:`call_log_of` creates it.

    A call is a run of a graph with collectives, a gather or reduction outside of any graph, or
    anything else that all ranks do together, in the same order and one at a time. If ``is_alone``
    (there are no other ranks, or only fake ones), nothing is compared.

    Attributes:
        is_forked: whether this is the log's copy in a forked process, which has no watcher thread
            and no connections to other ranks.

    Raises:
        BackendError: from every method that logs a call, with the same text on all ranks, once
            ranks differ; or only in a forked process.
    """

    def __init__(self, members: Members, *, is_alone: bool) -> None:
        self._members, self._grad_enabled = members, True
        self._history = CallHistory(members.rank, members.global_ranks)
        self.is_alone, self.is_forked = is_alone, False
        self._watcher = None if is_alone else Watcher(members, self._history)

    def release_also(self, group: dist.ProcessGroup) -> None:
        """Register ``group``: after an error, this rank's collectives in it raise, too."""
        self._members.release_also(group)

    @property
    def last_plan_id(self) -> str:
        return self._history.last_plan_id

    def run(self, plan_id: str) -> None:
        """Log a call just before it starts, without waiting for other ranks.

        For runs of known graphs, and for gathers and reductions outside of graphs.
        """
        if self.is_forked:
            raise BackendError(_FORKED)
        call, watcher = self._history.append(plan_id), self._watcher
        # No race: the count is already written, and the watcher reads it after adding the event.
        if watcher is not None and (watcher.early_calls or watcher.error is not None):
            self._compare_early(watcher, call)

    def enters_mode(self, grad_enabled: bool) -> bool:
        """Record the next run's grad mode; return whether all ranks must agree on it first."""
        # A rank that evaluates alone changes its mode. Even if it runs a known graph, its peers
        # would notice only when they hang, and by then gloo would have ended a process.
        enters, self._grad_enabled = grad_enabled != self._grad_enabled, grad_enabled
        return enters and self._watcher is not None and self._members.mismatch_is_fatal()

    def first_run(self, plan_id: str, text: str) -> None:
        """Log a run like :meth:`run`, and return once all ranks have agreed to it.

        Waits until every rank has reached this call and runs the same plan, whether or not for the
        first time: in effect, until the slowest rank has compiled.

        Args:
            plan_id: hash of ``text``, or another id that is equal on all ranks that make this call.
            text: the plan; an error shows its first line that differs.

        Raises:
            BackendError: also if a rank does not arrive within the group's timeout, or has left.
        """
        watcher, call = self._watcher, self._history.num_calls
        self._history.plan_texts[plan_id] = text
        if watcher is None:
            return
        self.run(plan_id)
        if watcher.lost is not None:
            raise self._error(watcher, f"{watcher.lost}; {self._history.position()}")
        watcher.post_call(call)
        self._wait(watcher, call)

    def announce(self, plan_id: str, text: str) -> None:
        """Log a call outside of any graph; if it is new, wait as :meth:`first_run` does."""
        if plan_id in self._history.plan_texts:
            self.run(plan_id)
        else:
            self.first_run(plan_id, text)

    def post_error(self, text: str) -> None:
        if self._watcher is not None:
            self._watcher.events.post_error(lambda: text)

    def can_agree(self) -> bool:
        """Return whether there are other ranks, and the caller can wait for them.

        False outside of the rank's own thread, in a forked process, after an error, and once the
        store is lost.
        """
        watcher = self._watcher
        if watcher is None or self.is_forked or not watcher.is_rank_thread():
            return False
        self._read_all_posted(watcher)
        return watcher.error is None and watcher.lost is None

    @contextlib.contextmanager
    def raising_posted_error(self) -> Iterator[None]:
        """Raise the posted error, if any, instead of a RuntimeError that it caused in the body."""
        try:
            yield
        except RuntimeError as error:
            self.raise_posted_error(error)
            raise

    def raise_posted_error(self, error: BaseException) -> None:
        """Raise the posted error, if any, that made a collective raise ``error``.

        If a peer was lost without posting an error, this rank posts one and raises it.
        """
        watcher = self._watcher
        if watcher is None or not isinstance(error, RuntimeError):
            return
        if isinstance(error, BackendError):  # also a RuntimeError, but already explains the cause
            return
        # A peer posts its error before it closes its connections, but this rank may not have read
        # it yet. If a peer has exited or does not respond, this rank posts an error instead.
        self._read_all_posted(watcher)
        if watcher.error is None and is_lost_peer(error):
            self._post_lost_peer(watcher, error)
        if watcher.error is not None:
            raise self._error(watcher) from error

    def _compare_early(self, watcher: Watcher, call: int) -> None:
        with watcher.changed:
            event = watcher.early_calls.pop(call, None)
        if watcher.error is not None:
            raise self._error(watcher)
        if event is not None and not watcher.compare(event):
            self._raise_posted_error(watcher)

    def _wait(self, watcher: Watcher, call: int) -> None:
        timeout_s = self._members.timeout_s()
        watcher.awaited = call
        try:
            watcher.wait_until(lambda: watcher.agreed >= call, timeout_s)
            if watcher.agreed >= call:
                return
            if watcher.error is not None or watcher.lost is not None:
                raise self._error(watcher, f"{watcher.lost}; {self._history.position()}")
            watcher.events.post_error(lambda: self._describe_timeout(watcher, call, timeout_s))
            self._raise_posted_error(watcher)
        finally:
            watcher.awaited = None

    def _describe_timeout(self, watcher: Watcher, call: int, timeout_s: float) -> str:
        names = self._history.rank_names(*watcher.missing_ranks(call))
        text = f"{names} did not arrive within {timeout_s:g} s, the timeout of the group"
        return (
            f"{text}; {self._history.position()}. {CALL_TOGETHER} If a rank only needs more time, "
            "to compile for example, pass a larger timeout to init_process_group"
        )

    def _read_all_posted(self, watcher: Watcher) -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost
            num_posted = watcher.events.num_posted()
            watcher.wait_until(lambda: watcher.num_read >= num_posted, READ_S)

    def _post_lost_peer(self, watcher: Watcher, error: RuntimeError) -> NoReturn:
        text = (
            "a rank has exited, does not respond, or is in another collective: look for the cause "
            "in its output. "
            f"{self._history.position()}: {str(error).splitlines()[0]}"
        )
        with contextlib.suppress(RuntimeError):  # with the store gone, only this rank raises
            watcher.events.post_error(lambda: text)
            watcher.wait_until(lambda: False, READ_S)
        raise self._error(watcher, text) from error

    def _raise_posted_error(self, watcher: Watcher) -> NoReturn:
        """Raise the error that was posted first, as every rank does."""
        watcher.wait_until(lambda: False, READ_S)
        raise self._error(watcher)

    def _error(self, watcher: Watcher, text: str = "ranks differ") -> BackendError:
        return BackendError(f"process group {self._members.name!r}: {watcher.error or text}")


_call_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, CallLog] = weakref.WeakKeyDictionary()


def call_log_of(group: dist.ProcessGroup) -> CallLog:
    """Return the call log of ``group``; all its ranks must call this, not necessarily together."""
    if group not in _call_logs:
        is_alone = group.size() == 1 or has_fake_ranks(group)
        _call_logs[group] = CallLog(Members(group), is_alone=is_alone)
    return _call_logs[group]


def _mark_forked() -> None:
    for call_log in list(_call_logs.values()):
        call_log.is_forked = not call_log.is_alone


# Not a comparison of process IDs, which every call would pay for.
os.register_at_fork(after_in_child=_mark_forked)
