"""The events that the ranks of a process group post to each other, kept in the group's store.

All ranks read the events in the same order. Only this module knows the keys of the store and the
JSON form of an event; others use :class:`Event` and its subclasses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import ClassVar

import torch.distributed as dist


class EventKind(StrEnum):
    """The tag of an event in its JSON form."""

    CALL = "call"
    AGREED = "agreed"
    CHOICE = "decided"
    FAULT = "fault"
    LEAVE = "leave"
    BLOCKED = "blocked"


@dataclass(frozen=True, kw_only=True)
class Event:
    """A message from one rank to all ranks.

    Attributes:
        index: position in the order of all events; -1 until the event is posted.
    """

    kind: ClassVar[EventKind]
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class CallEvent(Event):
    """A rank's request that all ranks compare the plan that they run in a call.

    Attributes:
        call: number of the call.
        rank: number, in the group, of the rank that posted this event.
        plan: id of the plan.
        history: checksum of the plans of all calls up to this one.
    """

    kind = EventKind.CALL
    call: int
    rank: int
    plan: str
    history: int


@dataclass(frozen=True, kw_only=True)
class AgreedEvent(Event):
    """Notice that all ranks run the same plan in a call.

    Attributes:
        call: number of the call.
        call_event: index of the :class:`CallEvent` about the call.
    """

    kind = EventKind.AGREED
    call: int
    call_event: int


@dataclass(frozen=True, kw_only=True)
class ChoiceEvent(Event):
    """Notice that the first rank has made a choice; ``EventStore.choice_text`` reads it.

    Attributes:
        key: name of the choice.
        digest: hash of what was chosen; ranks that would choose the same need not read the text.
        call: number of the call.
    """

    kind = EventKind.CHOICE
    key: str
    digest: str
    call: int


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """Notice that ranks differ or one is missing; every rank raises an error with ``text``."""

    kind = EventKind.FAULT
    text: str


@dataclass(frozen=True, kw_only=True)
class LeaveEvent(Event):
    """Notice that a rank has left; only the first rank to leave posts it."""

    kind = EventKind.LEAVE


@dataclass(frozen=True, kw_only=True)
class BlockedEvent(Event):
    """Notice that a rank is blocked in a collective, before a call that others may wait for.

    Attributes:
        rank: number, in the group, of the rank that posted this event.
        call: number of that rank's next call.
        what: the collective, and where it is called.
        group: name of the collective's process group.
        number: number of that group's collectives that the rank has begun, this one included.
    """

    kind = EventKind.BLOCKED
    rank: int
    call: int
    what: str
    group: str
    number: int


_TYPES = (CallEvent, AgreedEvent, ChoiceEvent, FaultEvent, LeaveEvent, BlockedEvent)
_EVENT_TYPES: dict[str, type[Event]] = {event_type.kind: event_type for event_type in _TYPES}
_FOREVER = timedelta(days=20)
"""Timeout of a blocking wait: about as long as 32-bit milliseconds allow, since torch logs
timeouts."""


def digest(text: str) -> str:
    """Return a hash of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()


class EventStore:
    """The events of one process group; an event is deleted once all ranks have read it.

    One rank's work takes a constant number of store operations, except for finding the names of
    missing ranks, which one rank does for all.

    Args:
        connect: function that returns a new connection to the group's store; ``wait`` blocks one.
        prefix: prefix of all keys, different for each group that shares the store.
        rank: this rank's number in the group.
        num_ranks: number of ranks in the group.
    """

    def __init__(
        self, connect: Callable[[], dist.Store], prefix: str, rank: int, num_ranks: int
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        store = connect()
        # The store may have served earlier groups of this name; every rank has counted them.
        generation = dist.PrefixStore(prefix, store).add(f"generation/{rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{generation}", store)
        self._reader = dist.PrefixStore(f"{prefix}/{generation}", connect())
        self._first = 0  # events before this index are deleted
        self._agreeing = threading.Lock()  # both threads of a rank call ``agree``
        self._progress = -1  # the last call that this rank has agreed to
        self._choices: deque[int] = deque()  # calls whose choices the store still has
        self._left: list[int] = []  # ranks that are known to have left

    def post(self, event: Event) -> None:
        """Append ``event`` to the events that all ranks read."""
        index = self._store.add("events", 1) - 1
        fields = asdict(replace(event, index=index))
        self._store.set(f"event/{index}", json.dumps({"kind": event.kind, **fields}))

    def post_call(self, call: int, plan: str, history: int, text: str) -> None:
        """Post that ``call`` runs ``plan``, unless a rank has already posted about this call.

        Args:
            text: the plan itself, which other ranks read if they differ.
        """
        if self._store.add(f"claim/{call}", 1) == 1:
            self._store.set(f"text/{call}", text)
            self.post(CallEvent(call=call, rank=self._rank, plan=plan, history=history))

    def post_choice(self, key: str, text: str, call: int) -> None:
        """Post that this rank, the group's first, has chosen ``text`` in a call."""
        self._choices.append(call)
        self._store.set(f"choice/{call}", text)
        self.post(ChoiceEvent(key=key, digest=digest(text), call=call))

    def choice_text(self, event: ChoiceEvent) -> str:
        """Return what the first rank has chosen; valid until all ranks have made a later call."""
        return self._store.get(f"choice/{event.call}").decode()

    def read(self, index: int) -> Event | None:
        """Return the event at position ``index``, or None if it is not posted yet."""
        key = f"event/{index}"
        if not self._store.check([key]):
            return None
        fields = json.loads(self._store.get(key))
        return _EVENT_TYPES[fields.pop("kind")](**fields)

    def wait(self, index: int) -> None:
        """Block, without a timeout, until the event at position ``index`` is posted."""
        with contextlib.suppress(dist.DistStoreError):  # the caller finds no event and waits again
            self._reader.wait([f"event/{index}"], _FOREVER)

    def num_posted(self) -> int:
        """Return the number of events that all ranks have posted."""
        return self._store.add("events", 0)

    def plan_text(self, event: CallEvent) -> str:
        """Return the plan that ``event`` is about; valid until this rank has agreed to it."""
        return self._store.get(f"text/{event.call}").decode()

    def agree(self, event: CallEvent) -> None:
        """Record that this rank runs the same plan in that call.

        The last rank to agree posts an :class:`AgreedEvent` and deletes what all ranks have read.
        """
        call, index = event.call, event.index
        with self._agreeing:
            self._progress = max(self._progress, call)
            self._store.set(f"progress/{self._rank}", str(self._progress))
        if self._store.add(f"agreed/{index}", 1) == self._num_ranks:
            # Listed before the post: this rank's other thread may read it and move ``_first``.
            events = [f"event/{i}" for i in range(self._first, index + 1)]
            self.post(AgreedEvent(call=call, call_event=index))
            self._delete(*events, f"agreed/{index}", f"text/{call}", f"claim/{call}")

    def has_agreed(self, event: CallEvent, rank: int) -> bool:
        """Return whether ``rank`` has agreed to ``event`` or to an event about a later call."""
        key = f"progress/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= event.call

    def forget(self, agreed: AgreedEvent) -> None:
        """Record that all ranks have read the events up to the call that they agreed to."""
        self._first = max(self._first, agreed.call_event + 1)
        while self._choices and self._choices[0] < agreed.call:
            self._delete(f"choice/{self._choices.popleft()}")

    def claim_fault(self) -> bool:
        """Return True on the one rank that has to post a fault."""
        return self._store.add("faults", 1) == 1

    def leave(self) -> None:
        """Record that this rank takes no further part."""
        number = self._store.add("left", 1) - 1
        self._store.set(f"left/{number}", str(self._rank))
        if number == 0:
            self.post(LeaveEvent())

    def ranks_that_left(self) -> list[int]:
        """Return the ranks that have left."""
        for number in range(len(self._left), self._store.add("left", 0)):
            if not self._store.check([f"left/{number}"]):  # counted, but not written yet
                break
            self._left.append(int(self._store.get(f"left/{number}")))
        return self._left

    def _delete(self, *keys: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can delete
            for key in keys:
                self._store.delete_key(key)
