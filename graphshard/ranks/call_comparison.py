"""Compare one rank's calls with its peers' calls, and describe how they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .call_history import NUM_LOGGED, CallHistory, LoggedCall
from .differences import BY_ALL_RANKS, TOGETHER, describe_difference
from .store import BlockedEvent, CallEvent, EventStore, FaultEvent


class CallComparison:
    """One rank's side of the comparison, used by the rank's thread and by its watcher.

    Args:
        rank: this rank's number in the group.
        global_ranks: global rank of each rank in the group, for messages.
    """

    def __init__(
        self, history: CallHistory, events: EventStore, rank: int, global_ranks: Sequence[int]
    ) -> None:
        self._history, self._events = history, events
        self._rank, self._global_ranks = rank, global_ranks
        self._posted = [-1] * NUM_LOGGED  # calls that some rank has posted about

    def note_posted(self, call: int) -> None:
        """Record that some rank has posted about ``call``."""
        self._posted[call % NUM_LOGGED] = call

    def post_call(self, call: int) -> None:
        """Post about ``call`` unless a rank has already.

        Once all ranks have agreed, another post would start another round.
        """
        if self._posted[call % NUM_LOGGED] != call:
            plan_id, history = self._history.entry(call)
            self._events.post_call(call, plan_id, history, self._history.plan_text(plan_id))

    def compare(self, event: CallEvent) -> bool:
        """Agree to an event about one of this rank's calls and return True, or post a fault."""
        ours = self._history.entry(event.call)
        if ours == LoggedCall(event.plan, event.history):
            self._events.agree(event)
            return True
        self.post_fault(lambda: self._difference(event, ours))
        return False

    def _difference(self, event: CallEvent, ours: LoggedCall) -> str:
        texts = [self._events.plan_text(event), self._history.plan_text(ours.plan_id)]
        ranks = (event.rank, self._rank)
        difference = describe_difference(texts, [self.rank_names(rank) for rank in ranks])
        return f"{self.rank_names(*ranks)} differ in call {event.call}: {difference}"

    def post_fault(self, describe: Callable[[], str]) -> None:
        """Have all ranks raise an error that says ``describe()``, unless a fault is posted."""
        if self._events.claim_fault():
            self._events.post(FaultEvent(text=describe()))

    def describe_blocked(self, event: BlockedEvent) -> str:
        """Describe a blocked rank that can never make the call in which this rank waits."""
        blocked, waiting = self.rank_names(event.rank), self.rank_names(self._rank)
        text = f"{blocked} is in {event.what}, which {waiting} has not called yet"
        text = f"{text}: {self.position()}"
        return text if BY_ALL_RANKS in text else f"{text}. {TOGETHER}"

    def rank_names(self, *ranks: int) -> str:
        """Return "rank 4" or "ranks 4, 6"."""
        numbers = ", ".join(str(self._global_ranks[rank]) for rank in ranks)
        return f"rank{'s' * (len(ranks) > 1)} {numbers}"

    def position(self) -> str:
        """Describe where this rank waits: in its last call."""
        call = self._history.num_calls - 1
        if call < 0:
            return f"{self.rank_names(self._rank)} has made no call"
        text = self._history.plan_text(self._history.entry(call).plan_id)
        return f"{self.rank_names(self._rank)} waits in call {call} ({text.splitlines()[0]})"
