"""Parameters with fewer rows than ranks that share them: what their padding takes; pure.

A parameter is split by rows, and each rank has room for as many as the one with most. Of 8 experts
that are stacked in one parameter, 64 ranks hold one expert each, 8 times what an even share is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..planning.plan import PlanParam
from .recipe import Recipe
from .trace import Held

GB = 1e9
NOTABLE = 0.1
"""Part of an even share that padding may add before it is told of. Judged."""


def padding_advice(
    params: Iterable[PlanParam], held: Held, recipe: Recipe, num_gpus: int
) -> str | None:
    """Return what padded parameters take of a rank and what to do; None if it is little."""
    shards = recipe.ranks(num_gpus).shards
    padded = {p.fqn: p for p in params if p.padded_rows is not None and 0 < _rows(p) < shards}
    even = held.params_bytes / shards
    if not padded or held.parameters < (1 + NOTABLE) * even:
        return None
    largest = max(padded.values(), key=lambda param: math.prod(param.shape))
    rows = _rows(largest)
    advice = (
        f"{len(padded)} parameters have fewer rows than the {shards} ranks that share them, such "
        f"as {largest.fqn} with {rows}: a rank holds {held.parameters / GB:.2f} GB of parameters "
        f"where an even share is {even / GB:.2f} GB"
    )
    if num_gpus % rows == 0 and rows > 1:
        advice += f"; hsdp:{rows} would send no padding of it"
    return advice


def _rows(param: PlanParam) -> int:
    return param.shape[0] if param.shape else 0
