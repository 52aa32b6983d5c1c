"""The thread of each rank that reads its peers' events, in one order for all ranks.

It compares the peers' calls with this rank's calls, wakes this rank when what it awaits has arrived
and, after a fault, releases it from a blocked collective. It leaves what it has read in an
:class:`Inbox` for the rank's thread.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .blocked_ranks import RankThread, is_deadlocked
from .call_comparison import CallComparison
from .call_history import CallHistory
from .members import Members
from .store import (
    AgreedEvent,
    BlockedEvent,
    CallEvent,
    ChoiceEvent,
    Event,
    EventStore,
    FaultEvent,
    LeaveEvent,
)

TICK_S = 0.25
"""Seconds between checks of this rank's state, which do not touch the store."""
POLL_S = 0.5
"""Seconds between reads of the store once a rank has left; before that, reads block."""
AUDIT_S = 30.0
"""Seconds between audit posts of the first rank, which find differences that hang no rank."""
STALL_S = 2.0
"""Seconds without a call after which a rank posts its last one: it may be blocked in a graph that
its peers do not run."""


@dataclass(eq=False)
class Inbox:
    """What this rank has received from its peers; ``changed`` guards all fields.

    Attributes:
        early_calls: events about calls that this rank has not made yet, by call.
        choices: events about the first rank's choices, by key; the rank's thread removes them.
        awaited: number of a call that all ranks must agree to, or key of a choice: the rank's
            thread sets it and waits until the watcher resets it to None.
        awaited_event: event about the awaited call; None until a rank posts one.
        blocked: latest event of each rank about the collective it is blocked in, by rank.
        num_read: number of events read so far.
        fault: text of the first fault of any rank; None if there is none.
        lost: reason why no more events can be read; None while they can.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    early_calls: dict[int, CallEvent] = field(default_factory=dict)
    choices: dict[str, ChoiceEvent] = field(default_factory=dict)
    awaited: int | str | None = None
    awaited_event: CallEvent | None = None
    blocked: dict[int, BlockedEvent] = field(default_factory=dict)
    num_read: int = 0
    fault: str | None = None
    lost: str | None = None


class Watcher:
    """A thread that reads the events of one group; the constructor starts it.

    It blocks in the store, which costs nothing while nobody posts, and ends with the group, after a
    fault, or when the store is lost. The rank's thread calls the public methods, writes ``history``
    and reads ``inbox``. A second thread, ``_tick_all``, ticks the watchers of all groups.
    """

    def __init__(self, members: Members, history: CallHistory, inbox: Inbox) -> None:
        self._members, self._history, self._inbox = members, history, inbox
        self._rank, self._num_ranks = members.rank, len(members.global_ranks)
        prefix = f"graphshard/{members.name}"
        self.events = EventStore(members.connect, prefix, self._rank, self._num_ranks)
        ranks = members.global_ranks
        self.comparison = CallComparison(history, self.events, self._rank, ranks)
        self.rank_thread = RankThread()
        self._num_seen = 0  # calls of this rank at the last tick
        self._stalls_at = self._audit_at = time.monotonic() + AUDIT_S
        self._some_left = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="graphshard", daemon=True)
        self._thread.start()
        _watchers.add(self)
        _start_ticking()

    # --- called by the rank's thread ---------------------------------------------------------

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait for ``done()``, a fault, or the end of all events, for at most ``timeout_s``."""
        inbox = self._inbox
        with inbox.changed:
            inbox.changed.wait_for(
                lambda: done() or inbox.fault is not None or inbox.lost is not None, timeout_s
            )

    def missing_ranks(self) -> list[int]:
        """Return the ranks that this rank is waiting for."""
        if isinstance(self._inbox.awaited, str):
            return [0]
        event, ranks = self._inbox.awaited_event, range(self._num_ranks)
        return [rank for rank in ranks if event is None or not self.events.has_agreed(event, rank)]

    # --- called by the thread that ticks all watchers, and at exit ----------------------------

    def tick(self) -> None:
        """Post what is due, and end the thread if the group is gone."""
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
        """Tell the other ranks that this one takes no further part, and end the thread."""
        self._stopped.set()
        with contextlib.suppress(RuntimeError):
            if self._thread.is_alive() and self._inbox.fault is None:
                self.events.leave()

    def stop(self) -> None:
        """End the thread, and wait at most two seconds for that."""
        if not self._stopped.is_set():
            self.leave()
        self._thread.join(2.0)

    def _post_last_call(self) -> None:
        """Post this rank's last call if it was made ``STALL_S`` ago, or if an audit is due."""
        now, num_calls = time.monotonic(), self._history.num_calls
        if num_calls != self._num_seen:
            self._num_seen, self._stalls_at = num_calls, now + STALL_S
        is_audit = self._rank == 0 and now > self._audit_at
        if num_calls and (is_audit or now > self._stalls_at):
            self._audit_at = now + AUDIT_S
            self.comparison.post_call(num_calls - 1)

    def _post_if_blocked(self) -> None:
        """Post that this rank is in a collective, if others have made a call that it has not."""
        if self._inbox.early_calls:
            event = self.rank_thread.new_event(self._rank, self._history.num_calls)
            if event is not None:
                self._members.release_also_by_name(
                    event.group
                )  # so that a fault releases this rank
                self.events.post(event)

    def _post_deadlock(self) -> None:
        """Post a fault if this rank waits for a rank that can never make the call."""
        for event in list(self._inbox.blocked.values()):
            if is_deadlocked(event, self._inbox.awaited):
                self.comparison.post_fault(partial(self.comparison.describe_blocked, event))

    # --- the watcher's thread ----------------------------------------------------------------

    def _watch(self) -> None:
        """Read events until there is a reason to stop or abort, then tell the rank's thread why."""
        lost = "the group was destroyed"
        try:
            self._read_all()
            if self._inbox.fault is not None:
                self._members.abort()
        except RuntimeError as error:
            lost = f"the store of the group is lost: {error}"
        with self._inbox.changed:
            self._inbox.lost = lost
            self._inbox.changed.notify_all()

    def _read_all(self) -> None:
        """Read all events in order, until a fault or the end of the group."""
        while not self._stopped.is_set() and self._inbox.fault is None:
            if not self._some_left:
                self.events.wait(self._inbox.num_read)
            event = self.events.read(self._inbox.num_read)
            if event is not None:
                self._handle(event)
            elif self._some_left:
                self._post_missing()
                self._stopped.wait(POLL_S)

    def _handle(self, event: Event) -> None:
        """Put ``event`` into the inbox; compare it if this rank has made the call."""
        inbox, due = self._inbox, None
        with inbox.changed:
            match event:
                case CallEvent():
                    due = self._handle_call(event)
                case AgreedEvent():
                    self.events.forget(event)
                    self._end_wait_for(event.call)
                case ChoiceEvent() if self._rank != 0:
                    inbox.choices[event.key] = event
                    self._end_wait_for(event.key)
                case FaultEvent():
                    inbox.fault = event.text
                case BlockedEvent():
                    inbox.blocked[event.rank] = event
                case LeaveEvent():
                    self._some_left = True
            inbox.num_read += 1
            inbox.changed.notify_all()
        if due is not None:
            self.comparison.compare(due)

    def _handle_call(self, event: CallEvent) -> CallEvent | None:
        """Keep ``event`` until this rank makes the call; return it if it has already."""
        inbox, call = self._inbox, event.call
        self.comparison.note_posted(call)
        if call == inbox.awaited:
            inbox.awaited_event = event
        inbox.early_calls[call] = event  # stored before the count is read: see CallLog.run
        return inbox.early_calls.pop(call, None) if call < self._history.num_calls else None

    def _end_wait_for(self, call_or_key: int | str) -> None:
        if self._inbox.awaited == call_or_key:
            self._inbox.awaited = None

    def _post_missing(self) -> None:
        """Post a fault if this rank waits for one that has left."""
        if self._inbox.awaited is None or not (left := self.events.ranks_that_left()):
            return
        gone = sorted(set(self.missing_ranks()) & set(left))
        if gone and self.events.num_posted() == self._inbox.num_read:  # all posts are read
            names = self.comparison.rank_names(*gone)
            self.comparison.post_fault(lambda: f"{names} left; {self.comparison.position()}")


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_ticking = threading.Lock()
_ended = threading.Event()


def _start_ticking() -> None:
    """Start the one thread that ticks the watchers of all groups, unless it is running."""
    if _ticking.acquire(blocking=False):
        threading.Thread(target=_tick_all, name="graphshard ticks", daemon=True).start()


def _tick_all() -> None:
    while not _ended.wait(TICK_S):
        for watcher in list(_watchers):
            watcher.tick()


@atexit.register
def _stop_all() -> None:
    # A thread that returns from C++ while the interpreter exits would crash the process.
    _ended.set()
    for watcher in list(_watchers):
        watcher.stop()
