"""Joint and inference graphs: remove communication in groups of one rank.

    before   w = unshard(shard)   y = mm(x, w)   ...   g = reduce_grad(grad)
    after                         y = mm(x, shard)     g = grad

Casts required by a policy are kept. Parameters and gradients that the graph returns still own their
memory, like the results of a collective.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphshard.ops.float8_math import as_dtype
from graphshard.ops.groups import span_of
from graphshard.ops.marker_specs import AllReduceGradSpec, ReduceGradSpec, UnshardSpec
from graphshard.ops.markers import all_reduce_grad, reduce_grad, unshard
from graphshard.ops.nodes import (
    WHOLE_SHARD,
    Emitter,
    Value,
    is_returned,
    is_view,
    replace_in_output,
    value_of,
)
from graphshard.passes.contract import PassContext


def elide_single_rank_collectives(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace markers of one-rank groups with their shards and gradients, in place.

    Markers that also copy from or to the host, scale, cut off padding or add totals are kept.
    """
    returned: dict[fx.Node, fx.Node] = {}
    for node in list(gm.graph.nodes):
        value = None
        with gm.graph.inserting_before(node):
            if node.target is unshard:
                value = _use_shard(node, UnshardSpec.of_node(node))
            elif node.target is reduce_grad:
                value = _use_gradient(node, ReduceGradSpec.of_node(node))
            elif node.target is all_reduce_grad:
                value = _use_gradient(node, AllReduceGradSpec.of_node(node))
        if value is not None:
            node.replace_all_uses_with(value, lambda user: user.op != "output")
            if node.users:
                returned[node] = value
            else:
                gm.graph.erase_node(node)
    replace_in_output(gm.graph, returned)
    for node in reversed(returned):
        gm.graph.erase_node(node)


def _use_shard(marker: fx.Node, spec: UnshardSpec) -> fx.Node | None:
    """Return the shard, cast like the gathered parameter, or None if the gather does more."""
    has_all_rows = value_of(spec.shard).shape[0] == spec.rows
    if is_alone(spec.group) and has_all_rows and spec.device is None and spec.scales is None:
        tag = {"recompute": marker.meta["recompute"]} if "recompute" in marker.meta else {}
        emit = Emitter(marker.graph, marker.meta, **tag)
        spec.shard.meta[WHOLE_SHARD] = True  # type: ignore[union-attr]  # a node, in a graph
        value = as_dtype(emit, spec.shard, spec.collective_input().wire_dtype)
        return _owned_if_returned(marker, value, emit)
    return None


def _use_gradient(marker: fx.Node, spec: ReduceGradSpec | AllReduceGradSpec) -> fx.Node | None:
    """Return the gradient, cast like the reduced one, or None if the reduction does more."""
    groups = [spec.group]
    if isinstance(spec, ReduceGradSpec):
        if spec.host_memory is not None or spec.partial is not None:
            return None
        if spec.replica_group:
            groups.append(spec.replica_group)
    if not all(map(is_alone, groups)):
        return None
    sent, emit = spec.collective_input(), Emitter(marker.graph, marker.meta)
    reduced = as_dtype(emit, spec.grad, sent.wire_dtype)
    return _owned_if_returned(marker, as_dtype(emit, reduced, sent.result_dtype), emit)


def is_alone(group: str) -> bool:
    """Return whether a group has only one rank."""
    return span_of(group).world == 1


def _owned_if_returned(marker: fx.Node, value: Value, emit: Emitter) -> fx.Node:
    """Return ``value``, or a copy if the graph returns it and it does not own its memory."""
    assert isinstance(value, fx.Node)
    if is_returned(marker) and not _is_own(value):
        return emit(torch.ops.aten.clone.default, value, memory_format=torch.contiguous_format)
    return value


def _is_own(value: fx.Node) -> bool:
    maker = value.args[0] if value.target is operator.getitem else value  # op that made a tuple
    is_made = isinstance(maker, fx.Node) and maker.op == "call_function" and not is_view(maker)
    return is_made and len(value.users) <= 1 and value_of(value).is_contiguous()
