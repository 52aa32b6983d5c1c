"""Calls that run now or go into a graph: what is written once serves eager code and rewrites alike."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ._torch import fake_mode_of, size_hint

Call = Callable[..., Any]
"""``call(op, *args)``: runs ``op`` (eager) or inserts it into a graph."""

# Other entries describe the replaced node's own call (Inductor reads its eager inputs), not its origin.
_ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "custom")


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


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


class Emitter:
    """Inserts calls into a graph, with the fake values and the origin of the node they replace.

    Args:
        origin: ``meta`` of that node; ``extra`` goes into the ``meta`` of all that is inserted.
    """

    def __init__(self, graph: fx.Graph, origin: dict[str, Any], **extra: Any) -> None:
        self._graph = graph
        self._mode = fake_mode_of(node.meta.get("val") for node in graph.nodes)
        self._meta = {**{k: v for k, v in origin.items() if k in _ORIGIN}, **extra}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        node = self._graph.call_function(op, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            value = op(*fake_args, **fake_kwargs)
        node.meta = {**self._meta, "val": value}
        return node
