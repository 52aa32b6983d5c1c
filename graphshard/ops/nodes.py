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

WHOLE_SHARD = "graphshard_whole_shard"
"""Key in ``node.meta`` that marks an input that is a parameter, and its only shard."""

HELD_BYTES = "graphshard_held_bytes"
"""Key in ``node.meta`` of an input that is a parameter as forward gathered it, or a part of that:
the bytes of its memory, padding included. It is free behind its last use."""


def value_of(value: Value) -> torch.Tensor:
    """The tensor itself, or the fake one of a node."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value is part of the value of its first argument."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; symbolic sizes count as what they were when they were traced."""
    return size_hint(tensor.numel()) * tensor.element_size()


def memory_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory that a tensor reads: an expanded dimension has one element's."""
    if tensor.layout is not torch.strided:
        return num_bytes(tensor)
    # A symbolic size or stride is not asked for its value: that could add a guard.
    sizes = [
        min(size, 1) if isinstance(size, int) and isinstance(stride, int) and not stride else size
        for size, stride in zip(tensor.shape, tensor.stride())
    ]
    return size_hint(math.prod(sizes)) * tensor.element_size()


def root_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of a node's value."""
    while is_view(node) and isinstance(source := node.args[0], fx.Node):
        node = source
    return node


def is_returned(node: fx.Node) -> bool:
    """Return whether the graph returns a node's value, or a view of it."""
    return any(user.op == "output" or (is_view(user) and is_returned(user)) for user in node.users)


def uses(node: fx.Node) -> list[fx.Node]:
    """The nodes that use a node's value, also through views; the graph's output is none of them."""
    users = []
    for user in node.users:
        users += uses(user) if is_view(user) else [user]
    return [user for user in users if user.op != "output"]


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph that Dynamo traced, and the graphs in it, such as checkpointed parts."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def outputs_of(graph: fx.Graph) -> Sequence[Argument]:
    """The values that a graph returns, in order; not all of them are nodes."""
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
