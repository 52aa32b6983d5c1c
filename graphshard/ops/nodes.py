"""Values, views, sizes and uses, read off the nodes of a graph; our keys in ``node.meta``."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import Argument

from .._torch.tensors import size_hint

Value: TypeAlias = torch.Tensor | fx.Node
"""A tensor, or the node of a graph that stands for one."""

Values: TypeAlias = Sequence[torch.Tensor] | fx.Node
"""Tensors, or the node of a list of them."""

PLANNED = "graphshard_planned"
"""Key in ``node.meta`` that marks what a rewrite inserted for a plan."""

REASON = "graphshard_reason"
"""Key in ``node.meta`` of why a parameter travels as it does."""


def value_of(value: Value) -> torch.Tensor:
    """The tensor itself, or the fake one of a node."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value is part of the value of its first argument."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory: an expanded dimension has that of one element.

    Symbolic sizes count as what they were when they were traced.
    """
    # A symbolic stride is not asked whether it is 0: that could add a guard.
    strides = [stride if isinstance(stride, int) else 1 for stride in tensor.stride()]
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, strides)]
    return size_hint(math.prod(sizes)) * tensor.element_size()


def root_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of a node's value."""
    while is_view(node) and isinstance(source := node.args[0], fx.Node):
        node = source
    return node


def uses(node: fx.Node) -> list[fx.Node]:
    """The nodes that use a node's value, also through views; the graph's output is none of them."""
    users = []
    for user in node.users:
        users += uses(user) if is_view(user) else [user]
    return [user for user in users if user.op != "output"]


def outputs_of(graph: fx.Graph) -> Sequence[Argument]:
    """The values that a graph returns, in order; not all of them are nodes."""
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs)
