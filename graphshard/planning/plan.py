"""The data of this room: a ``Problem`` that a graph poses, and the ``Plan`` that solves it.

A ``Problem`` describes a graph as steps of compute and as transfers. A *step* is a run of compute
between two points where communication may have to be waited for or may begin: before the first use
of a gathered parameter, and after the node that completes a gradient. A ``Plan`` lists buckets in
launch order, each with the step before which it is launched and the one before which it is waited
for. Everything is frozen, made by pure functions, and saved as JSON.

    nodes   a   b   mm(w)   c   d   mm(v)   dw   e      steps   [a b] [mm(w) c d] [mm(v) dw] [e]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from ..kinds import HOST_COPIES, GraphKind, TransferKind

_Record = TypeVar("_Record")
VERSION = 8
"""Version of the JSON form."""


@dataclass(frozen=True)
class PlanParam:
    """One sharded parameter as a graph takes it.

    Attributes:
        input: its position among the graph's original inputs (as Dynamo passes them).
        shape: full shape.
        dtype: dtype of the shard.
        padded_rows: number of rows of the padded shard; None if the parameter is replicated.
        fqn: name in the sharded module; "" until a plan is shown (see ``Plan.named``).
    """

    input: int
    shape: tuple[int, ...]
    dtype: str
    padded_rows: int | None
    fqn: str = ""


@dataclass(frozen=True)
class Transfer:
    """One parameter that a graph gathers, gradient that it reduces, or activation that it copies.

    Attributes:
        param: position in ``Plan.params``; None for an activation, and for a reduction that serves
            several parameters at once.
        kind: all_gather, reduce_scatter, all_reduce or all_reduce_max; for an activation, one of
            ``HOST_COPIES``.
        num_bytes: bytes of the full tensor as it travels, padding included.
        dtype: wire dtype.
        shard_bytes: bytes of this rank's shard, as it is stored.
        casts: whether the wire dtype differs from that of the tensor.
        group: name of the process group; "" for an activation, as in JSON.
        world: number of ranks in ``group``.
        ready: the first step before which it can be launched; 0 for a gather without a scale.
        due: the step before which it has to be waited for at the latest; the number of steps for a
            gradient that only leaves the graph.
        last: the last step that uses the result.
        stride: difference of the global ranks of neighbours in ``group``.
        replicas: name of the group over which a reduced shard is averaged once more; "" for none,
            as in JSON.
        num_replicas: number of ranks in ``replicas``.
        replica_stride: like ``stride``, of ``replicas``.
        host: whether the home of the shard, and of the reduced gradient, is host memory.
        grad_bytes: bytes of the full gradient, before it is cast and padded; 0 of what is gathered.
        copied_in: whether it is copied to be sent also where it has a buffer of its own.
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
    grad_bytes: int = 0
    copied_in: bool = False


@dataclass(frozen=True)
class Problem:
    """A graph to be scheduled.

    Attributes:
        graph: kind of the graph.
        steps: name of the first node of every step.
        compute_us: predicted time of every step.
        other_bytes: most bytes alive in every step whatever the schedule: activations, inputs (the
            shards among them), results; less the full parameters that are free by then.
        between_bytes: those that are alive in front of every step, and at the graph's end.
        transfers: everything that travels, in graph order.
        copies_sent: whether the backend copies what it reduces until that is waited for.
    """

    graph: GraphKind
    steps: tuple[str, ...]
    compute_us: tuple[float, ...]
    other_bytes: tuple[int, ...]
    between_bytes: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    copies_sent: bool = False

    @property
    def num_steps(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Bucket:
    """Transfers of one kind that travel in one collective.

    Attributes:
        kind: kind of its transfers, or of what is done with their shards (``ALL_REDUCE_SHARDS``,
            ``HOST_COPIES``).
        buffers: positions in ``Problem.transfers``, by buffer. Transfers of one buffer are copied
            into it and out again; one alone is copied only if it has to be cast or padded.
        num_bytes: bytes of all full tensors together.
        group, world, stride: as in ``Transfer``.
        launch: the step before which it is launched.
        wait: the step before which it is waited for.
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
        return tuple(i for buffer in self.buffers for i in buffer)


def bucket_of(
    problem: Problem, buffers: tuple[tuple[int, ...], ...], *, launch: int, wait: int
) -> Bucket:
    """Return the bucket that carries the transfers of ``buffers``, which are alike."""
    first = problem.transfers[buffers[0][0]]
    return Bucket(
        kind=first.kind,
        buffers=buffers,
        num_bytes=sum(problem.transfers[i].num_bytes for buffer in buffers for i in buffer),
        group=first.group,
        world=first.world,
        launch=launch,
        wait=wait,
        stride=first.stride,
    )


def is_copied_in(buffer: Sequence[Transfer]) -> bool:
    """Return whether what a buffer sends is a copy."""
    return len(buffer) > 1 or buffer[0].copied_in


def replica_bucket(bucket: Bucket, transfers: Sequence[Transfer]) -> Bucket | None:
    """Return the all-reduce of the shards that ``bucket`` reduces, over their replicas.

    It is launched where ``bucket`` is waited for, on the buffers that this leaves. None if there
    are no replicas.

    Args:
        transfers: those of the problem.
    """
    reduced = [transfers[i] for i in bucket.transfers]
    first = reduced[0]
    if bucket.kind != TransferKind.REDUCE_SCATTER or not first.replicas:
        return None
    return dataclasses.replace(
        bucket,
        kind=TransferKind.ALL_REDUCE_SHARDS,
        num_bytes=sum(transfer.num_bytes // transfer.world for transfer in reduced),
        group=first.replicas,
        world=first.num_replicas,
        stride=first.replica_stride,
        launch=bucket.wait,
    )


class BucketEvent(NamedTuple):
    """The launch of a bucket, or the wait for it.

    Attributes:
        bucket: position among the buckets of the plan.
    """

    bucket: int
    is_wait: bool


def events_by_step(num_steps: int, buckets: Sequence[Bucket]) -> list[list[BucketEvent]]:
    """Return the events before every step, in order; the last list holds those at the graph's end.

    Launches come before waits, in the order of ``buckets``. A bucket that another one continues
    (see ``next_in_chain``) is an exception: its wait comes right before the launch of the other.
    """
    events: list[list[BucketEvent]] = [[] for _ in range(num_steps + 1)]
    successors = next_in_chain(buckets)
    predecessors = {successor: i for i, successor in successors.items()}
    for i, bucket in enumerate(buckets):
        if i in predecessors:
            events[bucket.launch].append(BucketEvent(predecessors[i], is_wait=True))
        events[bucket.launch].append(BucketEvent(i, is_wait=False))
    for i, bucket in enumerate(buckets):
        if i not in successors:
            events[bucket.wait].append(BucketEvent(i, is_wait=True))
    return events


_CHAIN = (
    TransferKind.COPY_TO_DEVICE,
    TransferKind.ALL_GATHER,
    TransferKind.REDUCE_SCATTER,
    TransferKind.ALL_REDUCE,
    TransferKind.ALL_REDUCE_MAX,
    TransferKind.ALL_REDUCE_SHARDS,
    TransferKind.COPY_TO_HOST,
)
"""The order in which buckets with the same buffers follow each other."""


def next_in_chain(buckets: Sequence[Bucket]) -> dict[int, int]:
    """Return, by position of a bucket, the position of the one that continues with its buffers.

    Shards are copied to the device, then gathered; gradients are reduced, then averaged over
    replicas, then copied to the host. The last bucket of a chain is not among the keys.
    """
    chains: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i, bucket in enumerate(buckets):
        chains.setdefault(bucket.buffers, []).append(i)
    successors: dict[int, int] = {}
    for chain in chains.values():
        successors.update(pairwise(sorted(chain, key=lambda i: _CHAIN.index(buckets[i].kind))))
    return successors


def in_launch_order(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return ``buckets`` by launch; those of one step stay in their order."""
    return tuple(sorted(buckets, key=lambda bucket: bucket.launch))


@dataclass(frozen=True)
class Regions:
    """Parts of a graph that are alike and compiled once, counted.

    Attributes:
        num_forms: of subgraphs that are compiled.
        num_calls: of them in the graph.
        num_nodes: of the graph that lie in a region.
        num_compiled: nodes of the subgraphs.
        num_lost_fusions: kernels that are more because nothing fuses across a region's border.
    """

    num_forms: int = 0
    num_calls: int = 0
    num_nodes: int = 0
    num_compiled: int = 0
    num_lost_fusions: int = 0


@dataclass(frozen=True)
class Plan:
    """All collectives and host copies of one graph.

    Attributes:
        buckets: in launch order.
        kept: positions in ``params`` of the parameters that stay unsharded for backward.
        reasons: pairs of a position in ``params`` and the reason why that parameter does not travel
            in a smaller dtype.
        regions: of the lowered graph.
    """

    params: tuple[PlanParam, ...]
    problem: Problem
    buckets: tuple[Bucket, ...]
    kept: tuple[int, ...] = ()
    reasons: tuple[tuple[int, str], ...] = ()
    regions: Regions = Regions()

    @property
    def graph(self) -> GraphKind:
        return self.problem.graph

    def count(self, kind: TransferKind) -> int:
        return sum(bucket.kind == kind for bucket in self.buckets)

    def num_bytes(self, kind: TransferKind) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets if bucket.kind == kind)

    def params_of(self, bucket: Bucket) -> list[PlanParam]:
        """Return the parameters that ``bucket`` carries, in its order."""
        positions = [self.problem.transfers[i].param for i in bucket.transfers]
        return [self.params[i] for i in positions if i is not None]

    def wire_dtypes(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the dtypes in which the transfers of ``bucket`` travel, each once: "bfloat16".

        Transfers of a gather may differ. What differs, or what a backend may refuse, such as fp8,
        is sent as its bytes. Host copies of shards have the dtype of the shards.
        """
        transfers = (self.problem.transfers[i] for i in bucket.transfers)
        dtypes = (
            self.params[t.param].dtype
            if bucket.kind in HOST_COPIES and t.param is not None
            else t.dtype
            for t in transfers
        )
        return tuple(dict.fromkeys(dtype.removeprefix("torch.") for dtype in dtypes))

    def fqn_of(self, transfer: Transfer) -> str:
        """Return the name of the parameter of ``transfer``; "" where it has none."""
        return "" if transfer.param is None else self.params[transfer.param].fqn

    def named(self, fqns: Sequence[str]) -> Plan:
        """Return the plan with names of parameters; ``fqns`` holds them by graph input."""
        params = tuple(dataclasses.replace(p, fqn=fqns[p.input]) for p in self.params)
        return dataclasses.replace(self, params=params)

    def collectives_text(self) -> str:
        """Return the collectives as text, a line for each, in launch order."""
        collectives = [bucket for bucket in self.buckets if bucket.kind not in HOST_COPIES]
        return "\n".join([f"{self.graph} graph", *map(self._bucket_text, collectives)])

    def _bucket_text(self, bucket: Bucket) -> str:
        def names(buffer: Sequence[int]) -> str:
            transfers = [self.problem.transfers[i] for i in buffer]
            return " ".join(f"{self.fqn_of(t)}:{t.dtype}" for t in transfers)

        buffers = " | ".join(map(names, bucket.buffers))
        return f"{bucket.kind} of {bucket.num_bytes} bytes in group {bucket.group}: {buffers}"

    def to_json(self) -> str:
        raw = {"version": VERSION, **dataclasses.asdict(self)}
        raw["buckets"] = [_rename_key(b, "buffers", "parcels") for b in raw["buckets"]]
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan of ``to_json``.

        Raises:
            ValueError: ``text`` is of another version.
        """
        raw: dict[str, Any] = _as_tuples(json.loads(text))
        if raw.get("version") != VERSION:
            raise ValueError(
                f"plan of version {raw.get('version')!r}: this graphshard reads {VERSION}; "
                "compile again"
            )
        transfers = tuple(_with_kind(Transfer, t) for t in raw["problem"].pop("transfers"))
        graph = GraphKind(raw["problem"].pop("graph"))
        return cls(
            params=tuple(PlanParam(**param) for param in raw["params"]),
            problem=Problem(graph, **raw["problem"], transfers=transfers),
            buckets=tuple(
                _with_kind(Bucket, _rename_key(b, "parcels", "buffers")) for b in raw["buckets"]
            ),
            kept=raw["kept"],
            reasons=raw["reasons"],
            regions=Regions(**raw["regions"]),
        )


def _rename_key(raw: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return ``raw`` with a key renamed, in its place.

    Files call a bucket's buffers ``parcels``, as they did before the code had this word for them.
    """
    return {new if key == old else key: value for key, value in raw.items()}


def _with_kind(cls: Callable[..., _Record], raw: dict[str, Any]) -> _Record:
    """Build a record whose kind is a string in ``raw``."""
    return cls(**{**raw, "kind": TransferKind(raw["kind"])})


def _as_tuples(value: Any) -> Any:
    """Return a JSON value with lists, on every level, as tuples."""
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
