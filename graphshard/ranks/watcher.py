"""The threads of each rank, which read its peers' events and detect stalls and deadlocks.

A group's thread compares the peers' calls with this rank's calls, wakes this rank when an awaited
event has arrived and, after an error, releases it from a blocked collective.

A second thread, one for all groups, regularly calls ``Watcher.tick``. It posts this rank's last
call once the rank has stalled, and detects that a rank waits for a call that another rank can never
make:

    rank 0   waits in call 7                       rank 1   waits in dist.barrier(), before call 7
             ─► posts "call 7 runs plan P"                  ─► posts "I am in collective 12"
             has begun 11 collectives of that group; begins no. 12 only after call 7
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from .._torch.distributed import (
    PendingCollective,
    num_started,
    pending_collective,
    process_group,
)
from .calls import CallHistory, LoggedCall
from .members import FINISH_S, LINGER_S, Members
from .store import (
    AgreedEvent,
    BlockedEvent,
    CallEvent,
    ErrorEvent,
    Event,
    EventStore,
    LeaveEvent,
)

TICK_S = 0.25  # interval of checks of this rank's state, which do not touch the store
POLL_S = 0.5  # interval of reads of the store once a rank has left; before that, reads block
AUDIT_S = 30.0  # interval of the first rank's audits, which find differences that hang no rank
# Without a call for this long, a rank posts its last one: it may be blocked in a graph that its
# peers do not run.
STALL_S = 2.0
# After this long in one collective, a rank posts that it is blocked, if its peers are a call ahead.
BLOCKED_S = 2.0


class Watcher:
    """A thread that reads the events of one group; the constructor starts it.

    It blocks in the store, which costs nothing while nobody posts; once a rank has left, it polls.
    It ends with the group, after an error, or when the store is lost. Must be created in the rank's
    thread, which writes ``history``.

    Attributes:
        changed: condition that guards writes to the attributes below, except to ``awaited``.
        early_calls: events about calls that this rank has not made yet, keyed by call.
        agreed: last call that all ranks are known to have agreed to, or -1.
        awaited: call in which the rank's thread waits for all ranks, or None.
        blocked: latest event of each rank about the collective it is blocked in, keyed by rank.
        num_read: number of events read so far.
        error: first error posted by any rank, or None.
        lost: reason why no more events can be read, or None while they can.
    """

    def __init__(self, members: Members, history: CallHistory) -> None:
        self._members, self._history = members, history
        self._rank, self._num_ranks = members.rank, len(members.global_ranks)
        prefix = f"graphshard/{members.name}"
        self.events = EventStore(members.connect, prefix, self._rank, self._num_ranks)
        self.changed = threading.Condition()
        self.early_calls: dict[int, CallEvent] = {}
        self.agreed = -1
        self.awaited: int | None = None
        self.blocked: dict[int, BlockedEvent] = {}
        self.num_read = 0
        self.error: str | None = None
        self.lost: str | None = None
        self._num_seen = 0  # calls of this rank at the last tick
        self._stalls_at = self._audit_at = time.monotonic() + AUDIT_S
        self._rank_thread = threading.get_ident()
        self._pending: PendingCollective | None = None  # the rank's at the last tick
        self._blocked_at = math.inf
        self._some_left = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="graphshard", daemon=True)
        self._thread.start()
        with _registering:
            _watchers.add(self)
        _start_ticking()

    # --- called by the rank's thread ---------------------------------------------------------

    def is_rank_thread(self) -> bool:
        return threading.get_ident() == self._rank_thread

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait for ``done()``, an error, or the loss of the store, for at most ``timeout_s``."""
        with self.changed:
            self.changed.wait_for(
                lambda: done() or self.error is not None or self.lost is not None, timeout_s
            )

    def missing_ranks(self, call: int) -> list[int]:
        return [r for r in range(self._num_ranks) if not self.events.has_agreed(call, r)]

    # --- called by all threads ---------------------------------------------------------------

    def post_call(self, call: int) -> None:
        """Post this rank's ``call``, unless it has agreed to the call or any rank has posted it."""
        # Once all ranks have agreed, another post would start another round.
        if self.events.progress < call:
            plan_id, history = self._history.entry(call)
            self.events.post_call(call, plan_id, history, self._history.plan_text(plan_id))

    def compare(self, event: CallEvent) -> bool:
        """Return whether this rank's call matches ``event``; agree if so, else post an error."""
        if self._history.entry(event.call) == LoggedCall(event.plan_id, event.history):
            self.events.agree(event)
            return True
        self.events.post_error(
            lambda: self._history.describe_difference(event, self.events.plan_text(event))
        )
        return False

    # --- called by the thread that ticks all watchers, and at exit ----------------------------

    def tick(self) -> None:
        if not self._thread.is_alive() or self._stopped.is_set():
            return
        with contextlib.suppress(RuntimeError):  # the watcher's thread reports the same error
            if not self._members.exist():
                self.leave()
                return
            self._post_last_call()
            self._post_if_blocked()
            self._post_deadlock()

    def leave(self) -> None:
        self._stopped.set()
        with contextlib.suppress(RuntimeError):
            if self._thread.is_alive() and self.error is None:
                self.events.leave()

    def stop(self) -> None:
        if not self._stopped.is_set():
            self.leave()
        # An abort in progress takes longer: see ``Members.abort``.
        self._thread.join(2.0 if self.error is None else 2.0 + FINISH_S + LINGER_S)

    def _post_last_call(self) -> None:
        """Post the last call if none was made for ``STALL_S``, or if an audit is due."""
        now, num_calls = time.monotonic(), self._history.num_calls
        if num_calls != self._num_seen:
            self._num_seen, self._stalls_at = num_calls, now + STALL_S
        is_audit = self._rank == 0 and now > self._audit_at
        if num_calls and (is_audit or now > self._stalls_at):
            self._audit_at, self._stalls_at = now + AUDIT_S, math.inf
            self.post_call(num_calls - 1)

    def _post_if_blocked(self) -> None:
        """Post that this rank is stuck in a collective while peers are ahead, once per collective.

        A rank is stuck if it is still in the collective ``BLOCKED_S`` after a tick first saw it.
        """
        if not self.early_calls:
            return
        pending, now = pending_collective(self._rank_thread), time.monotonic()
        if pending != self._pending:
            self._pending, self._blocked_at = pending, now + BLOCKED_S
        if pending is not None and now >= self._blocked_at:
            self._blocked_at = math.inf
            # An error must also release this rank if the collective belongs to another group.
            self._members.release_also(process_group(pending.group))
            call = self._history.num_calls
            self.events.post(BlockedEvent(rank=self._rank, call=call, **pending._asdict()))

    def _post_deadlock(self) -> None:
        """Post an error if this rank waits for a call that a blocked rank can never make."""
        # Ranks start the collectives of a group in the same order. The blocked rank is in one that
        # this rank has not started, and this rank waits for a later call of the blocked rank. That
        # is a deadlock regardless of timing.
        for event in list(self.blocked.values()):
            if self.awaited is not None and self.awaited >= event.call:
                number = num_started(event.group)
                if number is not None and number < event.number:
                    self.events.post_error(partial(self._history.describe_deadlock, event))

    # --- the watcher's thread ----------------------------------------------------------------

    def _watch(self) -> None:
        """Read events until this rank leaves or an error occurs; then set ``lost``."""
        lost = (
            "the group was destroyed: after a new init_process_group, build and shard the model "
            "again"
        )
        try:
            self._read_all()
            if self.error is not None:
                self._members.abort()
        except RuntimeError as error:
            lost = f"the store of the group is lost: has the rank that hosts it exited? {error}"
        with self.changed:
            self.lost = lost
            self.changed.notify_all()

    def _read_all(self) -> None:
        while not self._stopped.is_set() and self.error is None:
            if not self._some_left:
                self.events.wait(self.num_read)
            event = self.events.read(self.num_read)
            if event is not None:
                self._handle(event)
            elif self._some_left:
                self._post_missing()
                self._stopped.wait(POLL_S)

    def _handle(self, event: Event) -> None:
        due = None
        with self.changed:
            match event:
                case CallEvent(call=call):
                    self.early_calls[call] = event  # before the count is read: see CallLog.run
                    if call < self._history.num_calls:
                        due = self.early_calls.pop(call, None)
                case AgreedEvent():
                    self.events.forget(event)
                    self.agreed = max(self.agreed, event.call)
                case ErrorEvent():
                    self.error = event.text
                case BlockedEvent():
                    self.blocked[event.rank] = event
                case LeaveEvent():
                    self._some_left = True
            self.num_read += 1
            self.changed.notify_all()
        if due is not None:
            self.compare(due)

    def _post_missing(self) -> None:
        if (awaited := self.awaited) is None:
            return
        gone = [rank for rank in self.missing_ranks(awaited) if self.events.has_left(rank)]
        # Once all posts have been read, a rank that has left can no longer agree.
        if gone and self.events.num_posted() == self.num_read:
            names = self._history.rank_names(*gone)
            self.events.post_error(
                lambda: (
                    f"{names} left, by exiting or destroying the group: look for the cause in the "
                    f"output of {names}; {self._history.position()}"
                )
            )


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_registering = threading.Lock()  # a WeakSet must not grow while another thread iterates over it
_ticking = threading.Lock()
_ended = threading.Event()


def _all_watchers() -> list[Watcher]:
    with _registering:
        return list(_watchers)


def _start_ticking() -> None:
    if _ticking.acquire(blocking=False):
        threading.Thread(target=_tick_all, name="graphshard ticks", daemon=True).start()


def _tick_all() -> None:
    while not _ended.wait(TICK_S):
        for watcher in _all_watchers():
            watcher.tick()


@atexit.register
def _stop_all() -> None:
    # A thread that returns from C++ while the interpreter exits would crash the process.
    _ended.set()
    for watcher in _all_watchers():
        watcher.stop()
