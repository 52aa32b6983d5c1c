"""Forward, backward and inference graph: markers become functional collectives, as planned.

A bucket is launched before the step that its plan says, and waited for before another one:

    before   a = mm(..)   w = unshard(shard)   b = mm(a, w)
    after    f = all_gather_into_tensor(shard)   a = mm(..)   w = wait_tensor(f)   b = mm(a, w)

Shards that the host keeps are copied to the device before, and reduced ones to the host behind. Small
tensors of a bucket share a buffer (``copy_in``, ``unpack``); several buffers travel coalesced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphshard.kinds import HOST_COPIES, TransferKind
from graphshard.ops import collectives
from graphshard.ops import markers as marker_ops
from graphshard.ops.collectives import CollectiveInput, world_of
from graphshard.ops.emitter import Emitter
from graphshard.ops.float8_math import convert
from graphshard.ops.nodes import PLANNED, is_view, num_bytes
from graphshard.planning.plan import Bucket, PlanParam, Transfer, events_by_step, next_in_chain


def markers_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in marker_ops.MARKERS]


def describe_params(graph: fx.Graph) -> dict[fx.Node, PlanParam]:
    """The parameter of every marker of ``graph`` that has one."""
    positions = {**_original_inputs(graph), **_gradient_outputs(graph)}
    of = {
        marker: positions[marker if marker in positions else source_of(marker)]
        for marker in markers_of(graph)
        if marker.target in marker_ops.OF_PARAMS
    }
    # What backward gathers may be another part than the shard that its gradient is reduced to.
    last = {position: marker for marker, position in of.items()}
    return {marker: _param(last[position], position) for marker, position in of.items()}


def describe_transfer(marker: fx.Node, param: int | None) -> Transfer:
    """What travels for ``marker``, of the parameter at position ``param`` of the plan."""
    if (kind := marker_ops.KIND_OF_MARKER[marker.target]) in HOST_COPIES:
        return _describe_copy(marker, kind)
    group, replicas = (marker_ops.arguments(marker).get(name, "") for name in ("group", "replicas"))
    replicas = replicas if marker.target is marker_ops.reduce_grad else ""
    world, stride = world_of(group)
    num_replicas, replica_stride = world_of(replicas) if replicas else (1, 1)
    piece = piece_of(marker)
    shard = (source_of(marker) if kind == TransferKind.ALL_GATHER else marker).meta["val"]
    size = shard.numel() * (
        world if kind in (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER) else 1
    )
    return Transfer(
        param=param,
        kind=kind,
        num_bytes=size * piece.dtype.itemsize,
        dtype=str(piece.dtype),
        shard_bytes=shard.nbytes,
        casts=piece.value.dtype != piece.dtype,
        group=group,
        world=world,
        ready=0,
        due=0,
        last=0,
        stride=stride,
        replicas=replicas,
        num_replicas=num_replicas,
        replica_stride=replica_stride,
        host=_is_on_host(marker),
    )


def _describe_copy(marker: fx.Node, kind: TransferKind) -> Transfer:
    value = marker.meta["val"]
    return Transfer(
        None, kind, num_bytes(value), str(value.dtype), 0, False, "", 1, ready=0, due=0, last=0
    )


def _is_on_host(marker: fx.Node) -> bool:
    """Whether the shard is kept there that it gathers, or that it reduces to."""
    given = marker_ops.arguments(marker)
    decides = "device" if marker.target is marker_ops.unshard else "host"
    return bool(given.get(decides))


def piece_of(marker: fx.Node) -> CollectiveInput:
    """What a marker that communicates sends."""
    source, value, given = source_of(marker), marker.meta["val"], marker_ops.arguments(marker)
    if marker.target is marker_ops.unshard:
        used = marker_ops.used_dtype(source.meta["val"], given["dtype"])
        scales = given["scales"], given["at"]
        return CollectiveInput(source, value.shape[0], value.dtype, used, *scales)
    if marker.target is marker_ops.max_over_ranks:
        return CollectiveInput(source, 0, value.dtype, value.dtype)
    rows = value.shape[0] if marker.target is marker_ops.reduce_grad else 0
    dtype = marker_ops.sent_dtype(
        source.meta["val"], marker_ops.KIND_OF_MARKER[marker.target], given["reduce_dtype"]
    )
    return CollectiveInput(source, rows, dtype, value.dtype, partial=given.get("partial"))


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
        if isinstance(node, fx.Node) and node.target in marker_ops.REDUCE
    }


def _param(marker: fx.Node, position: int) -> PlanParam:
    gathers = marker.target in marker_ops.UNSHARD
    full, shard = (marker, source_of(marker)) if gathers else (source_of(marker), marker)
    value = full.meta["val"]
    splits = marker.target in (marker_ops.unshard, marker_ops.reduce_grad)
    padded_rows = shard.meta["val"].shape[0] if splits else None
    return PlanParam(position, tuple(value.shape), str(shard.meta["val"].dtype), padded_rows)


def apply_buckets(
    graph: fx.Graph,
    buckets: Sequence[Bucket],
    markers: Sequence[fx.Node],
    steps: Sequence[fx.Node],
) -> None:
    """Replace ``markers``, by position in ``Problem.transfers``, by the collectives of ``buckets``.

    Args:
        steps: the first node of every step.
    """
    begun: dict[int, list[fx.Node]] = {}
    left: dict[int, list[fx.Node]] = {}  # by bucket, what the one before it left
    after = next_in_chain(buckets)
    for at, happening in zip([*steps, graph.output_node()], events_by_step(len(steps), buckets)):
        with graph.inserting_before(at):
            for i, is_wait in happening:
                bucket = buckets[i]
                of = [[markers[i] for i in parcel] for parcel in bucket.buffers]
                emit = Emitter(graph, of[0][0].meta, **{PLANNED: True})
                if not is_wait:
                    begun[i] = _begin(emit, bucket, of, left.get(i))
                    continue
                done = [_receive(emit, bucket, buffer) for buffer in begun[i]]
                then = buckets[after[i]].kind if i in after else None
                if (
                    then not in (TransferKind.ALL_GATHER, TransferKind.ALL_REDUCE_SHARDS)
                    and bucket.kind not in HOST_COPIES
                ):
                    done = _copy_out(emit, bucket, of, done)
                if then is not None:
                    left[after[i]] = done
                    continue
                for marker, node in zip(itertools.chain(*of), done, strict=True):
                    marker.replace_all_uses_with(node)
                    if (
                        bucket.kind == TransferKind.COPY_TO_HOST
                        and marker.target is not marker_ops.offload_activation
                    ):
                        _have_host_wait(emit, node)
    for marker in markers:
        graph.erase_node(marker)


def _have_host_wait(emit: Emitter, copied: fx.Node) -> None:
    """Where a copy is used: mostly, behind all else."""
    users = list(copied.users)
    with copied.graph.inserting_before(min(users)):
        there = collectives.wait(emit, copied)
    for user in users:
        user.replace_input_with(copied, there)


def _begin(
    emit: Emitter,
    bucket: Bucket,
    markers: Sequence[Sequence[fx.Node]],
    left: list[fx.Node] | None,
) -> list[fx.Node]:
    """Launch a bucket: what to wait for.

    Args:
        markers: of every parcel.
        left: by the bucket that this one goes on with, if there is one.
    """
    world = bucket.group, bucket.world
    first = marker_ops.arguments(markers[0][0])
    if bucket.kind == TransferKind.COPY_TO_DEVICE:
        sources = [source_of(marker) for parcel in markers for marker in parcel]
        return collectives.begin_copy(emit, sources, first["device"])
    if bucket.kind == TransferKind.COPY_TO_HOST:
        sources = [source_of(marker) for marker in markers[0]] if left is None else left
        return collectives.begin_copy(emit, sources, first["host"])
    parcels = [[piece_of(marker) for marker in parcel] for parcel in markers]
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        assert left is not None
        return collectives.send_on(emit, parcels, left, *world)
    if left is not None:
        loaded = iter(left)
        parcels = [[piece._replace(source=next(loaded)) for piece in of] for of in parcels]
    return collectives.send(emit, bucket.kind, parcels, *world)


def _receive(emit: Emitter, bucket: Bucket, buffer: fx.Node) -> Any:
    if bucket.kind in HOST_COPIES:
        return collectives.wait(emit, buffer)
    return collectives.receive(emit, bucket.kind, buffer, bucket.group, bucket.world)


def _copy_out(
    emit: Emitter,
    bucket: Bucket,
    markers: Sequence[Sequence[fx.Node]],
    done: Sequence[fx.Node],
) -> list[fx.Node]:
    """What every marker stands for, of a bucket's buffers."""
    kind = (
        TransferKind.REDUCE_SCATTER
        if bucket.kind == TransferKind.ALL_REDUCE_SHARDS
        else bucket.kind
    )
    found = []
    for parcel, buffer in zip(markers, done, strict=True):
        pieces = [piece_of(marker) for marker in parcel]
        found += collectives.copy_out(emit, kind, pieces, buffer, bucket.world)
    return found


def apply_replicate(graph: fx.Graph, markers: Iterable[fx.Node]) -> None:
    """A replicated parameter is used as it is; what the graph returns is no alias of it."""
    for marker in markers:
        with graph.inserting_before(marker):
            emit, used = Emitter(graph, marker.meta), marker.meta["val"].dtype
            source = source_of(marker)
            if used != source.meta["val"].dtype:
                copy = emit(convert, source, used)
            else:
                copy = emit(torch.ops.aten.clone.default, source) if _returned(marker) else source
        marker.replace_all_uses_with(copy)
        graph.erase_node(marker)


def _returned(node: fx.Node) -> bool:
    """Whether the graph returns it, or a view of it."""
    return any(user.op == "output" or (is_view(user) and _returned(user)) for user in node.users)
