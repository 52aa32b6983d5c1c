"""All ranks run the same graphs in the same order, or all of them raise the same error.

Each rank compiles by itself, and a guard that fails on one rank's data may give that rank another
graph than its peers. Graphs whose collectives differ hang, or mix up data. So each rank numbers its
calls of compiled graphs and logs their plans, and ranks compare through the store of the group:

    a rank      runs a graph for the first time, takes part in a decision, or has made no call for
                seconds (and the first rank now and then) ─► posts "call 7 runs plan P"
    the others  compare with their own call 7, logged or to come ─► agree, or post a fault
    a fault     ends it on all ranks: who waits raises, who is blocked in a collective is aborted

A thread of each rank reads what is posted, in one order for all. No verdict rests on time: ranks may
come to a compile minutes apart. A run that nobody has posted about does not touch the store.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch.distributed as dist

from .._torch.distributed import group_timeout_s, is_registered, store_of
from ..errors import BackendError
from .event_store import AGREED, CALL, DECIDED, FAULT, Event, EventStore
from .gloo_abort import abort

NUM_LOGGED = 4096  # calls; collectives keep ranks much closer together
POLL_S, MIN_POLL_S = 0.25, 0.002  # not a blocking wait: torch logs each one that times out
AUDIT_S = 30.0  # between posts of the first rank, for differences after which nothing hangs
STALL_S = 2.0  # a rank without a call for so long may be blocked in another graph than its peers
READ_S = 10.0  # at most, for the watcher to read what is in the store already

ADVICE = (
    "All ranks must run the same graphs in the same order; a guard on a value or a shape that "
    "differs between ranks makes them compile, or choose, different ones"
)


class CallLog:
    """What one rank knows of the calls of all ranks of a group; made by :func:`agreement_of`.

    A call is a run of a graph with collectives, or a decision. Every rank makes the same calls in
    the same order, one at a time. After a fault every further call raises it again.

    Raises:
        BackendError: from every method: ranks differ. The text is the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._name = group.group_name
        self._rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)  # as the default group numbers them
        # The other ranks of the backend "fake" do not exist.
        self._alone = len(self._ranks) == 1 or dist.get_backend(group) == "fake"
        self._num_calls = self._num_seen = self._num_read = 0  # calls, calls and events
        self._history = 0  # a checksum of the plans of all calls
        self._log = [("", 0)] * NUM_LOGGED  # plan and history
        self._texts: dict[str, str] = {}
        self._num_decisions = 0
        self._changed = threading.Condition()  # guards what the watcher has read:
        self._ahead: dict[int, Event] = {}  # posts about calls that this rank has not come to
        self._decisions: dict[str, str] = {}
        self._awaited: int | str | None = None  # a call that all must agree to, or a decision
        self._post: Event | None = None  # about that call
        self._fault = self._lost = ""
        if self._alone:
            return
        self._stores = weakref.WeakKeyDictionary({group: store_of(group)})
        board = f"graphshard/{self._name}", self._rank, len(self._ranks)
        self._board = EventStore(self._stores[group], *board)
        self._posted = [-1] * NUM_LOGGED  # calls that some rank has posted about
        self._stalls_at = self._audit_at = time.monotonic() + AUDIT_S
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name="graphshard", daemon=True)
        self._thread.start()
        _started.add(self)

    def involve(self, group: dist.ProcessGroup) -> None:
        """Ranks may be blocked in collectives of ``group``, too, some of those that agree."""
        if not self._alone and group not in self._stores:
            self._stores[group] = store_of(group)

    def run(self, plan_id: str) -> None:
        """To be called before every run of a graph but its first. Costs well under 1 us."""
        call = self._num_calls
        self._history = zlib.crc32(plan_id.encode(), self._history)
        self._log[call % NUM_LOGGED] = plan_id, self._history
        self._num_calls = call + 1
        if self._ahead or self._fault:  # after the count is written
            self._answer(call)

    def first_run(self, plan_id: str, text: str) -> None:
        """To be called, in place of ``run``, before the first run of a graph.

        Returns when every rank has come to this call and runs the same plan, for the first time or
        not, so when the slowest has compiled. ``plan_id`` is a hash of ``text``; an error shows the
        first line of it that differs.

        Raises:
            BackendError: also if a rank does not come within the group's timeout, or has left.
        """
        if self._alone:
            return
        self._texts[plan_id] = text
        self._post = None
        call = self._awaited = self._num_calls
        self.run(plan_id)
        self._post_call(call)
        self._wait()

    def choose_on_first_rank(self, key: str, make: Callable[[], str], text: str = "") -> str:
        """What ``make`` returns on the group's first rank. It is a call: all ranks have to ask, for
        the same ``key``; of ``text``, an error shows the first line that differs.

        Raises:
            BackendError: also if the first rank cannot decide: ``make`` raised, the group's timeout
                is over, or that rank has left.
        """
        if self._alone:
            return make()
        key = f"{key} ({self._num_decisions})"
        self._num_decisions += 1
        call = self._num_calls
        self._texts[f"decision {key!r}"] = f"decision about {text or key}"
        self.run(f"decision {key!r}")
        self._post_call(call)
        if self._rank == 0:
            return self._made(key, make)
        with self._changed:
            self._awaited = None if key in self._decisions else key
        self._wait()
        return self._decisions.pop(key)

    def explain(self, error: BaseException) -> None:
        """Raise the fault that ``error``, from a collective, is a consequence of, if there is one.

        A peer closes its connections after the fault was posted, but perhaps before it is read here.
        """
        if self._alone or isinstance(error, BackendError) or not isinstance(error, RuntimeError):
            return
        with contextlib.suppress(RuntimeError):
            num_posted = self._board.num_posted()
            self._wait_until(lambda: self._num_read >= num_posted, READ_S)
        if self._fault:
            raise self._error() from error

    def _answer(self, call: int) -> None:
        """Raise a fault, or compare this call with what a rank has posted about it."""
        with self._changed:
            post = self._ahead.pop(call, None)
        if self._fault:
            raise self._error()
        if post is not None and not self._judge(post):
            self._raise()

    def _post_call(self, call: int) -> None:
        """Unless a rank has posted about it; once all agree, a second post would count anew."""
        if self._lost:
            raise self._error(f"{self._lost}; {self._waiting()}")
        if self._posted[call % NUM_LOGGED] != call:
            plan, history = self._log[call % NUM_LOGGED]
            self._board.post_call(call, plan, history, self._texts.get(plan, plan))

    def _made(self, key: str, make: Callable[[], str]) -> str:
        try:
            text = make()
        except BaseException as error:
            who = self._named(self._rank)
            self._board.post(FAULT, text=f"{who} cannot decide {key!r}: {error!r}")
            raise
        self._board.post(DECIDED, key=key, text=text)
        return text

    def _wait(self) -> None:
        """Until what is awaited has come, at most for the timeout of the group."""
        group = self._group()
        timeout_s = group_timeout_s(group) if group is not None else 0.0
        try:
            self._wait_until(lambda: self._awaited is None, timeout_s)
            if self._awaited is None:
                return
            if self._fault or self._lost:
                raise self._error(f"{self._lost}; {self._waiting()}")
            text = f"{self._named(*self._missing())} did not come within {timeout_s:g} s"
            self._board.post(FAULT, text=f"{text}, the timeout of the group; {self._waiting()}")
            self._raise()
        finally:
            self._awaited = None

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: done() or self._fault or self._lost, timeout_s)

    def _raise(self) -> NoReturn:
        """Raise the fault that was posted first, as every rank does; one has been posted."""
        self._wait_until(lambda: False, READ_S)
        raise self._error()

    def _error(self, text: str = "ranks differ") -> BackendError:
        return BackendError(f"process group {self._name!r}: {self._fault or text}")

    def _judge(self, post: Event) -> bool:
        """Agree to a post about a call that this rank has come to, or post a fault."""
        call = post["call"]
        age = self._num_calls - call
        ours, history = self._log[call % NUM_LOGGED] if age <= NUM_LOGGED else ("forgotten", 0)
        if (ours, history) == (post["plan"], post["history"]):
            self._board.agree(post)
            return True
        texts = [self._board.text(post), self._texts.get(ours, ours)]
        ranks = (post["rank"], self._rank)
        difference = _difference(texts, [*map(self._named, ranks)])
        text = f"{self._named(*ranks)} differ in call {call}: {difference}. {ADVICE}"
        self._board.post(FAULT, text=text)
        return False

    def _missing(self) -> list[int]:
        """The ranks without which the wait does not end."""
        if isinstance(self._awaited, str):
            return [0]
        post, ranks = self._post, range(len(self._ranks))
        return [rank for rank in ranks if post is None or not self._board.agrees(post, rank)]

    def _waiting(self) -> str:
        call = self._num_calls - 1
        return f"{self._named(self._rank)} waits in call {call} ({self._log[call % NUM_LOGGED][0]})"

    def _named(self, *ranks: int) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(self._ranks[r]) for r in ranks)}"

    def _watch(self) -> None:
        """The watcher thread: everything below runs in it."""
        lost = "the group was destroyed"
        try:
            self._read_all()
            if not self._fault:
                self._board.leave()
            for of, store in list(self._stores.items()) if self._fault else ():
                abort(of, store)
        except RuntimeError as error:
            lost = f"the store of the group is lost: {error}"
        with self._changed:
            self._lost = lost
            self._changed.notify_all()

    def _read_all(self) -> None:
        """Read all events in order, until a fault or the end of the group."""
        pause_s = POLL_S
        while not self._stopped and not self._fault and is_registered(self._group()):
            event = self._board.read(self._num_read)
            if event is not None:
                self._on_event(event)
                continue
            self._post_last()
            self._post_left()
            if self._wake.wait(pause_s):  # this rank waits
                self._wake.clear()
                pause_s = MIN_POLL_S
            pause_s = min(1.1 * pause_s, POLL_S)

    def _on_event(self, event: Event) -> None:
        kind, post, came = event["kind"], None, None
        with self._changed:
            if kind == CALL:
                call = event["call"]
                self._posted[call % NUM_LOGGED] = call
                self._post = event if call == self._awaited else self._post
                self._ahead[call] = event  # before the count is read, see run()
                post = self._ahead.pop(call, None) if call < self._num_calls else None
            elif kind == AGREED:
                self._board.forget(event)
                came = event["call"]
            elif kind == DECIDED and self._rank != 0:
                self._decisions[event["key"]] = event["text"]
                came = event["key"]
            elif kind == FAULT:
                self._fault = event["text"]
            if self._awaited == came:
                self._awaited = None
            self._num_read += 1
            self._changed.notify_all()
        if post is not None:
            self._judge(post)

    def _post_last(self) -> None:
        """Post this rank's last call if it made it a while ago, or if an audit is due."""
        now, num_calls = time.monotonic(), self._num_calls
        if num_calls != self._num_seen:
            self._num_seen, self._stalls_at = num_calls, now + STALL_S
        audits = self._rank == 0 and now > self._audit_at
        if num_calls and (audits or now > self._stalls_at):
            self._audit_at = now + AUDIT_S
            self._post_call(num_calls - 1)

    def _post_left(self) -> None:
        """Post a fault if this rank waits for one that has left."""
        if self._awaited is None or not (left := self._board.left()):
            return
        gone = [rank for rank in self._missing() if rank in left]
        if gone and self._board.num_posted() == self._num_read:  # all that they did is read
            self._board.post(FAULT, text=f"{self._named(*gone)} left; {self._waiting()}")


def _difference(texts: Sequence[str], names: Sequence[str]) -> str:
    """The first line in which two plans differ."""
    lines = itertools.zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing")
    for number, pair in enumerate(lines, 1):
        if pair[0] != pair[1]:
            said = [f"{line.strip()} ({name})" for line, name in zip(pair, names)]
            return f"line {number} of the plan is {' and '.join(said)}"
    return "in an earlier call they ran different plans"


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, CallLog] = weakref.WeakKeyDictionary()
_started: weakref.WeakSet[CallLog] = weakref.WeakSet()


def call_log_of(group: dist.ProcessGroup) -> CallLog:
    """The agreement of the ranks of ``group``; every rank has to ask for it, at any time."""
    if group not in _agreements:
        _agreements[group] = CallLog(group)
    return _agreements[group]


@atexit.register
def _stop_all() -> None:
    # A thread that comes back from C++ while the interpreter ends would crash the process.
    for agreement in list(_started):
        agreement._stopped = True
        agreement._wake.set()
        agreement._thread.join(2.0)
