"""What was decided for one graph, and from what: frozen, made by pure functions, saved as JSON.

A ``Problem`` is a graph as steps of compute and as what has to travel. A *step* is a run of compute
between two points where communication may have to be waited for or may begin: in front of the first
use of a gathered parameter, and behind the node that completes a gradient. A ``Plan`` says in launch
order which collective serves which transfers, before which step it is launched, and before which it
is waited for.

    nodes   a   b   mm(w)   c   d   mm(v)   dw   e            steps   [a b] [mm(w) c d] [mm(v) dw] [e]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from ..kinds import HOST_COPIES, GraphKind, TransferKind

_Made = TypeVar("_Made")
VERSION = 6
"""Of the JSON form."""


@dataclass(frozen=True)
class PlanParam:
    """One sharded parameter as a graph takes it.

    Attributes:
        input: its position among the graph's original inputs (as Dynamo passes them).
        shape: full shape; ``dtype`` is that of the shard.
        padded_rows: the dim-0 size of the leaf, None if replicated.
        fqn: name in the sharded module, filled in when a plan is shown.
    """

    input: int
    shape: tuple[int, ...]
    dtype: str
    padded_rows: int | None
    fqn: str = ""


@dataclass(frozen=True)
class Transfer:
    """One parameter that a graph gathers, one gradient that it reduces, or one activation that it copies.

    Attributes:
        param: position in ``Plan.params``; None of what is reduced for several at once.
        kind: all_gather, reduce_scatter, all_reduce or all_reduce_max; of an activation, one of the copies.
        num_bytes: of the full tensor as it travels, padding included.
        dtype: on the wire.
        shard_bytes: of this rank's shard, as it is kept.
        casts: another dtype travels than is there.
        group: name of the process group; ``world`` its size, ``stride`` from one of its ranks to the next.
        replicas: the group over which a reduced shard is averaged once more, of so many ranks
            (``num_replicas``), so far apart (``replica_stride``); "": none.
        ready: the first step before which it can be launched; 0 for a gather without a scale.
        due: the step before which it has to be waited for at last; the number of steps for a
            gradient that only leaves the graph.
        last: the last step that uses the result.
        host: the shard is kept in the host's memory, and so is the reduced gradient.
    """

    param: int | None
    kind: TransferKind
    num_bytes: int
    dtype: str
    shard_bytes: int
    casts: bool
    group: str
    world: int
    ready: int
    due: int
    last: int
    stride: int = 1
    replicas: str = ""
    num_replicas: int = 1
    replica_stride: int = 1
    host: bool = False


@dataclass(frozen=True)
class Problem:
    """A graph to be scheduled.

    Attributes:
        graph: forward, backward or inference.
        steps: name of the first node of every step.
        compute_us: predicted time of every step.
        other_bytes: what is alive in every step whatever the schedule: activations, inputs (the
            shards among them), results.
        transfers: in graph order.
    """

    graph: GraphKind
    steps: tuple[str, ...]
    compute_us: tuple[float, ...]
    other_bytes: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def num_steps(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Bucket:
    """Transfers of one kind that travel in one collective.

    Attributes:
        buffers: positions in ``Problem.transfers``. What is in one parcel is copied into a buffer
            and out of it again; one alone travels as it is.
        num_bytes: of all full tensors.
        launch: issued before this step; ``wait``: waited for before that one.
        stride: as in ``Transfer``.
    """

    kind: TransferKind
    buffers: tuple[tuple[int, ...], ...]
    num_bytes: int
    group: str
    world: int
    launch: int
    wait: int
    stride: int = 1

    @property
    def transfers(self) -> tuple[int, ...]:
        return tuple(i for parcel in self.buffers for i in parcel)


def replica_bucket(bucket: Bucket, transfers: Sequence[Transfer]) -> Bucket | None:
    """What averages the shards that ``bucket`` reduces over their replicas, if there are any: it is
    launched where that is waited for, and sends the buffers that it left.

    Args:
        transfers: of the problem.
    """
    of = [transfers[i] for i in bucket.transfers]
    first = of[0]
    if bucket.kind != TransferKind.REDUCE_SCATTER or not first.replicas:
        return None
    return dataclasses.replace(
        bucket,
        kind=TransferKind.ALL_REDUCE_SHARDS,
        num_bytes=sum(transfer.num_bytes // transfer.world for transfer in of),
        group=first.replicas,
        world=first.num_replicas,
        stride=first.replica_stride,
        launch=bucket.wait,
    )


def events_by_step(num_steps: int, buckets: Sequence[Bucket]) -> list[list[tuple[int, bool]]]:
    """What happens before every step and at the end, in order: a bucket, and whether it is waited for
    or launched. Launches come first, in the order of ``buckets``; but what another bucket goes on with
    is waited for in front of that."""
    found: list[list[tuple[int, bool]]] = [[] for _ in range(num_steps + 1)]
    after = next_in_chain(buckets)
    before = {then: first for first, then in after.items()}
    for i, bucket in enumerate(buckets):
        if i in before:
            found[bucket.launch].append((before[i], True))
        found[bucket.launch].append((i, False))
    for i, bucket in enumerate(buckets):
        if i not in after:
            found[bucket.wait].append((i, True))
    return found


_CHAIN = (
    TransferKind.COPY_TO_DEVICE,
    TransferKind.ALL_GATHER,
    TransferKind.REDUCE_SCATTER,
    TransferKind.ALL_REDUCE,
    TransferKind.ALL_REDUCE_MAX,
    TransferKind.ALL_REDUCE_SHARDS,
    TransferKind.COPY_TO_HOST,
)


def next_in_chain(buckets: Sequence[Bucket]) -> dict[int, int]:
    """By position of a bucket, that of the one that takes what it leaves, where there is one: shards
    are copied to the device and gathered; reduced, averaged over replicas, and copied to the host."""
    chains: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i, bucket in enumerate(buckets):
        chains.setdefault(bucket.buffers, []).append(i)
    found: dict[int, int] = {}
    for chain in chains.values():
        found.update(pairwise(sorted(chain, key=lambda i: _CHAIN.index(buckets[i].kind))))
    return found


@dataclass(frozen=True)
class Plan:
    """All collectives of one graph.

    Attributes:
        buckets: in launch order.
        kept: positions in ``params`` of what stays gathered for backward.
        reasons: why a parameter, by position in ``params``, does not travel in a smaller dtype.
    """

    params: tuple[PlanParam, ...]
    problem: Problem
    buckets: tuple[Bucket, ...]
    kept: tuple[int, ...] = ()
    reasons: tuple[tuple[int, str], ...] = ()

    @property
    def graph(self) -> GraphKind:
        return self.problem.graph

    def count(self, kind: TransferKind) -> int:
        return sum(bucket.kind == kind for bucket in self.buckets)

    def num_bytes(self, kind: TransferKind) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets if bucket.kind == kind)

    def params_of(self, bucket: Bucket) -> list[PlanParam]:
        found = [self.problem.transfers[i].param for i in bucket.transfers]
        return [self.params[i] for i in found if i is not None]

    def fqn_of(self, transfer: Transfer) -> str:
        return "" if transfer.param is None else self.params[transfer.param].fqn

    def named(self, fqns: Sequence[str]) -> Plan:
        """The plan with parameters named; ``fqns`` by graph input."""
        params = tuple(dataclasses.replace(p, fqn=fqns[p.input]) for p in self.params)
        return dataclasses.replace(self, params=params)

    def collectives_text(self) -> str:
        """What this graph sends, as text; a line for each collective, in their order."""
        sent = [bucket for bucket in self.buckets if bucket.kind not in HOST_COPIES]
        return "\n".join([self.title(), *map(self._sent, sent)])

    def title(self) -> str:
        return f"{self.graph} of {', '.join(param.fqn for param in self.params)}"

    def _sent(self, bucket: Bucket) -> str:
        def names(parcel: Sequence[int]) -> str:
            transfers = [self.problem.transfers[i] for i in parcel]
            return " ".join(f"{self.fqn_of(t)}:{t.dtype}" for t in transfers)

        what = " | ".join(map(names, bucket.buffers))
        return f"{bucket.kind} of {bucket.num_bytes} bytes in group {bucket.group}: {what}"

    def to_json(self) -> str:
        raw = {"version": VERSION, **dataclasses.asdict(self)}
        raw["buckets"] = [_renamed(b, "buffers", "parcels") for b in raw["buckets"]]
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw: dict[str, Any] = _tuples(json.loads(text))
        if raw.get("version") != VERSION:
            raise ValueError(
                f"plan of version {raw.get('version')!r}: this graphshard reads {VERSION}; compile again"
            )
        transfers = tuple(_with_kind(Transfer, t) for t in raw["problem"].pop("transfers"))
        graph = GraphKind(raw["problem"].pop("graph"))
        return cls(
            params=tuple(PlanParam(**param) for param in raw["params"]),
            problem=Problem(graph, **raw["problem"], transfers=transfers),
            buckets=tuple(
                _with_kind(Bucket, _renamed(b, "parcels", "buffers")) for b in raw["buckets"]
            ),
            kept=raw["kept"],
            reasons=raw["reasons"],
        )


def _renamed(raw: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """``raw`` in its order; in files the buffers of a bucket are called parcels."""
    return {new if key == old else key: value for key, value in raw.items()}


def _with_kind(cls: Callable[..., _Made], raw: dict[str, Any]) -> _Made:
    return cls(**{**raw, "kind": TransferKind(raw["kind"])})


def _tuples(value: Any) -> Any:
    """JSON's lists, on every level, as tuples."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
