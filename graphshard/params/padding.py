"""Memory overhead of padded shards, and advice to avoid it.

All shards are padded to the size of the largest. If 8 experts are stacked in one parameter, each of
64 ranks allocates the memory of one expert: 8 times an even share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .mesh import MeshGroups
from .param_spec import ParamSpec

# Padding is reported if it takes at least this fraction of an even share, and at least these bytes
# per rank. Judgement call, not measured.
NOTABLE, LEAST_BYTES = 0.1, 1e6


@dataclass(frozen=True)
class Padding:
    """Padding overhead of a model's shards.

    Attributes:
        names: parameters with fewer rows than shards, largest first.
        rows: number of rows of the first parameter in ``names``.
        shards: number of shards of each parameter.
        held_bytes: bytes of all split parameters on a rank, including padding.
        even_bytes: bytes of all split parameters on a rank if they were split evenly.
    """

    names: tuple[str, ...]
    rows: int
    shards: int
    held_bytes: float
    even_bytes: float

    def __str__(self) -> str:
        first, others = self.names[0], len(self.names) - 1
        what = f"{first} has fewer rows ({self.rows})"
        if others:
            more = f"{others} more parameter{'s' if others > 1 else ''}"
            what = f"{first} (rows: {self.rows}) and {more} have fewer rows"
        return (
            f"{what} than the {self.shards} ranks that share them: a rank holds "
            f"{self.held_bytes / 1e6:,.0f} MB of parameters, "
            f"{self.held_bytes / self.even_bytes:.3g} times the even share of "
            f"{self.even_bytes / 1e6:,.0f} MB"
        )


def find_padding(
    shapes: Mapping[str, Sequence[int]], shards: int, held_bytes: float, full_bytes: float
) -> Padding | None:
    """Return the padding overhead; None if it is small or no parameter has fewer rows than shards.

    Args:
        shapes: shapes of all split parameters, ``[rows, ...]``, keyed by name.
        shards: number of shards of each parameter.
        held_bytes: bytes of all shards on a rank, including padding.
        full_bytes: bytes of the full parameters.
    """
    padded = {name: shape for name, shape in shapes.items() if 0 < shape[0] < shards}
    even_bytes = full_bytes / shards
    if not padded or held_bytes - even_bytes < max(NOTABLE * even_bytes, LEAST_BYTES):
        return None
    names = sorted(padded, key=lambda name: math.prod(padded[name]), reverse=True)
    return Padding(tuple(names), padded[names[0]][0], shards, held_bytes, even_bytes)


def padding_advice(itemsizes: Mapping[ParamSpec, int]) -> str:
    """Return a description of notable padding with a remedy, or "" if there is none.

    Args:
        itemsizes: bytes per element of each parameter's shard.
    """
    by_groups: dict[MeshGroups, dict[ParamSpec, int]] = {}
    for spec, itemsize in itemsizes.items():
        if spec.rows is not None:
            by_groups.setdefault(spec.groups, {})[spec] = itemsize
    return ". ".join(filter(None, map(_advice_on_mesh, by_groups.values())))


def _advice_on_mesh(split: Mapping[ParamSpec, int]) -> str:
    held_bytes = sum(itemsize * spec.padded_shape.numel() for spec, itemsize in split.items())
    full_bytes = sum(itemsize * spec.unsharded_shape.numel() for spec, itemsize in split.items())
    groups = next(iter(split)).groups
    shapes = {spec.fqn: spec.unsharded_shape for spec in split}
    padding = find_padding(shapes, groups.num_shards, held_bytes, full_bytes)
    if padding is None:
        return ""
    largest = next(spec for spec in split if spec.fqn == padding.names[0])
    return f"{padding}. {_remedy(padding, largest)}"


def _remedy(padding: Padding, largest: ParamSpec) -> str:
    sizes = [part.stop - part.start for part in largest.tp_part]
    even = (dim for dim, size in enumerate(sizes) if size % padding.shards == 0)
    if (dim := next(even, None)) is not None:
        return f"overrides={{{padding.names[0]!r}: {{'dim': {dim}}}}} splits it evenly"
    if padding.rows == 1:
        overrides = {padding.names[0]: {"shard": False}}
        return f"overrides={overrides} takes no more memory on a rank, and avoids the gather"
    return "One parameter per row, as in nn.ParameterList, would need less padding"
