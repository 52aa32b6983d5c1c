"""The events that the ranks of a process group post to each other, kept in the group's store.

Events have an order that all ranks read alike. This module alone knows the keys of the store and
the JSON form of an event; others handle :class:`Event` and its subclasses.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import ClassVar

import torch.distributed as dist


class EventKind(StrEnum):
    """The tag of an event in its JSON form."""

    CALL = "call"
    AGREED = "agreed"
    CHOICE = "decided"
    FAULT = "fault"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One rank's message to all ranks.

    Attributes:
        index: position in the order of all events; -1 until the event is posted.
    """

    kind: ClassVar[EventKind]
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class CallEvent(Event):
    """A rank runs a plan in a call, and asks all ranks to compare.

    Attributes:
        call: number of the call.
        rank: the rank that posted this event, as the group numbers its ranks.
        plan: the plan's id.
        history: checksum of the plans of all calls up to this one.
    """

    kind = EventKind.CALL
    call: int
    rank: int
    plan: str
    history: int


@dataclass(frozen=True, kw_only=True)
class AgreedEvent(Event):
    """All ranks have compared a call with their own, and found the same plan.

    Attributes:
        call: number of the call.
        call_event: index of the :class:`CallEvent` about it.
    """

    kind = EventKind.AGREED
    call: int
    call_event: int


@dataclass(frozen=True, kw_only=True)
class ChoiceEvent(Event):
    """The first rank has chosen ``text`` under the name ``key``."""

    kind = EventKind.CHOICE
    key: str
    text: str


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """Ranks differ, or one is missing; ``text`` says how, for the error on every rank."""

    kind = EventKind.FAULT
    text: str


_EVENT_TYPES: dict[str, type[Event]] = {
    event_type.kind: event_type for event_type in (CallEvent, AgreedEvent, ChoiceEvent, FaultEvent)
}


class EventStore:
    """The events of one process group. An event is deleted when all ranks have read it.

    Args:
        prefix: of all keys; another for every group that shares the store.
        rank: this rank, as the group numbers its ranks.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        # The store may have held a group of this name before; every rank has counted it.
        generation = dist.PrefixStore(prefix, store).add(f"generation/{rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{generation}", store)
        self._first = 0  # events before it are deleted

    def post(self, event: Event) -> None:
        """Append ``event`` to the events that all ranks read."""
        index = self._store.add("events", 1) - 1
        fields = asdict(replace(event, index=index))
        self._store.set(f"event/{index}", json.dumps({"kind": event.kind, **fields}))

    def post_call(self, call: int, plan: str, history: int, text: str) -> None:
        """Post that ``call`` runs ``plan``, unless a rank has posted about this call before.

        Args:
            text: the plan itself, which other ranks read if they differ.
        """
        if self._store.add(f"claim/{call}", 1) == 1:
            self._store.set(f"text/{call}", text)
            self.post(CallEvent(call=call, rank=self._rank, plan=plan, history=history))

    def read(self, index: int) -> Event | None:
        """Return the event at position ``index``, or None if it is not posted yet."""
        key = f"event/{index}"
        if not self._store.check([key]):
            return None
        fields = json.loads(self._store.get(key))
        return _EVENT_TYPES[fields.pop("kind")](**fields)

    def num_posted(self) -> int:
        """Return how many events all ranks together have posted."""
        return self._store.add("events", 0)

    def plan_text(self, event: CallEvent) -> str:
        """Return the plan that ``event`` is about, as long as this rank has not agreed to it."""
        return self._store.get(f"text/{event.call}").decode()

    def agree(self, event: CallEvent) -> None:
        """Note that this rank runs the same plan in that call.

        The last rank to agree posts an :class:`AgreedEvent` and deletes what all have read.
        """
        call, index = event.call, event.index
        self._store.set(f"agrees/{index}/{self._rank}", "")
        if self._store.add(f"agreed/{index}", 1) == self._num_ranks:
            self.post(AgreedEvent(call=call, call_event=index))
            events = [f"event/{i}" for i in range(self._first, index + 1)]
            self._delete(*events, f"agreed/{index}", f"text/{call}", f"claim/{call}")

    def has_agreed(self, event: CallEvent, rank: int) -> bool:
        """Return whether ``rank`` has agreed to ``event``; it tells until all ranks have."""
        return self._store.check([f"agrees/{event.index}/{rank}"])

    def forget(self, agreed: AgreedEvent) -> None:
        """Delete this rank's consent to a call, as all ranks have read the events up to it."""
        self._first = max(self._first, agreed.call_event + 1)
        self._delete(f"agrees/{agreed.call_event}/{self._rank}")

    def leave(self) -> None:
        """Note that this rank takes no further part."""
        self._store.set(f"left/{self._rank}", "")
        self._store.add("left", 1)

    def ranks_that_left(self) -> list[int]:
        """Return the ranks that take no further part."""
        ranks = range(self._num_ranks) if self._store.add("left", 0) else ()
        return [rank for rank in ranks if self._store.check([f"left/{rank}"])]

    def _delete(self, *keys: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can
            for key in keys:
                self._store.delete_key(key)
