"""Refuse traced forwards that change full parameters in place, or have them replaced.

Either would be silently ignored: a full parameter is a copy gathered for one forward, and graphs
read it through its shard, whatever ``module._parameters`` holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from .._torch.as_parameter import trace_as_parameters
from .._torch.autograd import version_of
from .._torch.dynamo import Source, Trace
from .._torch.tensors import traced_storage, traced_value
from ..errors import BackendError
from ..ops import markers
from ..ops.nodes import graph_modules
from .sharded_model import changed_in_place
from .sharded_param import SHARDED_PARAM, ShardedParam, sharded_param_of


def _refuse_functional_call(shard: Source) -> None:
    param = sharded_param_of(Trace().value(shard))
    raise BackendError(
        f"torch.func.functional_call does not reach parameter {param.fqn if param else shard!r}, "
        "which is sharded: forward would compute with the module's own; give it as "
        "ignored_params, or call a copy of the module that is not sharded"
    )


@functools.cache
def trace_parameters() -> None:
    """Make Dynamo treat the results of unshard markers as parameters from now on."""
    path = (SHARDED_PARAM, "dtensor")
    trace_as_parameters(markers.UNSHARD_MARKERS, path, _refuse_functional_call)


def check_reads(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Check how a graph that Dynamo traced, and its subgraphs, use sharded parameters.

    Args:
        inputs: one value for each placeholder of ``gm``.

    Raises:
        BackendError: the graph changes a full parameter in place, or takes its DTensor as an input.
    """
    params = [sharded_param_of(value) for value in inputs]
    for value, param in zip(inputs, params):
        if param is not None and isinstance(value, DTensor):
            raise BackendError(
                f"forward reads parameter {param.fqn!r} by a reference of its own, and would "
                "compute with a shard: read it through its module"
            )
    placeholders = gm.graph.find_nodes(op="placeholder")
    shards = {
        traced_storage(node): param
        for node, param in zip(placeholders, params)
        if param is not None
    }
    for part in graph_modules(gm):
        _check_graph(part.graph, shards)


def _check_graph(graph: fx.Graph, shards: Mapping[int | None, ShardedParam]) -> None:
    """Check that a graph changes no full parameter in place.

    Args:
        shards: sharded parameters, by the storage of their shard in the trace.

    Raises:
        BackendError: it changes one.
    """
    fqns: dict[int | None, str] = {}
    for node in _reads(graph):
        fqns[traced_storage(node)] = _fqn_of(node, shards)
    for node in graph.nodes:
        value, storage = traced_value(node), traced_storage(node)
        if isinstance(value, torch.Tensor) and storage in fqns and version_of(value):
            raise BackendError(changed_in_place(fqns[storage]))


def _fqn_of(read: fx.Node, shards: Mapping[int | None, ShardedParam]) -> str:
    """Return the FQN of the parameter that a marker reads; if unknown, its shard's node name."""
    shard = read.args[0]
    assert isinstance(shard, fx.Node)
    param = shards.get(traced_storage(shard))
    return param.fqn if param else str(shard)


def _reads(graph: fx.Graph) -> Iterator[fx.Node]:
    for op in (markers.unshard, markers.replicate):
        yield from graph.find_nodes(op="call_function", target=op)
