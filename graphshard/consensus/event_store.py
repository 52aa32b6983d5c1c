"""The store of a process group as a board on which its ranks post to each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

CALL, AGREED, DECIDED, FAULT = "call", "agreed", "decided", "fault"
Event = Mapping[str, Any]


class EventStore:
    """The events that the ranks of a group post to each other; deleted when all have read them."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        # The store may have held a group of this name before; every rank has counted it.
        generation = dist.PrefixStore(prefix, store).add(f"generation/{rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{generation}", store)
        self._first = 0  # events before it are deleted

    def post(self, kind: str, **event: Any) -> None:
        index = self._store.add("events", 1) - 1
        self._store.set(f"event/{index}", json.dumps({"kind": kind, "index": index, **event}))

    def post_call(self, call: int, plan: str, history: int, text: str) -> None:
        """Post that ``call`` runs ``plan``, unless a rank has done so for this call."""
        if self._store.add(f"claim/{call}", 1) == 1:
            self._store.set(f"text/{call}", text)
            self.post(CALL, call=call, rank=self._rank, plan=plan, history=history)

    def read(self, index: int) -> Event | None:
        key = f"event/{index}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def num_posted(self) -> int:
        return self._store.add("events", 0)

    def text(self, post: Event) -> str:
        """The plan of a post about a call that this rank has not agreed to."""
        return self._store.get(f"text/{post['call']}").decode()

    def agree(self, post: Event) -> None:
        """Say that this rank runs the same plan in that call."""
        call, index = post["call"], post["index"]
        self._store.set(f"agrees/{index}/{self._rank}", "")
        if self._store.add(f"agreed/{index}", 1) == self._num_ranks:
            self.post(AGREED, call=call, of=index)
            events = [f"event/{i}" for i in range(self._first, index + 1)]
            self._delete(*events, f"agreed/{index}", f"text/{call}", f"claim/{call}")

    def agrees(self, post: Event, rank: int) -> bool:
        return self._store.check([f"agrees/{post['index']}/{rank}"])

    def forget(self, agreed: Event) -> None:
        """All ranks have agreed to a post, and so have read the events up to it."""
        self._first = max(self._first, agreed["of"] + 1)
        self._delete(f"agrees/{agreed['of']}/{self._rank}")

    def leave(self) -> None:
        self._store.set(f"left/{self._rank}", "")
        self._store.add("left", 1)

    def left(self) -> list[int]:
        ranks = range(self._num_ranks) if self._store.add("left", 0) else ()
        return [rank for rank in ranks if self._store.check([f"left/{rank}"])]

    def _delete(self, *keys: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can
            for key in keys:
                self._store.delete_key(key)
