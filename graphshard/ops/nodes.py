"""What is read off the nodes of a graph: values, views, sizes and uses; and our keys in ``node.meta``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .._torch.tensors import size_hint

PLANNED = "graphshard_planned"
"""Key in ``node.meta`` of what a rewrite inserted for a plan."""

REASON = "graphshard_reason"
"""Key in ``node.meta`` of why a parameter travels as it does."""


def value_of(of: Any) -> torch.Tensor:
    """A tensor, or that of a node."""
    return of.meta["val"] if isinstance(of, fx.Node) else of


def is_view(node: fx.Node) -> bool:
    """Whether its value is part of another's."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def num_bytes(tensor: torch.Tensor) -> int:
    """Also of symbolic sizes: with what they were when they were traced."""
    return size_hint(tensor.numel()) * tensor.element_size()


def root_of(node: fx.Node) -> fx.Node:
    """Whose memory a node's value is in."""
    while is_view(node) and isinstance(source := node.args[0], fx.Node):
        node = source
    return node


def uses(node: fx.Node) -> list[fx.Node]:
    """What uses a node's value, also by way of views; but that it is returned."""
    found = []
    for user in node.users:
        found += uses(user) if is_view(user) else [user]
    return [user for user in found if user.op != "output"]
