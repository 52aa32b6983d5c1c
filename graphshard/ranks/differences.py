"""Describe to a user how the calls of two ranks differ.

Each call is posted as a text. Its first line says what is called: graphs for training, a graph for
inference, an eager gather, an optimizer's step. The lines that follow list what is gathered and
reduced. An error shows the first difference and its most likely cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

TRAINING, INFERENCE = "graphs for training", "a graph for inference"
OPTIMIZER_STEP = "a step"
"""Start of the first line for an optimizer's step in which ranks exchange data."""
LIMIT = "the recompile limit is reached"
"""Part of the first line of an eager gather in code that Dynamo has given up compiling."""

ANEW = "a choice anew"
"""Start of the first line of a choice that has to be made again: no earlier one serves."""

BY_ALL_RANKS = "which all ranks have to call"
"""Part of the first line of a call that DDP scripts make on the first rank only, such as saving."""

MAX_SHOWN = 160
"""Largest number of characters that an error shows of a line, around its first difference."""

ADVICE = (
    "All ranks must run the same graphs in the same order; a guard on a value or a shape that "
    "differs between ranks makes them compile, or choose, different ones"
)
TOGETHER = (
    "All ranks must call the model together and in one mode: evaluation on some ranks alone, or "
    "torch.no_grad() on some?"
)

_SAVE_TOGETHER = "Every rank has rows of every parameter, so all of them have to take part"
_STEP_TOGETHER = (
    "All ranks must step together, with gradients of the same parameters: did some set .grad to "
    "None, or leave out a step?"
)
_RECOMPILE = (
    "Where Dynamo meets more shapes or values than torch._dynamo.config.recompile_limit allows, a "
    "rank stops compiling, and its gathers are other ones than those of its peers: compile with "
    "dynamic=True, pad batches to a few sizes, or raise the limit on all ranks"
)
_ANEW = (
    "Its graph exceeds the memory budget by what was chosen before, and theirs does not: give all "
    "ranks batches of about one size, or raise schedule.memory_budget_gb"
)


def describe_difference(texts: Sequence[str], names: Sequence[str]) -> str:
    """Describe how the calls of two ranks differ, and the likely cause.

    Args:
        texts: what each rank calls.
        names: names of the two ranks, such as "rank 3".
    """
    ours, theirs = (text.splitlines() or ["nothing"] for text in texts)
    if ours == theirs:
        return f"in an earlier call they ran different plans. {ADVICE}"
    if ours[0] == theirs[0]:
        what = f"both call {ours[0]}: first, {_first_difference(ours, theirs, names)}"
    else:
        what = f"{names[0]} calls {ours[0]}, {names[1]} calls {theirs[0]}"
    return f"{what}. {_cause(ours[0], theirs[0])}"


def _cause(ours: str, theirs: str) -> str:
    """Return the likely cause of a difference, given the first lines of both calls."""
    heads = (ours, theirs)
    if any(head.startswith(OPTIMIZER_STEP) for head in heads):
        return _STEP_TOGETHER
    if any(head.startswith(ANEW) for head in heads):
        return _ANEW
    if any(BY_ALL_RANKS in head for head in heads):
        return _SAVE_TOGETHER
    if any(LIMIT in head for head in heads):
        return _RECOMPILE
    if any(INFERENCE in head for head in heads) and any(TRAINING in head for head in heads):
        return TOGETHER
    return ADVICE


def _first_difference(ours: Sequence[str], theirs: Sequence[str], names: Sequence[str]) -> str:
    """Describe the first line that only one rank has, or else the first that is out of order."""
    only = [[line for line in a if line not in set(b)] for a, b in ((ours, theirs), (theirs, ours))]
    if not any(only):
        pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
        only = [list(side) for side in zip(*(pair for pair in pairs if pair[0] != pair[1]))]
    shown = _excerpts(*(side[0].strip() if side else "nothing more" for side in only))
    return f"{shown[0]} ({names[0]}) and {shown[1]} ({names[1]})"


def _excerpts(ours: str, theirs: str) -> list[str]:
    """Return both lines; long ones are cut to the part around their first difference."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs)))
    start = max(0, same - MAX_SHOWN // 2)
    return [_excerpt(line, start) for line in (ours, theirs)]


def _excerpt(line: str, start: int) -> str:
    if len(line) <= MAX_SHOWN:
        return line
    end = start + MAX_SHOWN
    return ("..." if start else "") + line[start:end] + ("..." if end < len(line) else "")
