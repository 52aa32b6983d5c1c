"""The events that the ranks of a process group post to each other, kept in the group's store.

All ranks read the events in the same order. The keys in the store and the JSON format of events are
private to this module.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Event:
    """A message from one rank to all ranks."""

    index: int = -1  # position in the order of all events, once posted


@dataclass(frozen=True, kw_only=True)
class CallEvent(Event):
    """Request by a rank to compare the plans that all ranks run in a call."""

    call: int
    rank: int
    plan_id: str
    history: int  # as in ``LoggedCall``


@dataclass(frozen=True, kw_only=True)
class AgreedEvent(Event):
    """Notice that all ranks have run the same plans up to ``call``."""

    call: int
    call_event: int  # index of the ``CallEvent`` that asked for the comparison


@dataclass(frozen=True, kw_only=True)
class ErrorEvent(Event):
    """Notice of an error, such as different plans; every rank raises an error with ``text``."""

    text: str


@dataclass(frozen=True, kw_only=True)
class LeaveEvent(Event):
    """Notice that a rank has left; only the first rank to leave posts it."""


@dataclass(frozen=True, kw_only=True)
class BlockedEvent(Event):
    """Notice that a rank is blocked in a collective, before a call that others may wait for."""

    rank: int
    call: int  # number of that rank's next call
    what: str  # this and the next fields: see ``_torch.distributed.PendingCollective``
    group: str
    number: int


_EVENTS = {kind.__name__: kind for kind in Event.__subclasses__()}
# About as long as 32-bit milliseconds allow, because torch logs every wait that times out.
_FOREVER = timedelta(days=20)


class EventStore:
    """The events of one process group.

    When all ranks have agreed on the plan of a call, its event and all earlier ones are deleted, if
    the store can delete. Each method performs a constant number of store operations, plus one for
    each event it deletes.

    Args:
        connect: function that returns a new connection to the group's store. It is called twice,
            because ``wait`` blocks the connection that it uses.
        prefix: prefix of all keys, different for each group that shares the store.
    """

    def __init__(
        self, connect: Callable[[], dist.Store], prefix: str, rank: int, num_ranks: int
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        store = connect()
        # Each rank counts the groups of this name, because the store may have served earlier ones.
        generation = dist.PrefixStore(prefix, store).add(f"generation/{rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{generation}", store)
        self._reader = dist.PrefixStore(f"{prefix}/{generation}", connect())
        self._first = 0  # events before this index are deleted
        self._agreeing = threading.Lock()  # both threads of a rank call ``agree``
        self.progress = -1  # last call that this rank has agreed to

    def post(self, event: Event) -> None:
        index = self._store.add("events", 1) - 1
        fields = asdict(replace(event, index=index))
        self._store.set(f"event/{index}", json.dumps([type(event).__name__, fields]))

    def post_call(self, call: int, plan_id: str, history: int, text: str) -> None:
        """Post that ``call`` runs a plan, unless a rank has already posted about this call."""
        if self._store.add(f"claim/{call}", 1) == 1:
            self._store.set(f"text/{call}", text)  # read only by ranks that differ
            self.post(CallEvent(call=call, rank=self._rank, plan_id=plan_id, history=history))

    def post_error(self, describe: Callable[[], str]) -> None:
        """Have all ranks raise an error that says ``describe()``, unless one is already posted."""
        if self._store.add("errors", 1) == 1:
            self.post(ErrorEvent(text=describe()))

    def read(self, index: int) -> Event | None:
        key = f"event/{index}"
        if not self._store.check([key]):
            return None
        name, fields = json.loads(self._store.get(key))
        return _EVENTS[name](**fields)

    def wait(self, index: int) -> None:
        """Block, without a timeout, until there is an event at ``index``."""
        with contextlib.suppress(dist.DistStoreError):  # the caller finds no event and waits again
            self._reader.wait([f"event/{index}"], _FOREVER)

    def num_posted(self) -> int:
        return self._store.add("events", 0)

    def plan_text(self, event: CallEvent) -> str:
        """Return the plan text of an event that this rank has not agreed to."""
        return self._store.get(f"text/{event.call}").decode()

    def agree(self, event: CallEvent) -> None:
        """Record that this rank runs the same plan in the call of ``event``.

        The last rank to agree posts an ``AgreedEvent``, and deletes ``event`` and those before it.
        """
        call, index = event.call, event.index
        with self._agreeing:
            self.progress = max(self.progress, call)
            self._store.set(f"progress/{self._rank}", str(self.progress))
        if self._store.add(f"agreed/{index}", 1) == self._num_ranks:
            # Listed before the post: this rank's other thread may read it and move ``_first``.
            events = [f"event/{i}" for i in range(self._first, index + 1)]
            self.post(AgreedEvent(call=call, call_event=index))
            with contextlib.suppress(RuntimeError):  # not every store can delete
                for key in (*events, f"agreed/{index}", f"text/{call}", f"claim/{call}"):
                    self._store.delete_key(key)

    def has_agreed(self, call: int, rank: int) -> bool:
        """Return whether ``rank`` has agreed to an event about ``call`` or a later call."""
        key = f"progress/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= call

    def forget(self, agreed: AgreedEvent) -> None:
        """Record that all ranks have read the events up to the ``CallEvent`` of ``agreed``."""
        self._first = max(self._first, agreed.call_event + 1)

    def leave(self) -> None:
        self._store.set(f"left/{self._rank}", "")
        if self._store.add("num_left", 1) == 1:  # one event is enough: all ranks poll afterwards
            self.post(LeaveEvent())

    def has_left(self, rank: int) -> bool:
        return self._store.check([f"left/{rank}"])
