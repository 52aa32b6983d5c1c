"""What was decided for one graph: frozen, made by pure functions, saved as JSON.

A ``Plan`` says which sharded parameters a graph takes and, in launch order, which collective serves
which of them. Passes decide a plan, then a small rewrite applies it, then ``verify`` checks it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"

PLANNED = "graphshard_planned"
"""Key in ``node.meta`` of what a rewrite inserted for a plan."""


@dataclass(frozen=True)
class ShardedParam:
    """One sharded parameter as a graph takes it.

    Attributes:
        input: its position among the graph's original inputs (as Dynamo passes them).
        shape: full shape; ``padded_rows`` is the dim-0 size of the leaf, None if replicated.
        fqn: name in the sharded module, filled in when a plan is shown.
    """

    input: int
    shape: tuple[int, ...]
    dtype: str
    padded_rows: int | None
    fqn: str = ""


@dataclass(frozen=True)
class Bucket:
    """One collective.

    Attributes:
        kind: all_gather, reduce_scatter or all_reduce.
        params: positions in ``Plan.params`` of what travels in it.
        num_bytes: size of the full buffer (gathered output, or input of the reduction).
        group: name of the process group; ``world`` its size.
    """

    kind: str
    params: tuple[int, ...]
    num_bytes: int
    group: str
    world: int


@dataclass(frozen=True)
class Plan:
    """All collectives of one graph, in launch order."""

    graph: str
    params: tuple[ShardedParam, ...]
    buckets: tuple[Bucket, ...]

    def count(self, kind: str) -> int:
        return sum(bucket.kind == kind for bucket in self.buckets)

    def num_bytes(self, kind: str) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets if bucket.kind == kind)

    def named(self, fqns: Sequence[str]) -> Plan:
        """The plan with parameters named; ``fqns`` by graph input."""
        params = tuple(dataclasses.replace(p, fqn=fqns[p.input]) for p in self.params)
        return dataclasses.replace(self, params=params)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw: dict[str, Any] = json.loads(text)
        return cls(
            graph=raw["graph"],
            params=tuple(ShardedParam(**_tuples(p)) for p in raw["params"]),
            buckets=tuple(Bucket(**_tuples(b)) for b in raw["buckets"]),
        )


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
