"""Run a Dynamo graph through every pass up to its plans, without compiling it.

    Dynamo graph ─► AOTAutograd ─► joint passes, partition ─► Inductor's passes ─► read each graph

All tensors are fake. The result returns fake tensors with the shapes of the graph's outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .. import passes
from .._torch.aot_graphs import graph_kind
from .._torch.inductor import (
    CustomGraphPass,
    compile_without_code,
    decompositions_for,
    eager_backward,
    options_of_plans,
)
from ..kinds import GraphKind
from ..show.dump_folder import DumpWriter
from .partition import Partitioner
from .settings import CompileSettings
from .traced_graph import Runnable, TracedGraph

Read = Callable[[fx.Graph, GraphKind], None]
"""Reads a forward, backward or inference graph before it is lowered."""


class _Reader(CustomGraphPass):
    """Passes a graph to a function at the point where it would be lowered."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __call__(self, graph: fx.Graph) -> None:
        self._read(graph, GraphKind(graph_kind(graph)))

    def uuid(self) -> bytes | None:
        return None


def trace_only(traced: TracedGraph, settings: CompileSettings, read: Read) -> Runnable:
    """Trace a Dynamo graph and call ``read`` with each graph that would be lowered."""
    for traced_pass in passes.TRACED:
        traced_pass(traced.gm)
    options: dict[str, Any] = {
        **options_of_plans(settings.device),
        "post_grad_custom_post_pass": _Reader(read),
        "custom_partitioner_fn": Partitioner(settings, DumpWriter()),
    }
    with eager_backward():
        run: Runnable = compile_without_code(
            traced.gm, traced.inputs, options, decompositions_for(traced.inputs)
        )
    return run
