"""Run a case, and find a smaller case that fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace

from tests import ranks
from tests.numerics.fuzz.case import Block, Case
from tests.numerics.fuzz.modules import WRAPPERS
from tests.numerics.fuzz.plain import run_unsharded
from tests.numerics.fuzz.trial import run_trial

TIMEOUT_S = 100.0
MAX_TRIES = 60


def failure(case: Case, trial: Callable[[Case], object] = run_trial) -> str | None:
    """Return the text of a case's first error, or None if it passes."""
    try:
        ranks.run(case.world_size, trial, case, timeout_s=TIMEOUT_S)
    except ranks.RankError as error:
        return error.failures[0].text
    return None


def fails_unsharded(case: Case, text: str) -> bool:
    """Return whether plain ``torch.compile`` fails on the case in the same way."""
    unsharded = failure(case, run_unsharded)
    return unsharded is not None and _same_cause(headline(unsharded), headline(text))


def headline(text: str) -> str:
    """Return up to 300 characters of the line that names the exception, or of the first line."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|Unsupported)", line)
    ]
    return (errors or lines or [text])[0][:300]


def _same_cause(one: str, other: str) -> bool:
    words = [re.sub(r"[\d.e+-]+|rank|blocks\S*", "", line)[:40] for line in (one, other)]
    return words[0] == words[1]


def shrink(case: Case, line: str) -> Case:
    """Return the smallest case found in `MAX_TRIES` runs that fails with the headline `line`."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(case):
            tries += 1
            if tries > MAX_TRIES:
                return case
            text = failure(candidate)
            if text is not None and _same_cause(headline(text), line):
                case, smaller = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield variants of the case with one part removed or one field reset to its default."""
    for blocks in _fewer(case.blocks):
        yield replace(case, blocks=blocks)
    for field in fields(case):
        value = getattr(case, field.name)
        if field.default is not MISSING and value != field.default:
            yield replace(case, **{field.name: field.default})
            if isinstance(value, tuple):
                for i in range(len(value)):
                    if len(value) > 1 and field.name != "mesh":
                        yield replace(case, **{field.name: value[:i] + value[i + 1 :]})


def _fewer(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    """Yield the blocks with one removed, at any depth, or replaced by the blocks nested in it."""
    for i, block in enumerate(blocks):
        yield (*blocks[:i], *blocks[i + 1 :])
        if block[0] in WRAPPERS:
            yield (*blocks[:i], *block[1:], *blocks[i + 1 :])
            for inner in _fewer(block[1:]):
                if inner:
                    yield (*blocks[:i], (block[0], *inner), *blocks[i + 1 :])
