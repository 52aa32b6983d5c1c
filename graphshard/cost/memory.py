"""Guess which values of a graph Inductor's fusion keeps out of memory.

    m = mm(..)   a = m + 1   b = exp(a)   c = b.sum(-1)   d = b / c      m, c and d are in memory

A pointwise value is recomputed in every kernel that reads it, unless something other than a fused
kernel reads it, or it is read more than once and is expensive (``should_realize_on_reuse`` in
torch/_inductor/ir.py). Any other value needs no memory if only its own kernel reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from .flops import aten_name, op_names
from .fusion import FUSED, GraphValues, NodeKind

_MAX_READS, _MAX_OPS = 4, 30
"""``realize_reads_threshold`` and ``realize_opcount_threshold`` in torch/_inductor/config.py."""
_HEAVY_ON_CPU = op_names("exp log log10 log1p log2 sigmoid tanh")


@dataclass(frozen=True)
class _Expression:
    """The computation of a pointwise value from values in memory.

    Attributes:
        reads: values in memory that it reads.
        num_ops: number of pointwise operations.
        is_heavy: whether it contains an op that Inductor does not repeat on a CPU.
    """

    reads: frozenset[fx.Node]
    num_ops: int
    is_heavy: bool

    @property
    def is_expensive(self) -> bool:
        return len(self.reads) > _MAX_READS or self.num_ops > _MAX_OPS or self.is_heavy


class UnmaterializedValues(NamedTuple):
    """The nodes whose values are never written to memory.

    Attributes:
        inside: nodes that only their own kernel reads, without recomputing them.
        inlined: nodes that are recomputed in every kernel that reads them.
    """

    inside: frozenset[fx.Node] = frozenset()
    inlined: frozenset[fx.Node] = frozenset()


def unmaterialized_values(
    values: GraphValues, device_type: str | None = None
) -> UnmaterializedValues:
    """Return the nodes whose values are never written to memory.

    Args:
        device_type: device type that kernels are compiled for; None: the device type of each value.
    """
    inside = frozenset(
        node
        for kernel in values.fused_kernels
        for node in kernel.nodes
        if all(user in kernel.nodes for user in values.users(node))
    )
    inlined = _inlined(values, device_type)
    return UnmaterializedValues(inside - inlined, inlined)


def _inlined(values: GraphValues, device_type: str | None) -> frozenset[fx.Node]:
    """Return the nodes that are recomputed in every kernel that reads them."""
    inlined: dict[fx.Node, _Expression] = {}
    for node, kind in values.kinds.items():
        if kind != NodeKind.POINTWISE:
            continue
        users = list(values.users(node))
        expression = _expression(node, values, inlined, device_type)
        read_by_fused = all(values.kinds[user] in FUSED for user in users)
        if read_by_fused and not (len(users) > 1 and expression.is_expensive):
            inlined[node] = expression
    return frozenset(inlined)


def _expression(
    node: fx.Node,
    values: GraphValues,
    inlined: dict[fx.Node, _Expression],
    device_type: str | None,
) -> _Expression:
    roots = {values.roots[source] for source in node.all_input_nodes}
    parts = [inlined[root] for root in roots if root in inlined]
    value = node.meta.get("val")
    is_on_cpu = isinstance(value, torch.Tensor) and (device_type or value.device.type) == "cpu"
    is_heavy = is_on_cpu and aten_name(node.target) in _HEAVY_ON_CPU
    return _Expression(
        frozenset(root for root in roots if root not in inlined).union(*(p.reads for p in parts)),
        1 + sum(part.num_ops for part in parts),
        is_heavy or any(part.is_heavy for part in parts),
    )
