"""Find parameters with fewer rows than shards whose padding takes notable memory.

Parameters are split by rows, and all shards are padded to the size of the largest. If 8 experts are
stacked in one parameter, each of 64 ranks holds the memory of one expert: 8 times an even share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .sharded_param import ShardedParam

NOTABLE, LEAST_BYTES = 0.1, 1e6
"""Fraction of an even share, and bytes on a rank, above which padding is reported.

Chosen by judgement, not measured.
"""


@dataclass(frozen=True)
class Padding:
    """Padded parameters of a model.

    Attributes:
        names: parameters with fewer rows than shards, largest first.
        rows: number of rows of the largest one.
        shards: number of ranks that share a parameter.
        held_bytes: bytes of parameters on a rank, with padding.
        even_bytes: bytes of parameters on a rank, without padding.
    """

    names: tuple[str, ...]
    rows: int
    shards: int
    held_bytes: float
    even_bytes: float

    def __str__(self) -> str:
        first, others = self.names[0], len(self.names) - 1
        who = f"{first} has" if not others else f"{first} and {others} more parameters have"
        return (
            f"{who} fewer rows ({self.rows}) than the {self.shards} ranks that share them: a rank "
            f"holds {self.held_bytes / 1e6:,.0f} MB of parameters, "
            f"{self.held_bytes / self.even_bytes:.3g} times the even share of "
            f"{self.even_bytes / 1e6:,.0f} MB"
        )

    def splits_evenly(self, num_ranks: int) -> bool:
        """Return whether HSDP with ``rows`` shards per replica would avoid this padding."""
        return self.rows > 1 and num_ranks % self.rows == 0


def find_padding(
    shapes: Mapping[str, Sequence[int]], shards: int, held_bytes: float, full_bytes: float
) -> Padding | None:
    """Return the padded parameters, or None if padding takes little memory.

    Args:
        shapes: full shapes of the parameters that are split by rows, by name.
        shards: number of ranks that share each parameter.
        held_bytes: bytes of these parameters on a rank, with padding.
        full_bytes: bytes of the full parameters.
    """
    padded = {name: shape for name, shape in shapes.items() if 0 < shape[0] < shards}
    even_bytes = full_bytes / shards
    if not padded or held_bytes - even_bytes < max(NOTABLE * even_bytes, LEAST_BYTES):
        return None
    names = sorted(padded, key=lambda name: math.prod(padded[name]), reverse=True)
    return Padding(tuple(names), padded[names[0]][0], shards, held_bytes, even_bytes)


def padding_advice(sharded_params: Collection[ShardedParam]) -> str:
    """Return a description of notable padding with a remedy, or "" if padding takes little.

    Args:
        sharded_params: parameters of one model, sharded over one mesh.
    """
    split = {param.fqn: param.layout for param in sharded_params if param.layout.rows is not None}
    if not split:
        return ""
    sizes = {param.fqn: param.shard.element_size() for param in sharded_params}
    held_bytes = sum(sizes[fqn] * layout.padded_shape.numel() for fqn, layout in split.items())
    full_bytes = sum(sizes[fqn] * layout.shape.numel() for fqn, layout in split.items())
    groups = next(iter(split.values())).groups
    shapes = {fqn: layout.shape for fqn, layout in split.items()}
    padding = find_padding(shapes, groups.num_shards, held_bytes, full_bytes)
    return "" if padding is None else f"{padding}. {_remedy(padding, groups.mesh.size())}"


def _remedy(padding: Padding, num_ranks: int) -> str:
    if padding.rows == 1:
        overrides = {padding.names[0]: {"shard": False}}
        return f"With overrides={overrides} a rank holds as much of it, and gathers nothing"
    evenly = "A parameter for each of its rows, as in nn.ParameterList, would be split evenly"
    if not padding.splits_evenly(num_ranks):
        return evenly
    shape = (num_ranks // padding.rows, padding.rows)
    return (
        f"{evenly}; on a mesh of {shape}, which is HSDP over {padding.rows} ranks, a rank holds as "
        "much of it, and no padding is sent"
    )
