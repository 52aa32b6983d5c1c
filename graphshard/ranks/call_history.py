"""The numbered calls that one rank has made, with the plan that each of them ran."""

from __future__ import annotations

import zlib
from typing import NamedTuple

NUM_LOGGED = 4096
"""Number of calls that a rank remembers. Collectives keep ranks much closer together than that."""


class LoggedCall(NamedTuple):
    """One call.

    Attributes:
        plan_id: id of the plan that the call ran.
        history: checksum of the plans of all calls up to this one.
    """

    plan_id: str
    history: int


FORGOTTEN = LoggedCall("forgotten", 0)


class CallHistory:
    """The last calls of this rank, written by the rank's thread while its watcher reads them.

    Attributes:
        num_calls: number of calls so far, which is also the number of the next call.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._checksum = 0
        self._calls = [("", 0)] * NUM_LOGGED  # plain tuples: a LoggedCall takes longer to make
        self._plan_texts: dict[str, str] = {}

    def append(self, plan_id: str) -> int:
        """Log a call that runs the plan, and return its number; costs well under 1 us."""
        call = self.num_calls
        self._checksum = zlib.crc32(plan_id.encode(), self._checksum)
        self._calls[call % NUM_LOGGED] = plan_id, self._checksum
        self.num_calls = call + 1  # the watcher reads the entry only after this
        return call

    def entry(self, call: int) -> LoggedCall:
        """Return a call that this rank has made; ``FORGOTTEN`` if it is too old."""
        age = self.num_calls - call
        return LoggedCall(*self._calls[call % NUM_LOGGED]) if age <= NUM_LOGGED else FORGOTTEN

    def remember_text(self, plan_id: str, text: str) -> None:
        """Remember the text that errors show for the plan."""
        self._plan_texts[plan_id] = text

    def knows(self, plan_id: str) -> bool:
        """Return whether this rank has a text for the plan."""
        return plan_id in self._plan_texts

    def plan_text(self, plan_id: str) -> str:
        """Return the text of a plan, or its id if this rank has no text."""
        return self._plan_texts.get(plan_id, plan_id)
