"""The bytes that are alive in each step of a graph: spans of steps, and their sum by step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes that are alive in steps ``[begin, end)``; an empty range holds none."""

    begin: int
    end: int
    num_bytes: int


def bytes_by_step(spans: Iterable[Span], num_steps: int) -> list[int]:
    """Return, for each of ``num_steps`` steps, the bytes of all spans that include it."""
    change = [0] * (num_steps + 1)
    for span in spans:
        if span.begin < span.end:
            change[span.begin] += span.num_bytes
            change[span.end] -= span.num_bytes
    return list(accumulate(change))[:num_steps]
