"""Forward, backward and inference graph: markers become functional collectives.

A parameter that travels alone, waited for where it is used:

    before   w = unshard(shard, rows, group, reshard)
    after    a = all_gather_into_tensor(shard, world, group);  w = wait_tensor(a)[:rows]

    before   g = reduce_grad(grad, padded_rows, group)
    after    r = reduce_scatter_tensor(pad(grad), "avg", world, group);  g = wait_tensor(r)

Several that share a buffer: ``cat`` before, a slice of the result for each after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphshard import ops
from graphshard._torch import fake_mode_of, group_size
from graphshard.plan import ALL_GATHER, ALL_REDUCE, PLANNED, REDUCE_SCATTER, Bucket, ShardedParam

_KINDS: dict[Any, str] = {
    ops.unshard: ALL_GATHER,
    ops.reduce_grad: REDUCE_SCATTER,
    ops.all_reduce_grad: ALL_REDUCE,
}
# Other entries describe the marker's own call (Inductor reads its eager inputs), not its origin.
_ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "custom")


def markers_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in (*ops.UNSHARD, *ops.REDUCE)]


def describe_params(graph: fx.Graph) -> dict[fx.Node, ShardedParam]:
    """The parameter of every marker of ``graph``."""
    positions = {**_original_inputs(graph), **_gradient_outputs(graph)}
    return {
        marker: _param(marker, positions[marker if marker in positions else source_of(marker)])
        for marker in markers_of(graph)
    }


def source_of(marker: fx.Node) -> fx.Node:
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
    full, shard = (marker, source_of(marker)) if gathers else (source_of(marker), marker)
    value: torch.Tensor = full.meta["val"]
    splits = marker.target in (ops.unshard, ops.reduce_grad)
    padded_rows = shard.meta["val"].shape[0] if splits else None
    return ShardedParam(position, tuple(value.shape), str(value.dtype), padded_rows)


def describe_bucket(markers: list[fx.Node], params: tuple[int, ...]) -> Bucket:
    """``markers`` travel together; ``params`` are their positions in the plan."""
    # The group is the only text among a marker's arguments.
    group = next(arg for arg in markers[0].args if isinstance(arg, str))
    world = group_size(group)
    kind = _KINDS[markers[0].target]
    shards = [source_of(m) if kind == ALL_GATHER else m for m in markers]
    num_shards = 1 if kind == ALL_REDUCE else world
    num_bytes = sum(shard.meta["val"].nbytes for shard in shards) * num_shards
    return Bucket(kind, params, num_bytes, group, world)


def apply_bucket(graph: fx.Graph, markers: list[fx.Node], bucket: Bucket, at: fx.Node) -> None:
    """Replace ``markers`` by the one collective of ``bucket``, launched before ``at``."""
    with graph.inserting_before(at):
        emit = _Emitter(graph, at.meta)
        lowered = [_alone(emit, markers[0], bucket)] if len(markers) == 1 else None
        lowered = lowered or _packed(emit, markers, bucket)
    for marker, node in zip(markers, lowered, strict=True):
        marker.replace_all_uses_with(node)
        graph.erase_node(marker)


def apply_replicate(graph: fx.Graph, markers: Iterable[fx.Node]) -> None:
    """A replicated parameter needs no communication in forward."""
    for marker in markers:
        with graph.inserting_before(marker):
            copy = _Emitter(graph, marker.meta)(torch.ops.aten.clone.default, source_of(marker))
        marker.replace_all_uses_with(copy)
        graph.erase_node(marker)


def _alone(emit: _Emitter, marker: fx.Node, bucket: Bucket) -> fx.Node:
    source, group, world = source_of(marker), bucket.group, bucket.world
    value = source.meta["val"]
    if bucket.kind == ALL_REDUCE:
        return ops.all_reduce_mean(emit, source, value, group, world)
    rows = marker.meta["val"].shape[0]
    one = ops.all_gather_rows if bucket.kind == ALL_GATHER else ops.reduce_scatter_rows
    return one(emit, source, value, rows, group, world)


def _packed(emit: _Emitter, markers: list[fx.Node], bucket: Bucket) -> list[fx.Node]:
    sources = [source_of(marker) for marker in markers]
    many = ops.all_gather_packed if bucket.kind == ALL_GATHER else ops.reduce_scatter_packed
    metas = [source.meta["val"] for source in sources]
    rows = [marker.meta["val"].shape[0] for marker in markers]
    return many(emit, sources, metas, rows, bucket.group, bucket.world)


class _Emitter:
    """Inserts calls into a graph, with the fake values and the origin of the marker they replace."""

    def __init__(self, graph: fx.Graph, origin: dict[str, Any]) -> None:
        self._graph = graph
        self._origin = {k: v for k, v in origin.items() if k in _ORIGIN}

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode_of(fake_args):
            value = op(*fake_args, **fake_kwargs)
        node.meta = {**self._origin, PLANNED: True, "val": value}
        return node
