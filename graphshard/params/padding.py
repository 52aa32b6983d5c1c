"""Finds parameters with fewer rows than ranks that share them, where their padding takes much.

A parameter is split by rows, and each rank has room for as many as the one with most. Of 8 experts
that are stacked in one parameter, 64 ranks hold one expert each, 8 times what an even share is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GB = 1e9
NOTABLE = 0.1
"""Part of an even share that padding may add before it is told of. Judged."""


@dataclass(frozen=True)
class Padding:
    """The padded parameters of a model.

    Attributes:
        names: of those with fewer rows than ranks, the largest first.
        rows: of the largest one.
        shards: number of ranks that share a parameter.
        held_bytes: of parameters on a rank.
        even_bytes: that it would hold without padding.
    """

    names: tuple[str, ...]
    rows: int
    shards: int
    held_bytes: float
    even_bytes: float

    def __str__(self) -> str:
        return (
            f"{len(self.names)} parameters have fewer rows than the {self.shards} ranks that share "
            f"them, such as {self.names[0]} with {self.rows}: a rank holds "
            f"{self.held_bytes / GB:.2f} GB of parameters where an even share is "
            f"{self.even_bytes / GB:.2f} GB"
        )

    def splits_evenly(self, num_ranks: int) -> bool:
        """Return whether HSDP over as many ranks as there are rows would send no padding."""
        return self.rows > 1 and num_ranks % self.rows == 0


def find_padding(
    shapes: Mapping[str, Sequence[int]], shards: int, held_bytes: float, full_bytes: float
) -> Padding | None:
    """Return what padding takes; None where it is little.

    Args:
        shapes: of the parameters that are split by rows, by name.
        shards: number of ranks that share them.
        held_bytes: of parameters on a rank.
        full_bytes: of the full parameters.
    """
    padded = {name: shape for name, shape in shapes.items() if 0 < shape[0] < shards}
    even_bytes = full_bytes / shards
    if not padded or held_bytes < (1 + NOTABLE) * even_bytes:
        return None
    names = sorted(padded, key=lambda name: math.prod(padded[name]), reverse=True)
    return Padding(tuple(names), padded[names[0]][0], shards, held_bytes, even_bytes)
