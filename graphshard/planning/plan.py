"""Data of the planner: a ``Problem``, read from a graph, and the ``Plan`` that solves it.

A ``Problem`` describes a graph as compute steps and transfers. A *step* is a run of compute between
two points where a wait may be needed or a launch becomes possible: before the first use of a
gathered parameter, after the node that completes a gradient, and where the model itself launches a
collective or waits for it. A ``Plan`` lists buckets in launch order, each with the step before
which it is launched and the step before which it is waited for. All records are frozen and can be
saved as JSON.

    nodes   a   b   mm(w)   c   d   mm(v)   dw   e      steps   [a b] [mm(w) c d] [mm(v) dw] [e]
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from ..kinds import HOST_COPIES, GraphKind, TransferKind

_Record = TypeVar("_Record")
VERSION = 9  # version of the JSON format


@dataclass(frozen=True)
class PlanParam:
    """A parameter that a graph takes as an input.

    Attributes:
        input: position among the graph's original inputs, in Dynamo's order.
        shape: shape of the gathered parameter, ``[rows, ...]``; with tensor parallelism, that of
            this rank's part.
        dtype: dtype of the shard.
        padded_rows: number of rows of the padded shard, or None for a replicated parameter.
        fqn: name in the sharded module, or "" if not yet set (see ``Plan.named``).
    """

    input: int
    shape: tuple[int, ...]
    dtype: str
    padded_rows: int | None
    fqn: str = ""


def _num_bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)  # 16 for "torch.bfloat16"
    assert digits is not None, dtype
    return int(digits.group())


@dataclass(frozen=True)
class Transfer:
    """A parameter to gather, a gradient or fp8 maxima to reduce, or an activation to copy.

    Attributes:
        param: position in ``Plan.params``, or None for an activation or a reduction for several
            parameters.
        kind: all_gather, reduce_scatter, all_reduce or all_reduce_max; one of ``HOST_COPIES`` for
            an activation.
        num_bytes: size of the full tensor in its wire dtype, including padding.
        dtype: wire dtype, from the marker (``collective_input`` in ops/marker_specs.py). A bucket
            sends its buffers in the dtypes that ``buffer_dtype`` in ops/collectives.py returns.
        shard_bytes: size of this rank's shard in its stored dtype, or of the full tensor for an
            all-reduce; 0 for an activation.
        casts: whether the wire dtype differs from the tensor's dtype.
        group: name of the process group, or "" for an activation.
        world: number of ranks in ``group``.
        ready: first step before which it can be launched; 0 for a fetch (see
            ``TransferKind.is_fetch``), unless the gather needs fp8 scales that the graph computes.
        due: last step before which it can be waited for; ``Problem.num_steps`` for a copy to the
            host, and for a gradient that the graph only returns.
        last: last step that uses the result of a fetch; the graph's last step for other kinds.
        stride: difference between the global ranks of neighbors in ``group``.
        replicas: name of the group that averages the reduced shards (HSDP), or "".
        num_replicas: number of ranks in ``replicas``.
        replica_stride: ``stride`` within ``replicas``.
        host: whether the shard and its reduced gradient live in host memory.
        grad_bytes: size of the full gradient before it is cast and padded, or of the tensor that it
            is a view of; 0 for a gather or an activation.
        copied_in: whether a copy-in is needed even without other transfers in the buffer, to pad,
            make contiguous, send as bytes, or cast (unless ``exchange_dtype`` avoids the cast).
        summed_in: dtype in which each rank sums its rows after an all-to-all, or "" if the
            collective itself reduces.
        exchange_dtype: narrower wire dtype of an exchange: an all-to-all of rows, which each rank
            then sums in ``dtype``. "" if the gradient is not narrower, or if ranks always exchange,
            as over gloo.
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
    summed_in: str = ""
    exchange_dtype: str = ""

    def exchanged(self) -> Transfer:
        narrow_bytes = self.num_bytes * _num_bits(self.exchange_dtype) // _num_bits(self.dtype)
        return dataclasses.replace(
            self,
            num_bytes=narrow_bytes,
            dtype=self.exchange_dtype,
            casts=False,
            summed_in=self.dtype,
            exchange_dtype="",
        )

    @property
    def reduced_bytes(self) -> int:
        """Size of this rank's reduced rows, including padding."""
        shard_bytes = self.num_bytes // self.world
        if not self.summed_in:
            return shard_bytes
        return shard_bytes * _num_bits(self.summed_in) // _num_bits(self.dtype)


# Fields of a transfer that may differ between ranks, with the constants that replace them in
# comparisons. The gradient of a batch of one sample, for example, may be an expanded tensor, which
# takes less memory and must be copied in.
RANK_DEPENDENT: dict[str, Any] = {
    "ready": 0,
    "due": 0,
    "last": 0,
    "stride": 1,
    "replica_stride": 1,
    "grad_bytes": 0,
    "copied_in": False,
}


@dataclass(frozen=True)
class UserCollective:
    """A collective that the model itself calls, as tensor parallelism does.

    Its launch is a separate step, and its wait begins a step. Buckets that are launched or waited
    for before the same step come first.

    Attributes:
        op: name of its operator, such as "all_reduce".
        kind: kind of transfer whose rates predict its time.
        num_bytes: size of the result or, for a reduction, of the tensors that each rank reduces.
        group, world, stride: same as in ``Transfer``; "", 1 and 1 if the graph computes the group.
        launch: step of its launch.
        wait: step that begins with its wait, or the step after ``launch`` if the operator itself
            waits; ``Problem.num_steps`` if the graph does not wait.
    """

    op: str
    kind: TransferKind
    num_bytes: int
    group: str
    world: int
    launch: int
    wait: int
    stride: int = 1

    def __str__(self) -> str:
        return f"{self.op} in group {self.group}"


@dataclass(frozen=True)
class Problem:
    """A graph to schedule.

    Attributes:
        steps: name of the first node of each step.
        compute_us: predicted time of each step.
        fixed_bytes: peak schedule-independent bytes in each step: activations, inputs (including
            shards) and results. Values that arrive by transfer are subtracted after their last
            use in the step, because transfers count them until the step ends.
        fixed_boundary_bytes: schedule-independent bytes before each step and at the graph's end.
        transfers: all transfers in graph order, copies of activations last.
        copies_sent: whether the process group's backend, like gloo, copies the data to reduce and
            holds the copy until the wait.
        user_collectives: collectives of the model itself, in launch order.
        peak_us: time of the graph's matrix products, attention and convolutions at the hardware's
            peak rates, without recomputation in backward, for the MFU; 0 if not computed.
    """

    graph: GraphKind
    steps: tuple[str, ...]
    compute_us: tuple[float, ...]
    fixed_bytes: tuple[int, ...]
    fixed_boundary_bytes: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    copies_sent: bool = False
    user_collectives: tuple[UserCollective, ...] = ()
    peak_us: float = 0.0

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def num_user_launches(self, step: int) -> int:
        """Return the number of user collectives launched before a bucket launched at ``step``."""
        return bisect_left(self.user_collectives, step, key=lambda user: user.launch)

    def after_user_launch(self, step: int) -> int:
        """Return ``step``, or the next step if a user collective is launched in ``step``."""
        # Compute often waits for a user collective at once, so no bucket should delay it.
        return step + self.num_user_launches(step + 1) - self.num_user_launches(step)


@dataclass(frozen=True)
class Bucket:
    """Transfers of one kind that share a collective or a host copy.

    Attributes:
        kind: kind of the transfers. A separate bucket that copies their shards to the device,
            averages them over replicas or copies them to the host has the kind ``COPY_TO_DEVICE``,
            ``ALL_REDUCE_SHARDS`` or ``COPY_TO_HOST``.
        buffers: positions in ``Problem.transfers``, grouped by buffer. Transfers that share a
            buffer are copied in and, if gathered, out; a transfer that is alone in its buffer is
            copied in only if it is cast or ``Transfer.copied_in`` is set.
        num_bytes: total size of the full tensors in their wire dtypes or, for a separate bucket of
            shards, of the shards.
        group, world, stride: same as in ``Transfer``.
        launch: step before which it is launched.
        wait: step before which it is waited for.
        exchanges: whether an all-to-all for each buffer replaces the reduction (see
            ``Transfer.exchange_dtype``).
    """

    kind: TransferKind
    buffers: tuple[tuple[int, ...], ...]
    num_bytes: int
    group: str
    world: int
    launch: int
    wait: int
    stride: int = 1
    exchanges: bool = False

    @property
    def transfers(self) -> tuple[int, ...]:
        return tuple(i for buffer in self.buffers for i in buffer)


def sent_buffers(transfers: Sequence[Transfer], bucket: Bucket) -> list[list[Transfer]]:
    """Return the transfers in each buffer of ``bucket``, as the bucket sends them."""
    return [
        [transfers[i].exchanged() if bucket.exchanges else transfers[i] for i in buffer]
        for buffer in bucket.buffers
    ]


@dataclass(frozen=True)
class Regions:
    """Counts of regions: repeated parts of a graph that are compiled once.

    Attributes:
        num_compiled_regions: number of distinct subgraphs, each compiled once.
        num_calls: number of calls of these subgraphs.
        num_nodes: number of graph nodes that the calls replace.
        num_compiled: number of nodes in the distinct subgraphs.
        num_lost_fusions: number of extra kernels, because nothing fuses across region boundaries.
    """

    num_compiled_regions: int = 0
    num_calls: int = 0
    num_nodes: int = 0
    num_compiled: int = 0
    num_lost_fusions: int = 0


@dataclass(frozen=True)
class Plan:
    """The collectives and host copies that graphshard adds to one graph.

    Attributes:
        params: parameters of the graph, in the order of its inputs.
        problem: problem that the plan solves.
        buckets: buckets in launch order.
        kept: positions in ``params`` of the parameters that stay unsharded for backward.
        reasons: pairs of a position in ``params`` and the reason why that parameter is not sent, or
            not used, in a narrower dtype.
        regions: regions of the lowered graph.
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

    def exchanges(self, bucket: Bucket) -> bool:
        """Return whether a bucket is reduced by exchanges: all-to-alls, then local sums."""
        # Over gloo, the transfers themselves are described as exchanged.
        sums = bool(self.problem.transfers[bucket.transfers[0]].summed_in)
        return bucket.exchanges or (bucket.kind == TransferKind.REDUCE_SCATTER and sums)

    def num_launches(self, bucket: Bucket) -> int:
        """Return the number of collectives, or host copies, that send a bucket."""
        # As ``launch_collective`` in ops/collectives.py launches them.
        is_complex = "complex" in self.problem.transfers[bucket.transfers[0]].dtype
        one_by_one = self.exchanges(bucket) or (bucket.kind.is_reduction and is_complex)
        return len(bucket.buffers) if one_by_one else 1

    def wire_dtypes(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the distinct wire dtypes in ``bucket``, such as "bfloat16"."""
        # Transfers of one gather may differ. A buffer with mixed dtypes, or with a dtype that a
        # backend may refuse (fp8), is sent as bytes.
        transfers = chain.from_iterable(sent_buffers(self.problem.transfers, bucket))
        dtypes = (
            self.params[t.param].dtype  # host copies of shards keep the dtype of the shards
            if bucket.kind in HOST_COPIES and t.param is not None
            else t.dtype
            for t in transfers
        )
        return tuple(dict.fromkeys(dtype.removeprefix("torch.") for dtype in dtypes))

    def fqn_of(self, transfer: Transfer) -> str:
        return "" if transfer.param is None else self.params[transfer.param].fqn

    def named(self, fqns: Sequence[str]) -> Plan:
        """Return the plan with parameters named by ``fqns``, the names of all graph inputs."""
        params = tuple(dataclasses.replace(p, fqn=fqns[p.input]) for p in self.params)
        return dataclasses.replace(self, params=params)

    def collectives_text(self) -> str:
        """Return the kind of graph, then all its collectives in launch order, one per line."""
        # All ranks must launch in the same order; otherwise two groups could wait for each other.
        users = [f"user collective: {user}" for user in self.problem.user_collectives]
        lines, num_done = [f"{self.graph} graph"], 0
        for bucket in self.buckets:
            if bucket.kind in HOST_COPIES:
                continue
            num_before = self.problem.num_user_launches(bucket.launch)
            lines += [*users[num_done:num_before], self._bucket_text(bucket)]
            num_done = num_before
        return "\n".join([*lines, *users[num_done:]])

    def _bucket_text(self, bucket: Bucket) -> str:
        def names(buffer: Sequence[Transfer]) -> str:
            return " ".join(f"{self.fqn_of(t)}:{t.dtype}" for t in buffer)

        buffers = " | ".join(map(names, sent_buffers(self.problem.transfers, bucket)))
        return f"{bucket.kind} of {bucket.num_bytes} bytes in group {bucket.group}: {buffers}"

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Load a plan that ``to_json`` wrote.

        Raises:
            ValueError: ``text`` has a version other than ``VERSION``.
        """
        raw: dict[str, Any] = _with_tuples(json.loads(text))
        if raw.get("version") != VERSION:
            raise ValueError(
                f"the plan has version {raw.get('version')}, but this graphshard reads version "
                f"{VERSION}; compile again"
            )
        transfers = tuple(_with_kind(Transfer, t) for t in raw["problem"].pop("transfers"))
        users = raw["problem"].pop("user_collectives")
        graph = GraphKind(raw["problem"].pop("graph"))
        return cls(
            params=tuple(PlanParam(**param) for param in raw["params"]),
            problem=Problem(
                graph,
                **raw["problem"],
                transfers=transfers,
                user_collectives=tuple(_with_kind(UserCollective, user) for user in users),
            ),
            buckets=tuple(_with_kind(Bucket, bucket) for bucket in raw["buckets"]),
            kept=raw["kept"],
            reasons=raw["reasons"],
            regions=Regions(**raw["regions"]),
        )


def _with_kind(cls: Callable[..., _Record], raw: dict[str, Any]) -> _Record:
    return cls(**{**raw, "kind": TransferKind(raw["kind"])})


def _with_tuples(value: Any) -> Any:
    """Return a JSON value with all lists as tuples."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
