"""Forward, backward and inference graph: markers become functional collectives.

One collective for each parameter, waited for where it is used:

    before   w = unshard(shard, rows, group, reshard)
    after    a = all_gather_into_tensor(shard, world, group);  w = wait_tensor(a)[:rows]

    before   g = reduce_grad(grad, padded_rows, group)
    after    r = reduce_scatter_tensor(pad(grad), "avg", world, group);  g = wait_tensor(r)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphshard import ops
from graphshard._torch import fake_mode_of, group_size
from graphshard.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    PLANNED,
    REDUCE_SCATTER,
    Bucket,
    Plan,
    ShardedParam,
)

_KINDS: dict[Any, str] = {
    ops.unshard: ALL_GATHER,
    ops.reduce_grad: REDUCE_SCATTER,
    ops.all_reduce_grad: ALL_REDUCE,
}


def lower(graph: fx.Graph, kind: str) -> Plan:
    """Lower ``graph``, in place; ``kind`` is forward, backward or inference."""
    plan = plan_lower(graph, kind)
    apply_lower(graph, plan)
    return plan


def plan_lower(graph: fx.Graph, kind: str) -> Plan:
    """One bucket for each marker of ``graph`` that communicates, in graph order. Pure."""
    positions = {**_original_inputs(graph), **_gradient_outputs(graph)}
    params: dict[int, ShardedParam] = {}
    index: dict[int, int] = {}
    buckets = []
    for marker in _markers(graph):
        position = positions[marker if marker.target in ops.REDUCE else _source(marker)]
        params.setdefault(position, _param(marker, position))
        index.setdefault(position, len(index))
        if marker.target in _KINDS:
            buckets.append(_bucket(marker, index[position]))
    return Plan(kind, tuple(params.values()), tuple(buckets))


def _markers(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in list(graph.nodes) if node.target in (*ops.UNSHARD, *ops.REDUCE))


def _source(marker: fx.Node) -> fx.Node:
    source = marker.args[0]
    assert isinstance(source, fx.Node)
    return source


def _original_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """AOTAutograd names the inputs primals_1, primals_2, ... or arg0_1, arg1_1, ..."""
    found = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        if node.target.startswith("primals_"):
            found[node] = int(node.target.removeprefix("primals_")) - 1
        elif node.target.startswith("arg"):
            found[node] = int(node.target.removeprefix("arg").split("_")[0])
    return found


def _gradient_outputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Outputs of a backward graph are the gradients of the forward's inputs, in their order."""
    outputs: Any = graph.output_node().args[0]
    return {
        node: i
        for i, node in enumerate(outputs)
        if isinstance(node, fx.Node) and node.target in ops.REDUCE
    }


def _param(marker: fx.Node, position: int) -> ShardedParam:
    gathers = marker.target in ops.UNSHARD
    full, shard = (marker, _source(marker)) if gathers else (_source(marker), marker)
    value: torch.Tensor = full.meta["val"]
    splits = marker.target in (ops.unshard, ops.reduce_grad)
    padded_rows = shard.meta["val"].shape[0] if splits else None
    return ShardedParam(position, tuple(value.shape), str(value.dtype), padded_rows)


def _bucket(marker: fx.Node, param: int) -> Bucket:
    # The group is the only text among a marker's arguments.
    group = next(arg for arg in marker.args if isinstance(arg, str))
    world = group_size(group)
    kind = _KINDS[marker.target]
    shard = _source(marker) if kind == ALL_GATHER else marker
    num_shards = 1 if kind == ALL_REDUCE else world
    return Bucket(kind, (param,), shard.meta["val"].nbytes * num_shards, group, world)


def apply_lower(graph: fx.Graph, plan: Plan) -> None:
    """Replace every marker by what ``plan`` says, in place."""
    buckets = iter(plan.buckets)
    for marker in _markers(graph):
        bucket = next(buckets) if marker.target in _KINDS else None
        with graph.inserting_before(marker):
            lowered = _lowered(_Emitter(graph, marker.meta), marker, bucket)
        marker.replace_all_uses_with(lowered)
        graph.erase_node(marker)


def _lowered(emit: _Emitter, marker: fx.Node, bucket: Bucket | None) -> fx.Node:
    source = _source(marker)
    value = source.meta["val"]
    if bucket is None:
        return emit(torch.ops.aten.clone.default, source)
    group, world = bucket.group, bucket.world
    if bucket.kind == ALL_GATHER:
        return ops.all_gather_rows(emit, source, value, marker.meta["val"].shape[0], group, world)
    if bucket.kind == REDUCE_SCATTER:
        return ops.reduce_scatter_rows(
            emit, source, value, marker.meta["val"].shape[0], group, world
        )
    return ops.all_reduce_mean(emit, source, value, group, world)


class _Emitter:
    """Inserts calls into a graph, with the fake values and the origin of the marker they replace."""

    def __init__(self, graph: fx.Graph, origin: dict[str, Any]) -> None:
        self._graph = graph
        self._origin = {k: v for k, v in origin.items() if k not in ("val", "tensor_meta")}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode_of(fake_args):
            value = op(*fake_args, **fake_kwargs)
        node.meta = {**self._origin, PLANNED: True, "val": value}
        return node
