"""How long the nodes of a graph take, its collectives, and the copies around them: predicted.

Pure: nothing is measured and nobody is asked, so all ranks with the same ``Hardware`` decide alike.
A kernel takes the longer of what it computes and what it moves (the roofline model: Williams et al.,
CACM 52(4), 2009), plus its launch. Which nodes share a kernel is a guess at what Inductor does:

    x ─► mm ─► add ─► var_mean ─► sub ─► mul ─► mm         one region: add ... mul. It reads what mm
                │                         │                wrote and what add adds, and writes what
                └─────────► output        └─► output       others use: each once; views are free.

[Note: regions] Pointwise nodes, and reductions over the last axes, share a kernel with those that
they read from or are read by, unless a path between the two leads through another kernel. A
reduction over other axes, or over all, loops differently. It takes in the pointwise nodes that serve
nothing else, and joins other such reductions over what it reads; who uses it is another kernel.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from networkx.utils import UnionFind
from torch import fx

from ..kinds import HOST_COPIES, TransferKind
from ..ops.float8_ops import local_amax
from .flops import aten_name, flops, names, shape_of
from .hardware import COLLECTIVE_KINDS, Hardware, Interconnect

VIEW, BARRIER, POINTWISE, REDUCTION, KERNEL = range(5)
"""Kinds of nodes: part of another's value; free but not fused; fused; fused; a kernel of its own."""


# Pointwise in Inductor's eyes, though without the tag.
_POINTWISE = names(
    "_to_copy _unsafe_index _unsafe_masked_index arange cat constant_pad_nd copy embedding empty "
    "empty_like fill flip full full_like gather index index_select inductor_lookup_seed "
    "inductor_random iota ones ones_like repeat roll scalar_tensor select_scatter slice_scatter "
    "tril triu zeros zeros_like"
)
# These read of their first argument as much as they return.
_GATHERS = names("_unsafe_index _unsafe_masked_index embedding gather index index_select")
# Computed by a unit of their own, or by a polynomial.
_SPECIAL = names(
    "cos erf erfc exp exp2 expm1 gelu gelu_backward log log1p log2 pow sigmoid silu silu_backward "
    "sin softplus tan tanh"
)


@dataclass(frozen=True)
class CostModel:
    """Predicts times in microseconds.

    Attributes:
        hardware: what it all runs on.
        node_cost: called with every node; a number replaces what is predicted for that node.
        tf32: products of float32 run in tf32, as under ``torch.set_float32_matmul_precision``.
    """

    hardware: Hardware
    node_cost: Callable[[fx.Node], float | None] | None = None
    tf32: bool = False

    def compute_us(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """The time of every node of a functional ATen graph whose nodes have ``meta["val"]``.

        The last node of a region (see [Note: regions]) has its time, the others have 0, as have
        inputs, outputs, views, collectives and ops of ours that copy. Symbolic sizes are what they
        were when the graph was traced, those that depend on data what ``size_hint`` takes.

        Raises:
            ValueError: ``node_cost`` returned something that is not a time.
        """
        values = _Values(graph)
        times = dict.fromkeys(graph.nodes, 0.0)
        for node, kind in values.kind.items():
            if kind == KERNEL:
                times[node] = self._kernel_us(node, values)
        for region in _regions(values):
            times[next(reversed(region.nodes))] = self._region_us(region)
        if self.node_cost is not None:
            times.update(_overrides(graph, self.node_cost))
        return times

    def collective_us(
        self, kind: TransferKind, num_bytes: float, world: int, stride: int = 1
    ) -> float:
        """The time of one collective over ``world`` ranks.

        A ring (Patarasuk and Yuan, JPDC 69(2), 2009): ``n - 1`` steps carry ``(n - 1) / n`` of the
        buffer, twice that for an all-reduce. Ranks fill one node of ``ranks_per_node`` after the
        other; with more than one, the ring takes a step over the network for each node but one,
        and the network link sets latency and bandwidth.

        Args:
            kind: all_gather, reduce_scatter, one of the all-reduces, or of the copies from the host and
                to it, for which ``world`` does not matter.
            num_bytes: of the full buffer: what is gathered, or what each rank reduces.
            world: ranks; a single one copies.
            stride: from one of them to the next; each node has ``ranks_per_node`` of all ranks.
        """
        if kind in HOST_COPIES:
            return self.hardware.host.us(num_bytes) + self.hardware.launch_us
        kind = (
            TransferKind.ALL_REDUCE
            if kind in (TransferKind.ALL_REDUCE_MAX, TransferKind.ALL_REDUCE_SHARDS)
            else kind
        )
        if kind not in COLLECTIVE_KINDS:
            raise ValueError(f"kind={kind!r}: must be one of {COLLECTIVE_KINDS}")
        if world < 1 or num_bytes < 0:
            raise ValueError(f"world={world}, num_bytes={num_bytes}: must be from 1 and 0 up")
        if world == 1:
            return self.copy_us(num_bytes)
        rounds = 2 if kind == TransferKind.ALL_REDUCE else 1
        nodes = self._num_nodes(world, stride)
        intra, inter, link = self.hardware.intra, self.hardware.inter, self._link(world, stride)
        hops_us = (world - nodes) * intra.hop_us + (nodes - 1) * inter.hop_us
        moved_us = link.bus[kind].us(num_bytes) * (world - 1) / world
        return link.latency_us + rounds * (hops_us + moved_us)

    def buffer_us(self, world: int, stride: int = 1) -> float:
        """What another tensor adds to a coalesced collective over ``world`` ranks."""
        return self._link(world, stride).buffer_us

    def lost_us(self, lane_us: float) -> float:
        """What a collective that takes so long costs compute, though it is hidden."""
        return self.hardware.issue_us + self.hardware.contention * lane_us

    def _link(self, world: int, stride: int) -> Interconnect:
        within = self._num_nodes(world, stride) == 1
        return self.hardware.intra if within else self.hardware.inter

    def _num_nodes(self, world: int, stride: int) -> int:
        """How many nodes a group has ranks on, if its first one is the first of a node."""
        spanned = (world - 1) * stride + 1
        return min(world, math.ceil(spanned / self.hardware.ranks_per_node))

    def copy_us(self, num_bytes: float) -> float:
        """The time of a kernel that copies so much on the device, as packing a bucket does."""
        return self.hardware.memory.us(2 * num_bytes) + self.hardware.launch_us

    def _kernel_us(self, node: fx.Node, values: _Values) -> float:
        num_flops, dtype, share = flops(node)
        if dtype == "float32" and self.tf32:
            dtype = "tf32"
        compute_us = self.hardware.flops_of(dtype).us(num_flops) / share
        moved_us = self.hardware.memory.us(values.read(node, {}) + values.num_bytes[node])
        return max(compute_us, moved_us) + self.hardware.launch_us

    def _region_us(self, region: _Region) -> float:
        moved_us = self.hardware.memory.us(region.num_bytes)
        special_us = region.num_special / self.hardware.special_per_s * 1e6
        return max(moved_us, special_us) + self.hardware.launch_us


def _overrides(
    graph: fx.Graph, node_cost: Callable[[fx.Node], float | None]
) -> Iterator[tuple[fx.Node, float]]:
    for node in graph.nodes:
        time_us = node_cost(node)
        if time_us is None:
            continue
        if type(time_us) not in (int, float) or not math.isfinite(time_us) or time_us < 0:
            raise ValueError(
                f"node_cost returned {time_us!r} for {node.name}: must be microseconds from 0 up, "
                "or None for a node that it does not price"
            )
        yield node, float(time_us)


# --- sizes, and which node reads what ------------------------------------------------------------

_Reads = dict[fx.Node, dict[fx.Node, float]]
"""By value, the views of it that were read and their bytes."""


class _Values:
    """Kind, bytes and origin of each node's value.

    Attributes:
        root: the node that computed the value, behind views and tuples.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.kind: dict[fx.Node, int] = {}
        self.num_bytes: dict[fx.Node, float] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            kind = self.kind[node] = _kind(node)
            self.num_bytes[node] = _num_bytes(node.meta.get("val"))
            inputs = node.all_input_nodes
            self.root[node] = self.root[inputs[0]] if kind == VIEW and inputs else node

    def read(self, node: fx.Node, reads: _Reads, inside: Any = ()) -> float:
        """The bytes that ``node`` reads and that are neither among ``reads`` yet nor ``inside``."""
        total = 0.0
        name = aten_name(node.target)
        for position, source in enumerate(node.all_input_nodes):
            root = self.root[source]
            seen = reads.setdefault(root, {})
            if root in inside or source in seen:
                continue
            num_bytes = self.num_bytes[source]
            if position == 0 and name in _GATHERS:
                num_bytes = min(num_bytes, self.num_bytes[node])
            left = self.num_bytes[root] - sum(seen.values())  # an expanded view repeats its value
            seen[source] = max(0.0, min(num_bytes, left))
            total += seen[source]
        return total


def _num_bytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return math.prod(shape_of(value)) * value.dtype.itemsize
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    return 0.0


def _kind(node: fx.Node) -> int:
    if node.op in ("placeholder", "get_attr", "output"):
        return BARRIER
    is_operator = hasattr(node.target, "overloadpacket")
    if is_operator and (kind := _kind_of(node.target)) != KERNEL:
        return kind
    if node.target is operator.getitem:
        return VIEW
    if _num_bytes(node.meta.get("val")):
        return KERNEL
    return BARRIER if is_operator else VIEW  # a size read off a tensor, or arithmetic on sizes


@functools.cache
def _kind_of(op: Any) -> int:
    if op is local_amax:
        return KERNEL
    if op.namespace in ("_c10d_functional", "c10d_functional", "graphshard"):
        return BARRIER
    if op.is_view or aten_name(op) == "_unsafe_view":
        return VIEW
    if torch.Tag.reduction in op.tags:
        return REDUCTION
    return POINTWISE if torch.Tag.pointwise in op.tags or aten_name(op) in _POINTWISE else KERNEL


# --- regions -------------------------------------------------------------------------------------


@dataclass
class _Region:
    """What becomes one kernel."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    num_bytes: float = 0.0
    num_special: float = 0.0


def _regions(values: _Values) -> list[_Region]:
    """In the order of their first nodes."""
    regions: dict[fx.Node, _Region] = {}
    for node, group in _grouped(values, _across(values)).items():
        regions.setdefault(group, _Region()).nodes[node] = None
    for region in regions.values():
        reads: _Reads = {}
        for node in region.nodes:
            region.num_bytes += values.read(node, reads, region.nodes)
            if any(user not in region.nodes for user in _users(node, values)):
                region.num_bytes += values.num_bytes[node]
            if aten_name(node.target) in _SPECIAL:
                region.num_special += math.prod(shape_of(node.meta["val"]))
    return list(regions.values())


def _users(node: fx.Node, values: _Values) -> Iterator[fx.Node]:
    """Who uses a value, also by way of views."""
    for user in node.users:
        if values.kind[user] == VIEW:
            yield from _users(user, values)
        else:
            yield user


def _across(values: _Values) -> set[fx.Node]:
    """Reductions over other than the last axes, and pointwise nodes that serve only such."""
    found: set[fx.Node] = set()
    for node in reversed(values.kind):
        kind = values.kind[node]
        if kind == REDUCTION and not _over_last_axes(node):
            found.add(node)
        elif kind == POINTWISE:
            users = list(_users(node, values))
            if users and all(user in found for user in users):
                found.add(node)
    return found


def _over_last_axes(node: fx.Node) -> bool:
    axes: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(axes, int):
        axes = [axes]
    num_axes = node.all_input_nodes[0].meta["val"].dim()
    kept = num_axes - len(axes or range(num_axes))  # none: over all
    return kept > 0 and all(axis % num_axes >= kept for axis in axes)


def _grouped(values: _Values, across: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Each node of a region, with the node that stands for the region."""
    groups: UnionFind[fx.Node] = UnionFind()
    stage: dict[fx.Node, int] = {}
    fused: dict[fx.Node, None] = {}
    readers: dict[tuple[Any, ...], fx.Node] = {}
    for node, kind in values.kind.items():
        sources = [values.root[source] for source in node.all_input_nodes]
        if kind not in (POINTWISE, REDUCTION):
            stage[node] = max((stage[s] for s in sources), default=0) + (kind != VIEW)
            continue
        stage[node] = max((stage[s] + _step(s, node, values, across) for s in sources), default=0)
        fused[node] = None
        for source in sources:
            if source in fused and stage[source] == stage[node]:
                groups.union(source, node)
            elif node in across:
                key = (stage[node], source, shape_of(source.meta["val"]))
                groups.union(readers.setdefault(key, node), node)
    return {node: groups[node] for node in fused}


def _step(source: fx.Node, node: fx.Node, values: _Values, across: set[fx.Node]) -> int:
    """1 where ``node`` cannot be in the kernel of ``source``: a stage is a kernel at the earliest."""
    if values.kind[source] not in (POINTWISE, REDUCTION):
        return 0
    ends = values.kind[source] == REDUCTION and source in across
    return int(ends or (source in across) != (node in across))
