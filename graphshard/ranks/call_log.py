"""The call log of a process group: all ranks make the same calls in order, or all raise.

Each rank compiles by itself, and a guard that fails on one rank's data may give that rank a
different graph. Graphs with different collectives hang or mix up data. So each rank numbers its
calls of compiled graphs and logs their plans, and ranks compare calls through the group's store:

    a rank      runs a graph or an eager gather for the first time, takes part in a choice of the
                first rank, or has made no call for seconds (the first rank also now and then)
                ─► posts "call 7 runs plan P"
    the others  compare with their own call 7, past or future ─► agree, or post a fault
    a rank      waits for a peer that is blocked in a collective which this rank only reaches
                later (``blocked_ranks``) ─► posts a fault
    a fault     ends all ranks: a waiting rank raises, and a collective that blocks a rank is
                aborted

A thread on each rank (``watcher``) waits for posts. No verdict depends on time, because ranks may
reach a compile minutes apart. A call that no rank has posted about does not touch the store.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from .._torch.distributed import has_fake_ranks, is_lost_peer
from ..errors import BackendError
from .call_history import CallHistory
from .differences import TOGETHER
from .members import Members
from .store import digest
from .watcher import Inbox, Watcher

READ_S = 10.0
"""Longest wait, in seconds, for the watcher to read what is already in the store."""


class CallLog:
    """One rank's side of a group's call log; :func:`call_log_of` creates it.

    A call is a run of a graph with collectives, a gather or reduction outside of any graph, or a
    choice that the first rank makes for all. Every rank makes the same calls in the same order, one
    at a time. After a fault, every further call raises that fault again.

    Raises:
        BackendError: from every method, if ranks differ; all ranks raise the same text.
    """

    def __init__(self, members: Members, *, is_alone: bool) -> None:
        self._members, self._num_choices, self._grad_enabled = members, 0, True
        self._history, self._inbox = CallHistory(), Inbox()
        self._watcher = None if is_alone else Watcher(members, self._history, self._inbox)

    def release_also(self, group: dist.ProcessGroup) -> None:
        """Also release ranks that are blocked in ``group`` after a fault.

        Args:
            group: process group of some of this log's ranks.
        """
        self._members.release_also(group)

    def run(self, plan_id: str) -> None:
        """Log a run of a graph, just before it starts.

        A graph's first run is logged by :meth:`first_run` instead.
        """
        call = self._history.append(plan_id)
        # The count is written by now; the watcher writes ``early_calls``, then reads the count.
        if self._inbox.early_calls or self._inbox.fault is not None:
            self._answer(call)

    def enters_mode(self, grad_enabled: bool) -> bool:
        """Record the next run's grad mode; return whether all ranks must agree on that run first.

        A rank that evaluates alone starts a run in another mode than its last one. The others would
        notice only when they hang, and by then gloo would have ended a process. So this holds for
        known graphs, too.
        """
        enters, self._grad_enabled = grad_enabled != self._grad_enabled, grad_enabled
        return enters and self._watcher is not None and self._members.mismatch_is_fatal()

    def first_run(self, plan_id: str, text: str) -> None:
        """Log a run that all ranks must agree on first, instead of by :meth:`run`.

        Waits until every rank has reached this call and runs the same plan, for the first time or
        not: that is, until the slowest rank has compiled.

        Args:
            plan_id: hash of ``text``.
            text: the plan; an error shows its first line that differs.

        Raises:
            BackendError: also if a rank does not arrive within the group's timeout, or has left.
        """
        self._history.remember_text(plan_id, text)
        if self._watcher is None:
            return
        self._inbox.awaited_event = None
        call = self._inbox.awaited = self._history.num_calls
        self.run(plan_id)
        self._post_call(self._watcher, call)
        self._wait(self._watcher)

    def announce(self, plan_id: str, text: str) -> None:
        """Log a call outside of any graph; if it is new, wait as :meth:`first_run` does.

        Args:
            plan_id: id that is equal on all ranks that do the same.
            text: description of the call, as in :meth:`first_run`.
        """
        if self._history.knows(plan_id):
            self.run(plan_id)
        else:
            self.first_run(plan_id, text)

    def choose_on_first_rank(
        self,
        key: str,
        choose: Callable[[], str],
        text: str = "",
        *,
        elsewhere: Callable[[], str] | None = None,
    ) -> str:
        """Return, on every rank, what ``choose()`` returns on the group's first rank.

        This is a call: all ranks must make it, with the same ``key``.

        Args:
            key: name of the choice.
            choose: function that makes the choice. On other ranks it returns what they would
                choose: if that is the same, the text, which may be long, is not sent.
            text: what the choice is about; an error shows its first line that differs.
            elsewhere: function for the other ranks to call instead of ``choose`` if that takes
                long.

        Raises:
            BackendError: also if the first rank cannot choose: ``choose`` raised there, the group's
                timeout expired, or that rank has left.
        """
        if self._watcher is None:
            return choose()
        key = f"{key} ({self._num_choices})"
        self._num_choices += 1
        call, plan_id = self._history.num_calls, f"choice {key!r}"
        self._history.remember_text(plan_id, text or plan_id)
        self.run(plan_id)
        self._post_call(self._watcher, call)
        if self._members.rank == 0:
            return self._post_choice(self._watcher, key, choose, call)
        with self._inbox.changed:
            self._inbox.awaited = None if key in self._inbox.choices else key
        self._wait(self._watcher)
        chosen, own = self._inbox.choices.pop(key), (elsewhere or choose)()
        same = digest(own) == chosen.digest
        return own if same else self._watcher.events.choice_text(chosen)

    def can_agree(self) -> bool:
        """Return whether the caller can wait for other ranks.

        False in any thread but the rank's own, if there are no other ranks, after a fault, and once
        the store is lost.
        """
        watcher = self._watcher
        if watcher is None or not watcher.rank_thread.is_current():
            return False
        self._read_all_posted(watcher)
        return self._inbox.fault is None and self._inbox.lost is None

    def raise_posted_fault(self, error: BaseException) -> None:
        """Raise the fault that made a collective raise ``error``, if there is one.

        A peer posts a fault before it closes its connections, but this rank may not have read the
        fault yet. A peer that is gone or does not answer posts nothing; then this rank does.
        """
        watcher = self._watcher
        if watcher is None or not isinstance(error, RuntimeError):
            return
        if isinstance(error, BackendError):
            return
        self._read_all_posted(watcher)
        if self._inbox.fault is None and is_lost_peer(error):
            self._post_lost_peer(watcher, error)
        if self._inbox.fault is not None:
            raise self._error() from error

    def _read_all_posted(self, watcher: Watcher) -> None:
        """Wait until the watcher has read all that is in the store, if the store still exists."""
        with contextlib.suppress(RuntimeError):
            num_posted = watcher.events.num_posted()
            watcher.wait_until(lambda: self._inbox.num_read >= num_posted, READ_S)

    def _post_lost_peer(self, watcher: Watcher, error: RuntimeError) -> NoReturn:
        """Have all ranks raise that a peer is gone; only this rank if the store is gone as well."""
        text = (
            f"a rank has ended, or does not answer: its own output says why. "
            f"{watcher.comparison.position()}: {str(error).splitlines()[0]}"
        )
        with contextlib.suppress(RuntimeError):
            watcher.comparison.post_fault(lambda: text)
            watcher.wait_until(lambda: False, READ_S)
        raise self._error(text) from error

    def _answer(self, call: int) -> None:
        """Raise a fault, or compare this call with what a rank has already posted about it."""
        with self._inbox.changed:
            event = self._inbox.early_calls.pop(call, None)
        if self._inbox.fault is not None:
            raise self._error()
        watcher = self._watcher
        if event is not None and watcher is not None and not watcher.comparison.compare(event):
            self._raise_fault(watcher)

    def _post_call(self, watcher: Watcher, call: int) -> None:
        if self._inbox.lost is not None:
            raise self._error(f"{self._inbox.lost}; {watcher.comparison.position()}")
        watcher.comparison.post_call(call)

    def _post_choice(self, watcher: Watcher, key: str, choose: Callable[[], str], call: int) -> str:
        """Choose for all ranks; an error in ``choose`` becomes a fault on the other ranks."""
        try:
            text = choose()
        except BaseException as error:
            name = watcher.comparison.rank_names(self._members.rank)
            text = f"{name} cannot choose {key!r}: {error!r}"
            watcher.comparison.post_fault(lambda: text)
            raise
        watcher.events.post_choice(key, text, call)
        return text

    def _wait(self, watcher: Watcher) -> None:
        """Wait for what the inbox awaits, at most for the group's timeout."""
        inbox, timeout_s = self._inbox, self._members.timeout_s()
        try:
            watcher.wait_until(lambda: inbox.awaited is None, timeout_s)
            if inbox.awaited is None:
                return
            if inbox.fault is not None or inbox.lost is not None:
                raise self._error(f"{inbox.lost}; {watcher.comparison.position()}")
            watcher.comparison.post_fault(lambda: self._late(watcher, timeout_s))
            self._raise_fault(watcher)
        finally:
            inbox.awaited = None

    def _late(self, watcher: Watcher, timeout_s: float) -> str:
        """Describe which ranks did not arrive in time."""
        names = watcher.comparison.rank_names(*watcher.missing_ranks())
        text = f"{names} did not come within {timeout_s:g} s, the timeout of the group"
        return f"{text}; {watcher.comparison.position()}. {TOGETHER}"

    def _raise_fault(self, watcher: Watcher) -> NoReturn:
        """Raise the fault that was posted first, as every rank does; there must be one."""
        watcher.wait_until(lambda: False, READ_S)
        raise self._error()

    def _error(self, text: str = "ranks differ") -> BackendError:
        """Return the error for the fault that was read, or for ``text`` if there is none."""
        return BackendError(f"process group {self._members.name!r}: {self._inbox.fault or text}")


_call_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, CallLog] = weakref.WeakKeyDictionary()


def call_log_of(group: dist.ProcessGroup) -> CallLog:
    """Return the call log of ``group``; every rank of the group must call this, at any time."""
    if group not in _call_logs:
        is_alone = group.size() == 1 or has_fake_ranks(group)
        _call_logs[group] = CallLog(Members(group), is_alone=is_alone)
    return _call_logs[group]
