"""Joint and inference graphs: send nothing in a group of one rank.

    before   w = unshard(shard)   y = mm(x, w)   ...   g = reduce_grad(grad)
    after                         y = mm(x, shard)     g = grad

Casts that a policy asks for are kept. A parameter or gradient that the graph returns still owns its
memory, like the result of a collective.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphshard.ops.collectives import span_of
from graphshard.ops.emitter import Emitter
from graphshard.ops.float8_math import as_dtype
from graphshard.ops.marker_specs import ReduceGradSpec, UnshardSpec
from graphshard.ops.markers import reduce_grad, unshard
from graphshard.ops.nodes import WHOLE_SHARD, Value, is_returned, is_view, value_of


def elide_single_rank_collectives(gm: fx.GraphModule) -> None:
    """Replace the markers of one-rank groups in a joint graph, in place."""
    use_whole_shards(gm.graph)
    for node in list(gm.graph.nodes):
        if node.target is reduce_grad and _stays_here(spec := ReduceGradSpec.of_node(node)):
            sent = spec.collective_input()
            with gm.graph.inserting_before(node):
                emit = Emitter(gm.graph, node.meta)
                reduced = as_dtype(emit, spec.grad, sent.dtype)
                _replace(node, as_dtype(emit, reduced, sent.result_dtype), emit)


def use_whole_shards(graph: fx.Graph) -> None:
    """Replace the ``unshard`` markers of one-rank groups with their shards, in place."""
    for node in list(graph.nodes):
        if node.target is unshard and _is_here(spec := UnshardSpec.of_node(node)):
            tag = {"recompute": node.meta["recompute"]} if "recompute" in node.meta else {}
            with graph.inserting_before(node):
                emit = Emitter(graph, node.meta, **tag)
                _replace(node, as_dtype(emit, spec.shard, spec.collective_input().dtype), emit)
            spec.shard.meta[WHOLE_SHARD] = True  # type: ignore[union-attr]  # a node, in a graph


def is_alone(group: str) -> bool:
    """Return whether a group has only one rank."""
    return span_of(group).world == 1


def _is_here(spec: UnshardSpec) -> bool:
    """Return whether the shard on the device is the full parameter, ready for use."""
    has_rows = value_of(spec.shard).shape[0] == spec.rows
    return is_alone(spec.group) and has_rows and spec.device is None and spec.scales is None


def _stays_here(spec: ReduceGradSpec) -> bool:
    """Return whether a gradient needs only a cast: no reduction, host copy or accumulated total."""
    alone = all(is_alone(group) for group in (spec.group, spec.replica_group) if group)
    return alone and spec.host_memory is None and spec.partial is None


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
