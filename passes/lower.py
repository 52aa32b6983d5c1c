"""Forward, backward and inference graph: markers become functional collectives.

One collective for each parameter, waited for where it is used:

    before   w = unshard(shard, rows, group, reshard)
    after    a = all_gather_into_tensor(shard, world, group);  w = wait_tensor(a)[:rows]

    before   g = reduce_grad(grad, padded_rows, group)
    after    r = reduce_scatter_tensor(pad(grad), "avg", world, group);  g = wait_tensor(r)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphshard import ops
from graphshard._torch import group_size
from graphshard.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    REDUCE_SCATTER,
    Bucket,
    Plan,
    ShardedParam,
)


def plan_lower(graph: fx.Graph, kind: str) -> Plan:
    """One bucket for each marker of ``graph``, in graph order. Pure."""
    inputs = _original_inputs(graph)
    output_positions = _output_positions(graph)
    params: dict[int, ShardedParam] = {}
    order: dict[int, int] = {}
    buckets = []
    for node in graph.nodes:
        if node.target not in (*ops.UNSHARD, *ops.REDUCE):
            continue
        param = _param(node, inputs, output_positions)
        order.setdefault(param.input, len(order))
        params.setdefault(param.input, param)
        if node.target is not ops.replicate:
            buckets.append(_bucket(node, order[param.input]))
    return Plan(kind, tuple(params.values()), tuple(buckets))


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


def _output_positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Outputs of a backward graph are the gradients of the forward's inputs, in their order."""
    outputs = graph.output_node().args[0]
    return {n: i for i, n in enumerate(outputs) if isinstance(n, fx.Node)}  # type: ignore[arg-type]


def _param(node: fx.Node, inputs: dict[fx.Node, int], outputs: dict[fx.Node, int]) -> ShardedParam:
    leaf: Any = node.args[0]
    full: torch.Tensor = node.meta["val"]
    if node.target in ops.REDUCE:
        full = leaf.meta["val"]
        position = outputs[node]
    else:
        position = inputs[leaf]
    padded = {ops.unshard: lambda: leaf.meta["val"].shape[0], ops.reduce_grad: lambda: node.args[1]}
    rows = padded[node.target]() if node.target in padded else None
    return ShardedParam(position, tuple(full.shape), str(full.dtype), rows)


def _bucket(node: fx.Node, param: int) -> Bucket:
    kind = {
        ops.unshard: ALL_GATHER,
        ops.reduce_grad: REDUCE_SCATTER,
        ops.all_reduce_grad: ALL_REDUCE,
    }[node.target]
    group = str(node.args[1] if node.target is ops.all_reduce_grad else node.args[2])
    world = group_size(group)
    leaf: Any = node.args[0]
    if kind == ALL_GATHER:
        num_bytes = leaf.meta["val"].nbytes * world
    elif kind == REDUCE_SCATTER:
        num_bytes = node.meta["val"].nbytes * world
    else:
        num_bytes = leaf.meta["val"].nbytes
    return Bucket(kind, (param,), num_bytes, group, world)


def apply_lower(graph: fx.Graph) -> None:
    """Replace every marker, in place."""
    for node in list(graph.nodes):
        if node.target not in (*ops.UNSHARD, *ops.REDUCE):
            continue
        with graph.inserting_before(node):
            lowered = _lower(_Emitter(graph, node.meta), node)
        node.replace_all_uses_with(lowered)
        graph.erase_node(node)


def _lower(emit: _Emitter, node: fx.Node) -> fx.Node:
    source: Any = node.args[0]
    meta = source.meta["val"]
    if node.target is ops.replicate:
        return emit(torch.ops.aten.clone.default, source)
    *sizes, group = [a for a in node.args[1:] if not isinstance(a, bool)]
    world = group_size(group)
    if node.target is ops.all_reduce_grad:
        return ops.all_reduce_mean(emit, source, meta, group, world)
    lower = ops.all_gather_rows if node.target is ops.unshard else ops.reduce_scatter_rows
    return lower(emit, source, meta, sizes[0], group, world)


class _Emitter:
    """Inserts calls into a graph, with the fake values and the origin of the marker they replace."""

    def __init__(self, graph: fx.Graph, origin: dict[str, Any]) -> None:
        self._graph = graph
        self._origin = {k: v for k, v in origin.items() if k not in ("val", "tensor_meta")}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _fake_mode_of(fake_args):
            node.meta = {**self._origin, "val": op(*fake_args, **fake_kwargs)}
        return node


def _fake_mode_of(values: Any) -> Any:
    return next(v.fake_mode for v in values if isinstance(v, torch.Tensor))


def lower(graph: fx.Graph, kind: str) -> Plan:
    plan = plan_lower(graph, kind)
    apply_lower(graph)
    return plan


__all__ = ["BACKWARD", "apply_lower", "lower", "plan_lower"]
