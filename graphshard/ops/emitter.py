"""Calls that run now or go into a graph, so that eager code and rewrites share functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

from .._torch.tensors import fake_mode_of

Call: TypeAlias = Callable[..., Any]
"""``call(op, *args)`` runs ``op`` on tensors, or inserts it into a graph for nodes."""

# Other entries of ``meta`` describe the replaced node's call, not its origin: its eager inputs,
# for example, which Inductor reads.
_ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "custom")


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` now."""
    return op(*args, **kwargs)


class Emitter:
    """A ``Call`` that inserts nodes, with fake values and the origin of the node that they replace.

    Args:
        origin: ``meta`` of the replaced node.
        extra: entries for the ``meta`` of every inserted node.
    """

    def __init__(self, graph: fx.Graph, origin: dict[str, Any], **extra: Any) -> None:
        self._graph = graph
        self._mode = fake_mode_of(node.meta.get("val") for node in graph.nodes)
        self._meta = {**{k: v for k, v in origin.items() if k in _ORIGIN}, **extra}

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            value = op(*fake_args, **fake_kwargs)
        node.meta = {**self._meta, "val": value}
        if torch.Tag.needs_exact_strides in getattr(op, "tags", ()):
            # As in torch/fx/experimental/proxy_tensor.py. Without it, Inductor may choose layouts
            # for the arguments of ``_scaled_mm`` that cuBLASLt refuses.
            node.meta["eager_input_vals"] = fake_args, fake_kwargs
        return node
