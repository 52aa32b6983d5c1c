"""The calls that one rank has made: numbered, with the plan that each of them ran."""

from __future__ import annotations

import zlib
from typing import NamedTuple

NUM_LOGGED = 4096
"""Calls that a rank remembers. Collectives keep the ranks much closer together than that."""


class LoggedCall(NamedTuple):
    """One call.

    Attributes:
        plan_id: the plan that it ran.
        history: checksum of the plans of all calls up to this one.
    """

    plan_id: str
    history: int


FORGOTTEN = LoggedCall("forgotten", 0)


class CallHistory:
    """The last calls of this rank. The rank's thread writes it, and its watcher reads along.

    Attributes:
        num_calls: calls so far; the next call has this number.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._checksum = 0
        self._calls = [("", 0)] * NUM_LOGGED  # as of LoggedCall, which takes longer to make
        self._plan_texts: dict[str, str] = {}

    def append(self, plan_id: str) -> int:
        """Log a call that runs the plan, and return its number. Costs well under 1 us."""
        call = self.num_calls
        self._checksum = zlib.crc32(plan_id.encode(), self._checksum)
        self._calls[call % NUM_LOGGED] = plan_id, self._checksum
        self.num_calls = call + 1  # the watcher reads the entry only after this
        return call

    def entry(self, call: int) -> LoggedCall:
        """Return a call that this rank has made, ``FORGOTTEN`` if that is too long ago."""
        age = self.num_calls - call
        return LoggedCall(*self._calls[call % NUM_LOGGED]) if age <= NUM_LOGGED else FORGOTTEN

    def remember_text(self, plan_id: str, text: str) -> None:
        """Have errors show ``text`` for the plan."""
        self._plan_texts[plan_id] = text

    def knows(self, plan_id: str) -> bool:
        """Return whether this rank has a text for the plan."""
        return plan_id in self._plan_texts

    def plan_text(self, plan_id: str) -> str:
        """Return the text of a plan; its id if this rank has none."""
        return self._plan_texts.get(plan_id, plan_id)
