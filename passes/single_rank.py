"""Joint and inference graphs: remove communication within groups of one rank.

    before   w = unshard(shard)   y = mm(x, w)   ...   g = reduce_grad(grad)
    after                         y = mm(x, shard)     g = grad

Casts required by a policy are kept. A parameter or gradient that the graph returns still owns its
memory, like the result of a collective.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphshard.ops.float8_math import as_dtype
from graphshard.ops.groups import span_of
from graphshard.ops.marker_specs import ReduceGradSpec, UnshardSpec
from graphshard.ops.markers import reduce_grad, unshard
from graphshard.ops.nodes import WHOLE_SHARD, Emitter, Value, is_returned, is_view, value_of
from graphshard.passes.contract import PassContext


def elide_single_rank_collectives(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace the markers of one-rank groups with their shards and gradients, in place."""
    for node in list(gm.graph.nodes):
        with gm.graph.inserting_before(node):
            if node.target is unshard:
                _use_shard(node, UnshardSpec.of_node(node))
            elif node.target is reduce_grad:
                _use_gradient(node, ReduceGradSpec.of_node(node))


def _use_shard(marker: fx.Node, spec: UnshardSpec) -> None:
    """Use the shard as the gathered parameter, if it has all rows and needs no copy or scaling."""
    has_all_rows = value_of(spec.shard).shape[0] == spec.rows
    if is_alone(spec.group) and has_all_rows and spec.device is None and spec.scales is None:
        tag = {"recompute": marker.meta["recompute"]} if "recompute" in marker.meta else {}
        emit = Emitter(marker.graph, marker.meta, **tag)
        _replace(marker, as_dtype(emit, spec.shard, spec.collective_input().wire_dtype), emit)
        spec.shard.meta[WHOLE_SHARD] = True  # type: ignore[union-attr]  # a node, in a graph


def _use_gradient(marker: fx.Node, spec: ReduceGradSpec) -> None:
    """Use the gradient instead of the reduced one, if only casts remain."""
    alone = all(is_alone(group) for group in (spec.group, spec.replica_group) if group)
    if alone and spec.host_memory is None and spec.partial is None:
        sent, emit = spec.collective_input(), Emitter(marker.graph, marker.meta)
        reduced = as_dtype(emit, spec.grad, sent.wire_dtype)
        _replace(marker, as_dtype(emit, reduced, sent.result_dtype), emit)


def is_alone(group: str) -> bool:
    """Return whether a group has only one rank."""
    return span_of(group).world == 1


def _replace(marker: fx.Node, value: Value, emit: Emitter) -> None:
    assert isinstance(value, fx.Node)
    if is_returned(marker) and not _is_own(value):
        value = emit(torch.ops.aten.clone.default, value, memory_format=torch.contiguous_format)
    marker.replace_all_uses_with(value)
    marker.graph.erase_node(marker)


def _is_own(value: fx.Node) -> bool:
    """Return whether a value owns contiguous memory that only one marker reads."""
    maker = value.args[0] if value.target is operator.getitem else value  # a tuple's operator
    is_made = isinstance(maker, fx.Node) and maker.op == "call_function" and not is_view(maker)
    return is_made and len(value.users) <= 1 and value_of(value).is_contiguous()
