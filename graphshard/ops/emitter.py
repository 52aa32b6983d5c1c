"""Calls that run now or go into a graph: what is written once serves eager code and rewrites alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .._torch.tensors import fake_mode_of

Call = Callable[..., Any]
"""``call(op, *args)``: runs ``op`` (eager) or inserts it into a graph."""

# Other entries describe the replaced node's own call (Inductor reads its eager inputs), not its origin.
_ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "custom")


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


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
