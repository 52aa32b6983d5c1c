"""The numbered calls of a rank, and descriptions of differences from another rank's calls.

A text describes the plan that a call runs. Its first line names the call, such as graphs for
training, an eager gather, an optimizer's step or a choice that the first rank makes for all;
further lines list its transfers and dependencies. An error shows the first difference and its most
likely cause.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from .store import BlockedEvent, CallEvent

# Number of calls that a rank remembers. Collectives keep ranks much closer together than that.
NUM_LOGGED = 4096

TRAINING, INFERENCE = "graphs for training", "a graph for inference"
BACKWARD = "backward of"  # start of the first line, for the backward graph of graphs for training
OPTIMIZER_STEP = "a step"  # start of the first line, for a step in which ranks exchange data
# Part of the first line of an eager gather in code that Dynamo has given up compiling.
LIMIT = "the recompile limit is reached"

# Start of the first line of a choice that is made again because this rank can use no earlier one.
CHOICE_AGAIN = "another choice"

# Part of the first line of a call that DDP scripts make on the first rank only, such as saving.
BY_ALL_RANKS = "which all ranks have to call"

MAX_SHOWN = 160  # characters of a line in an error, around its first difference

SAME_GRAPHS = (
    "All ranks must run the same graphs in the same order; a guard on a value or a shape that "
    "differs between ranks makes them compile or select different graphs"
)
CALL_TOGETHER = (
    "All ranks must call the model together and in the same mode: does one rank evaluate, or use "
    "torch.no_grad(), alone?"
)

_BACKWARD_TOGETHER = (
    "All ranks must call backward() together, and equally often: did a rank skip backward(), for "
    "example because its loss was not finite?"
)
_SAVE_TOGETHER = "Gather or save on all ranks together: each has rows of every parameter"
_STEP_TOGETHER = (
    "Call step() on all ranks, with gradients of the same parameters: did a rank set .grad to "
    "None, or skip a step?"
)
_RECOMPILE = (
    "Past torch._dynamo.config.recompile_limit, a rank runs the function uncompiled, and its "
    "gathers differ from those of its peers: compile with dynamic=True, pad batches to a few "
    "sizes, or raise the limit on all ranks"
)
_CHOOSE_AGAIN = (
    "One rank's graph exceeds the memory budget under the earlier choice: give all ranks batches "
    "of similar sizes, or set a larger schedule.memory_budget_gb"
)


class LoggedCall(NamedTuple):
    """A call that a rank has made."""

    plan_id: str
    history: int  # checksum of the plans of all calls up to this one


FORGOTTEN = LoggedCall("forgotten", 0)


class CallHistory:
    """The last calls of this rank, written by the rank's thread while its watcher reads them."""

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        self._rank, self._global_ranks = rank, global_ranks  # global ranks only for messages
        self.num_calls = 0  # also the number of the next call
        self._checksum = 0
        self._calls = [("", 0)] * NUM_LOGGED  # plain tuples: a LoggedCall takes longer to make
        self.plan_texts: dict[str, str] = {}  # texts of known plans, keyed by id

    @property
    def last_plan_id(self) -> str:
        """Id of the plan of the last call; "" before the first."""
        return self._calls[(self.num_calls - 1) % NUM_LOGGED][0]

    def append(self, plan_id: str) -> int:
        """Log a call that runs the plan, and return its number; costs well under 1 us."""
        call = self.num_calls
        self._checksum = zlib.crc32(plan_id.encode(), self._checksum)
        self._calls[call % NUM_LOGGED] = plan_id, self._checksum
        self.num_calls = call + 1  # the watcher reads the entry only after this
        return call

    def entry(self, call: int) -> LoggedCall:
        """Return a call that this rank has made, or ``FORGOTTEN`` if it is too old."""
        if self.num_calls - call > NUM_LOGGED:
            return FORGOTTEN
        return LoggedCall(*self._calls[call % NUM_LOGGED])

    def plan_text(self, plan_id: str) -> str:
        return self.plan_texts.get(plan_id, plan_id)

    # --- messages ----------------------------------------------------------------------------

    def rank_names(self, *ranks: int) -> str:
        numbers = ", ".join(str(self._global_ranks[rank]) for rank in ranks)
        return f"rank{'s' * (len(ranks) > 1)} {numbers}"

    def position(self) -> str:
        call, name = self.num_calls - 1, self.rank_names(self._rank)
        if call < 0:
            return f"{name} has made no call"
        text = self.plan_text(self.entry(call).plan_id)
        return f"{name} waits in call {call} ({text.splitlines()[0]})"

    def describe_difference(self, event: CallEvent, their_text: str) -> str:
        ranks = (event.rank, self._rank)
        texts = [their_text, self.plan_text(self.entry(event.call).plan_id)]
        difference = describe_difference(texts, [self.rank_names(rank) for rank in ranks])
        return f"{self.rank_names(*ranks)} differ in call {event.call}: {difference}"

    def describe_deadlock(self, event: BlockedEvent) -> str:
        """Describe a deadlock: a blocked rank can never make the call in which this rank waits."""
        blocked, waiting = self.rank_names(event.rank), self.rank_names(self._rank)
        text = f"{blocked} is in {event.what}, which {waiting} has not called yet"
        text = f"{text}: {self.position()}"
        return text if BY_ALL_RANKS in text else f"{text}. {CALL_TOGETHER}"


def describe_difference(texts: Sequence[str], names: Sequence[str]) -> str:
    """Describe how the calls of two ranks differ, and the likely cause."""
    ours, theirs = (text.splitlines() or ["nothing"] for text in texts)
    if ours == theirs:
        return f"in an earlier call they ran different plans. {SAME_GRAPHS}"
    if ours[0] == theirs[0]:
        what = f"both call {ours[0]}, but {_first_difference(ours, theirs, names)}"
    else:
        what = f"{names[0]} calls {ours[0]}, {names[1]} calls {theirs[0]}"
    return f"{what}. {_cause(ours[0], theirs[0])}"


def _cause(ours: str, theirs: str) -> str:
    heads = (ours, theirs)
    if any(head.startswith(OPTIMIZER_STEP) for head in heads):
        return _STEP_TOGETHER
    if any(head.startswith(CHOICE_AGAIN) for head in heads):
        return _CHOOSE_AGAIN
    if any(BY_ALL_RANKS in head for head in heads):
        return _SAVE_TOGETHER
    if any(LIMIT in head for head in heads):
        return _RECOMPILE
    if any(head.startswith(BACKWARD) for head in heads) and ours != theirs:
        return _BACKWARD_TOGETHER
    if any(INFERENCE in head for head in heads) and any(TRAINING in head for head in heads):
        return CALL_TOGETHER
    return SAME_GRAPHS


def _first_difference(ours: Sequence[str], theirs: Sequence[str], names: Sequence[str]) -> str:
    """Describe the first lines that only one rank has, or else the first that are out of order.

    The two lines are of the same kind if there are such lines.
    """
    only = [[line for line in a if line not in set(b)] for a, b in ((ours, theirs), (theirs, ours))]
    if not any(only):
        pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
        only = [list(side) for side in zip(*(pair for pair in pairs if pair[0] != pair[1]))]
    else:
        of_kind = {_kind(line): line for line in reversed(only[1])}
        pairs_of_kind = ([[a], [of_kind[_kind(a)]]] for a in only[0] if _kind(a) in of_kind)
        only = next(pairs_of_kind, only)
    shown = _excerpts(*(side[0].strip() if side else "nothing more" for side in only))
    return f"{shown[0]} ({names[0]}) differs from {shown[1]} ({names[1]})"


def _kind(line: str) -> str:
    return line.strip().partition(" ")[0]  # such as "all_gather"


def _excerpts(ours: str, theirs: str) -> list[str]:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs)))
    start = max(0, same - MAX_SHOWN // 2)
    return [_excerpt(line, start) for line in (ours, theirs)]


def _excerpt(line: str, start: int) -> str:
    if len(line) <= MAX_SHOWN:
        return line
    end = start + MAX_SHOWN
    return ("..." if start else "") + line[start:end] + ("..." if end < len(line) else "")
