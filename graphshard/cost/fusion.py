"""Predict which nodes Inductor fuses into one kernel, and which values never reach memory.

    x ─► mm ─► add ─► var_mean ─► sub ─► mul ─► mm         add ... mul are one kernel: it reads
                │                         │                values from outside and writes values
                └─────────► output        └─► output       used outside, each once. Views are free.

[Note: fused kernels] Pointwise nodes, and reductions over the last dimensions, share a kernel with
the nodes that they read or that read them, unless a path between the two passes through another
kernel. Other reductions loop over columns. Their kernel contains the pointwise nodes that only
column reductions use, and other column reductions of the same inputs; users of the result are in
another kernel. Users of an update, such as ``index_put``, are also in another kernel. An update
shares a kernel with the values that it writes; the kernel's bytes include the whole result.

[Note: unmaterialized values] A pointwise value is recomputed in every fused kernel that reads it,
unless an unfused node also reads it, or it is expensive and read more than once
(``should_realize_on_reuse`` in torch/_inductor/ir.py). If it is large (``has_exceeded_max_reads``)
and another node reads a part of it, such as a chunk, a separate kernel computes all of it first.
Any other value needs no memory if only its own kernel reads it.

    m = mm(..)   a = m + 1   b = exp(a)   c = b.sum(-1)   d = b / c      only m and d are in memory
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from networkx.utils import UnionFind
from torch import fx

from .._torch.tensors import OpOverload
from ..ops.float8_math import transposed_copy
from ..ops.float8_ops import local_amax
from .flops import argument_values, aten_name, call_with_fallback, op_names, shape_of


class NodeKind(Enum):
    """The role of a node in fusion."""

    VIEW = auto()  # a view or part of another node's value; free
    BARRIER = auto()  # free, or priced elsewhere like collectives; nothing fuses across it
    POINTWISE = auto()  # fuses with its neighbors
    REDUCTION = auto()  # fuses with its neighbors, depending on the dimensions reduced
    UPDATE = auto()  # writes into parts of a new tensor or a copy; fuses with the values it writes
    KERNEL = auto()  # a separate kernel


FUSED = (NodeKind.POINTWISE, NodeKind.REDUCTION, NodeKind.UPDATE)

# Pointwise in Inductor, but without ``torch.Tag.pointwise``.
_POINTWISE = op_names(
    "_to_copy _unsafe_index _unsafe_masked_index arange cat constant_pad_nd copy embedding empty "
    "empty_like fill flip full full_like gather index index_select inductor_lookup_seed "
    "inductor_random iota ones ones_like repeat roll scalar_tensor select_scatter slice_scatter "
    "tril triu zeros zeros_like"
)
_UPDATES = op_names(
    "_unsafe_index_put _unsafe_masked_index_put_accumulate embedding_dense_backward index_add "
    "index_put scatter scatter_add scatter_reduce"
)
# Ops that read no more bytes of their first argument than they return.
_INDEXING = op_names("_unsafe_index _unsafe_masked_index embedding gather index index_select")
# Ops computed by special function units, or by polynomials.
_SPECIAL = op_names(
    "cos erf erfc exp exp2 expm1 gelu gelu_backward log log1p log2 pow sigmoid silu silu_backward "
    "sin softplus tan tanh"
)


# --- kinds of nodes ------------------------------------------------------------------------------


def node_kind(node: fx.Node) -> NodeKind:
    """Return the role of a node in fusion."""
    if node.op in ("placeholder", "get_attr", "output"):
        return NodeKind.BARRIER
    target = node.target
    is_operator = isinstance(target, OpOverload)
    if is_operator and (kind := _op_kind(target)) != NodeKind.KERNEL:
        return kind
    if target is operator.getitem:
        return NodeKind.VIEW
    if call_with_fallback(0.0, _bytes_of_value, node):
        return NodeKind.KERNEL
    # The value is not a tensor, but a size or arithmetic on sizes.
    return NodeKind.BARRIER if is_operator else NodeKind.VIEW


@functools.cache
def _op_kind(op: OpOverload[..., Any]) -> NodeKind:
    if op in (local_amax, transposed_copy):
        return NodeKind.KERNEL
    if aten_name(op) == "prepare_softmax_online":  # the maximum and the sum of exponentials
        return NodeKind.REDUCTION
    if op.namespace in ("_c10d_functional", "c10d_functional", "_dtensor", "graphshard"):
        return NodeKind.BARRIER
    if op.is_view or aten_name(op) == "_unsafe_view":
        return NodeKind.VIEW
    if torch.Tag.reduction in op.tags:
        return NodeKind.REDUCTION
    if torch.Tag.pointwise in op.tags or aten_name(op) in _POINTWISE:
        return NodeKind.POINTWISE
    if aten_name(op) in _UPDATES:
        return NodeKind.UPDATE
    return NodeKind.KERNEL


# --- sizes and reads -----------------------------------------------------------------------------

# Bytes that a kernel reads, keyed by the node that computed the value, then by the view read.
ReadBytes = dict[fx.Node, dict[fx.Node, float]]


class GraphValues:
    """The kinds, sizes and origins of the values in a graph.

    Args:
        device_type: device type that kernels are compiled for (default: that of each value).

    Attributes:
        kinds: kind of each node, in graph order.
        num_bytes: size in bytes of each node's value, which may be several tensors.
        roots: for each node, the node that computed its value, looking through views and tuples.
    """

    def __init__(self, graph: fx.Graph, device_type: str | None = None) -> None:
        self.device_type = device_type
        self.kinds: dict[fx.Node, NodeKind] = {}
        self.num_bytes: dict[fx.Node, float] = {}
        self.roots: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            kind = self.kinds[node] = node_kind(node)
            self.num_bytes[node] = call_with_fallback(0.0, _bytes_of_value, node)
            inputs = node.all_input_nodes
            is_view = kind == NodeKind.VIEW and bool(inputs)
            self.roots[node] = self.roots[inputs[0]] if is_view else node

    @functools.cached_property
    def expressions(self) -> dict[fx.Node, _Expression]:
        return _expressions(self)  # keyed by pointwise node

    @functools.cached_property
    def fused_kernels(self) -> list[FusedKernel]:
        return _find_kernels(self)  # in the order of their first nodes

    def read_bytes(
        self, node: fx.Node, reads: ReadBytes, computed_inside: Container[fx.Node] = ()
    ) -> float:
        """Return the bytes that ``node`` adds to the reads of its kernel.

        Args:
            reads: previous reads of the kernel; updated with the reads of ``node``.
            computed_inside: nodes of the same kernel, whose values are not read from memory.
        """
        added = 0.0
        for position, source in enumerate(node.all_input_nodes):
            root = self.roots[source]
            views = reads.setdefault(root, {})
            if root in computed_inside or source in views:
                continue
            num_bytes = self.num_bytes[source]
            if position == 0 and aten_name(node.target) in _INDEXING:
                num_bytes = min(num_bytes, self.num_bytes[node])
            # Count at most the whole value: expanded views repeat it, and views may overlap.
            unread = self.num_bytes[root] - sum(views.values())
            views[source] = max(0.0, min(num_bytes, unread))
            added += views[source]
        return added

    def updated(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose value ``node`` copies and updates, if any."""
        name = aten_name(node.target)
        if name not in _UPDATES or name == "embedding_dense_backward":
            return None
        return self.roots[node.all_input_nodes[0]]

    @functools.cached_property
    def read_in_part(self) -> frozenset[fx.Node]:
        """Views of parts of large pointwise values."""
        large = {n for n, expression in self.expressions.items() if expression.is_large}
        return frozenset(
            view
            for view, root in self.roots.items()
            if root in large and self.num_bytes[view] < self.num_bytes[root]
        )

    def users(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if self.kinds[user] == NodeKind.VIEW:
                yield from self.users(user)
            else:
                yield user


def _bytes_of_value(node: fx.Node) -> float:
    return _num_bytes(node.meta.get("val"))


def _num_bytes(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return math.prod(shape_of(value)) * value.dtype.itemsize
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    return 0.0


# --- fused kernels -------------------------------------------------------------------------------


@dataclass
class FusedKernel:
    """Nodes that become one kernel; see [Note: fused kernels]."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)  # in graph order; an ordered set
    num_bytes: float = 0.0  # read and written
    num_special: float = 0.0  # number of exponentials and similar functions

    @property
    def last(self) -> fx.Node:
        return next(reversed(self.nodes))


def _find_kernels(values: GraphValues) -> list[FusedKernel]:
    kernels: dict[fx.Node, FusedKernel] = {}
    for node, representative in _kernel_representatives(values).items():
        kernels.setdefault(representative, FusedKernel()).nodes[node] = None
    for kernel in kernels.values():
        reads: ReadBytes = {}
        for node in kernel.nodes:
            kernel.num_bytes += values.read_bytes(node, reads, kernel.nodes)
            if any(user not in kernel.nodes for user in values.users(node)):
                kernel.num_bytes += values.num_bytes[node]
            if aten_name(node.target) in _SPECIAL:
                kernel.num_special += math.prod(shape_of(node.meta["val"]))
    return list(kernels.values())


def _kernel_representatives(values: GraphValues) -> dict[fx.Node, fx.Node]:
    """Return, for every fused node in graph order, the node that represents its kernel."""
    column_nodes = _column_nodes(values)
    kernels: UnionFind[fx.Node] = UnionFind()
    # Number of kernels on the longest path to a node's value. It is the same for all nodes of a
    # kernel, so no path between two of them passes through another kernel.
    stages: dict[fx.Node, int] = {}
    fused: dict[fx.Node, None] = {}
    first_reader: dict[tuple[int, fx.Node, tuple[int, ...]], fx.Node] = {}
    for node, kind in values.kinds.items():
        sources = [values.roots[source] for source in node.all_input_nodes]
        if kind not in FUSED:
            latest = max((stages[source] for source in sources), default=0)
            stages[node] = latest if kind == NodeKind.VIEW else latest + 1
            continue
        stages[node] = stage = max(
            (
                stages[values.roots[view]] + _needs_new_kernel(view, node, values, column_nodes)
                for view in node.all_input_nodes
            ),
            default=0,
        )
        fused[node] = None
        for source in sources:
            if source in fused and stages[source] == stage:
                kernels.union(source, node)
            elif node in column_nodes:
                # Column loops that read the same value become one kernel.
                key = (stage, source, shape_of(source.meta.get("val")))
                kernels.union(first_reader.setdefault(key, node), node)
    return {node: kernels[node] for node in fused}


def _needs_new_kernel(
    view: fx.Node, node: fx.Node, values: GraphValues, column_nodes: Container[fx.Node]
) -> bool:
    source = values.roots[view]
    if values.kinds[source] not in FUSED:
        return False  # the stage of ``source`` already includes its kernel
    if values.kinds[source] == NodeKind.UPDATE or values.updated(node) is source:
        return True
    ends_loop = values.kinds[source] == NodeKind.REDUCTION and source in column_nodes
    crosses_loops = (source in column_nodes) != (node in column_nodes)
    return ends_loop or crosses_loops or view in values.read_in_part


def _column_nodes(values: GraphValues) -> set[fx.Node]:
    # Kernels loop over columns for reductions over dimensions other than the last, and for the
    # pointwise nodes that only such reductions use.
    column_nodes: set[fx.Node] = set()
    for node in reversed(values.kinds):
        kind = values.kinds[node]
        if kind == NodeKind.REDUCTION and not call_with_fallback(False, _reduces_last_dims, node):
            column_nodes.add(node)
        elif kind == NodeKind.POINTWISE:
            users = list(values.users(node))
            if users and all(user in column_nodes for user in users):
                column_nodes.add(node)
    return column_nodes


def _reduces_last_dims(node: fx.Node) -> bool:
    """Return whether a reduction is over the last dimensions and keeps at least the first."""
    arguments = argument_values(node)
    # Look up by name: the position differs between ops, and some ops have no dims.
    dims = next((arguments[name] for name in ("dim", "dims") if name in arguments), None)
    if isinstance(dims, int):
        dims = [dims]
    if not dims:  # over all dimensions
        return False
    num_dims = len(shape_of(next(iter(arguments.values()))))
    num_kept = num_dims - len(dims)
    return num_kept > 0 and all(dim % num_dims >= num_kept for dim in dims)


# --- unmaterialized values -----------------------------------------------------------------------

# Thresholds in torch/_inductor/config.py: ``realize_reads_threshold``,
# ``realize_acc_reads_threshold`` and ``realize_opcount_threshold``.
_MAX_READS, _MAX_ALL_READS, _MAX_OPS = 4, 8, 30
_HEAVY_ON_CPU = op_names("exp log log10 log1p log2 sigmoid tanh")


@dataclass(frozen=True)
class _Expression:
    """The computation of a pointwise value from values in memory."""

    reads: frozenset[fx.Node]  # values read from memory
    ops: frozenset[object]  # nodes and constants
    is_heavy: bool  # contains an op that Inductor does not recompute on a CPU
    is_inlined: bool = False

    @property
    def num_ops(self) -> int:
        return len(self.reads) + len(self.ops)

    @property
    def is_expensive(self) -> bool:
        return len(self.reads) > _MAX_READS or self.num_ops > _MAX_OPS or self.is_heavy

    @property
    def is_repeated(self) -> bool:
        """Whether kernels that use the value compute it again instead of reading it."""
        return self.is_inlined and not self.is_large

    @property
    def is_large(self) -> bool:
        return len(self.reads) > _MAX_ALL_READS or self.num_ops > _MAX_OPS


class UnmaterializedValues(NamedTuple):
    """The nodes whose values are never written to memory."""

    inside: frozenset[fx.Node] = frozenset()  # only their own kernel reads them
    inlined: frozenset[fx.Node] = frozenset()  # every kernel that reads them recomputes them


def unmaterialized_values(values: GraphValues) -> UnmaterializedValues:
    """Return the nodes whose values are never written to memory."""
    inside = frozenset(
        node
        for kernel in values.fused_kernels
        for node in kernel.nodes
        if all(user in kernel.nodes for user in values.users(node))
    )
    cut = {values.roots[view] for view in values.read_in_part}
    inlined = frozenset(n for n, e in values.expressions.items() if e.is_inlined and n not in cut)
    return UnmaterializedValues(inside - inlined, inlined)


def _expressions(values: GraphValues) -> dict[fx.Node, _Expression]:
    expressions: dict[fx.Node, _Expression] = {}
    for node, kind in values.kinds.items():
        if kind != NodeKind.POINTWISE:
            continue
        users = list(values.users(node))
        expression = _expression(node, values, expressions)
        read_by_fused = all(values.kinds[user] in FUSED for user in users)
        is_inlined = read_by_fused and not (len(users) > 1 and expression.is_expensive)
        expressions[node] = dataclasses.replace(expression, is_inlined=is_inlined)
    return expressions


def _expression(
    node: fx.Node, values: GraphValues, expressions: dict[fx.Node, _Expression]
) -> _Expression:
    roots = {values.roots[source] for source in node.all_input_nodes}
    inlined = {r for r in roots if r in expressions and expressions[r].is_repeated}
    parts = [expressions[root] for root in inlined]
    value = node.meta.get("val")
    is_on_cpu = (
        isinstance(value, torch.Tensor) and (values.device_type or value.device.type) == "cpu"
    )
    is_heavy = is_on_cpu and aten_name(node.target) in _HEAVY_ON_CPU
    constants = (arg for arg in node.args if isinstance(arg, (int, float)))
    return _Expression(
        frozenset(roots - inlined).union(*(part.reads for part in parts)),
        frozenset([node, *constants]).union(*(part.ops for part in parts)),
        is_heavy or any(part.is_heavy for part in parts),
    )
