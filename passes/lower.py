"""Forward, backward and inference graphs: replace markers with functional collectives, as planned.

A bucket is launched before one step and waited for before another:

    before   a = mm(..)   w = unshard(shard)   b = mm(a, w)
    after    f = all_gather_into_tensor(shard)   a = mm(..)   w = wait_tensor(f)   b = mm(a, w)

Host shards are copied to the device before the gather, and their reduced gradients to the host
after the reduction. Small tensors of a bucket share a buffer (``copy_in``, ``copy_out``); several
buffers are sent as one coalesced collective, or as one all-to-all each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import fx

from graphshard._torch.inductor import force_realize
from graphshard.kinds import HOST_COPIES, TransferKind
from graphshard.ops import collectives, markers
from graphshard.ops.collectives import CollectiveInput
from graphshard.ops.float8_math import convert
from graphshard.ops.marker_specs import OffloadSpec, ReduceGradSpec, ReloadSpec, UnshardSpec
from graphshard.ops.nodes import PLANNED, REASON, Emitter, is_returned, root_of, value_of
from graphshard.passes.build_problem import GraphProblem, build_problem
from graphshard.passes.contract import PassContext
from graphshard.passes.describe import number_params, source_of
from graphshard.planning.buckets import events_by_step, next_in_chain
from graphshard.planning.plan import Bucket, Plan

BufferMarkers: TypeAlias = Sequence[fx.Node]  # markers of transfers that share one buffer


def lower(gm: fx.GraphModule, context: PassContext) -> None:
    """Plan the transfers of a graph, and replace its markers with bucketed collectives, in place.

    Stores the plan in ``context.plan``.
    """
    assert context.kind is not None and context.plan_buckets is not None
    params, param_of = number_params(gm.graph)
    read = build_problem(gm.graph, context.kind, context.cost_model, param_of)
    buckets = context.plan_buckets(read.problem, params, context.cost_model)
    gathered = [node for node in read.markers if node.target is markers.unshard]
    context.plan = Plan(
        params=params,
        problem=read.problem,
        buckets=buckets,
        kept=tuple(
            param_of[node] for node in gathered if UnshardSpec.of_node(node).regather_group is None
        ),
        reasons=tuple(
            (i, node.meta[REASON]) for node, i in param_of.items() if REASON in node.meta
        ),
    )
    _apply_buckets(gm.graph, buckets, read)
    _apply_replicate(gm.graph, [node for node in param_of if node.target is markers.replicate])


def _apply_buckets(graph: fx.Graph, buckets: Sequence[Bucket], read: GraphProblem) -> None:
    writer = _BucketWriter(graph, buckets, read.markers)
    events = events_by_step(len(read.steps), buckets)
    for node, step_events in zip([*read.steps, graph.output_node()], events):
        with graph.inserting_before(node):
            for i, is_wait in step_events:
                writer.wait(i) if is_wait else writer.launch(i)
    writer.make_host_wait()  # last, because nothing is launched while the host waits
    for marker in read.markers:
        graph.erase_node(marker)


class _BucketWriter:
    """A writer of the launches and waits of buckets, at a graph's current insertion point."""

    def __init__(
        self, graph: fx.Graph, buckets: Sequence[Bucket], marker_nodes: Sequence[fx.Node]
    ) -> None:
        self._graph = graph
        self._buckets = buckets
        self._marker_nodes = marker_nodes
        self._next = next_in_chain(buckets)
        self._launched: dict[int, list[fx.Node]] = {}  # results to wait for, keyed by bucket
        self._copied: list[fx.Node] = []  # copies that the host reads
        self._handed_on: dict[int, list[fx.Node]] = {}  # predecessor's results, keyed by bucket

    def launch(self, position: int) -> None:
        bucket, nodes = self._buckets[position], self._markers_of(position)
        received = self._handed_on.get(position)
        self._launched[position] = _launch(self._emitter(nodes), bucket, nodes, received)

    def wait(self, position: int) -> None:
        bucket, nodes = self._buckets[position], self._markers_of(position)
        emit, next_position = self._emitter(nodes), self._next.get(position)
        next_kind = None if next_position is None else self._buckets[next_position].kind
        results = _wait(emit, bucket, nodes, self._launched[position])
        # Skip the copy-out if the next bucket in the chain takes whole buffers.
        takes_buffers = (TransferKind.ALL_GATHER, TransferKind.ALL_REDUCE_SHARDS)
        if bucket.kind not in HOST_COPIES and next_kind not in takes_buffers:
            results = _copy_out(emit, bucket, nodes, results)
        # Results go to the next bucket in the chain, or replace the markers.
        if next_position is not None:
            self._handed_on[next_position] = results
            return
        for marker, result in zip(itertools.chain(*nodes), results, strict=True):
            marker.replace_all_uses_with(result)
            if bucket.kind == TransferKind.COPY_TO_HOST and _host_reads(marker):
                self._copied.append(result)

    def make_host_wait(self) -> None:
        """Make the host wait for each copy that it reads before the copy's first use."""
        if not self._copied:
            return
        emit = Emitter(self._graph, self._copied[0].meta, **{PLANNED: True})
        for copied in self._copied:
            users = list(copied.users)
            with self._graph.inserting_before(min(users)):
                arrived = collectives.wait_tensor(emit, copied)
            for user in users:
                user.replace_input_with(copied, arrived)

    def _markers_of(self, position: int) -> list[BufferMarkers]:
        buffers = self._buckets[position].buffers
        return [[self._marker_nodes[i] for i in buffer] for buffer in buffers]

    def _emitter(self, nodes: Sequence[BufferMarkers]) -> Emitter:
        return Emitter(self._graph, nodes[0][0].meta, **{PLANNED: True})


def _host_reads(marker: fx.Node) -> bool:
    """Return whether the host reads what a marker copies: gradients, but not activations."""
    return marker.target is not markers.offload_activation


def _launch(
    emit: Emitter,
    bucket: Bucket,
    nodes: Sequence[BufferMarkers],
    received: list[fx.Node] | None,
) -> list[fx.Node]:
    """Launch a bucket, given its predecessor's results, if any; return the results to wait for."""
    if bucket.kind == TransferKind.COPY_TO_DEVICE:
        sources = [source_of(marker) for marker in itertools.chain(*nodes)]
        to_device = markers.read(nodes[0][0])
        assert isinstance(to_device, UnshardSpec | ReloadSpec) and to_device.device is not None
        return collectives.launch_host_copies(emit, sources, to_device.device, host_reads=False)
    if bucket.kind == TransferKind.COPY_TO_HOST:
        sources = [source_of(marker) for marker in nodes[0]] if received is None else received
        to_host, host_reads = markers.read(nodes[0][0]), _host_reads(nodes[0][0])
        assert isinstance(to_host, ReduceGradSpec | OffloadSpec) and to_host.host_memory is not None
        if not host_reads:
            # Otherwise Inductor might compute an activation only when its copy is launched, which
            # may be late.
            for source in sources:
                force_realize(root_of(source))
        memory = to_host.host_memory
        return collectives.launch_host_copies(emit, sources, memory, host_reads=host_reads)
    buffers = _inputs_of(bucket, nodes)
    if bucket.kind == TransferKind.ALL_REDUCE_SHARDS:
        assert received is not None
        return collectives.launch_replica_reduce(
            emit, buffers, received, bucket.group, bucket.world
        )
    if received is not None:
        copies = iter(received)
        buffers = [[sent._replace(source=next(copies)) for sent in inputs] for inputs in buffers]
    return collectives.launch_bucket(emit, bucket.kind, buffers, bucket.group, bucket.world)


def _inputs_of(bucket: Bucket, nodes: Sequence[BufferMarkers]) -> list[list[CollectiveInput]]:
    return [[_input_of(bucket, marker) for marker in buffer] for buffer in nodes]


def _input_of(bucket: Bucket, marker: fx.Node) -> CollectiveInput:
    spec = markers.read(marker)
    if isinstance(spec, ReduceGradSpec):
        return spec.collective_input(exchanges=bucket.exchanges)
    return spec.collective_input()


def _wait(
    emit: Emitter, bucket: Bucket, nodes: Sequence[BufferMarkers], launched: Sequence[fx.Node]
) -> list[fx.Node]:
    if bucket.kind in HOST_COPIES:
        return [collectives.wait_tensor(emit, copy) for copy in launched]
    reduces = bucket.kind == TransferKind.REDUCE_SCATTER
    summed_in = _input_of(bucket, nodes[0][0]).summed_in if reduces else None
    return [
        collectives.wait_buffer(emit, bucket.kind, buffer, bucket.group, bucket.world, summed_in)
        for buffer in launched
    ]


def _copy_out(
    emit: Emitter, bucket: Bucket, nodes: Sequence[BufferMarkers], buffers: Sequence[fx.Node]
) -> list[fx.Node]:
    return [
        result
        for inputs, buffer in zip(_inputs_of(bucket, nodes), buffers, strict=True)
        for result in collectives.results_in_buffer(emit, bucket.kind, inputs, buffer, bucket.world)
    ]


def _apply_replicate(graph: fx.Graph, marker_nodes: Iterable[fx.Node]) -> None:
    for marker in marker_nodes:
        source, dtype = source_of(marker), value_of(marker).dtype
        with graph.inserting_before(marker):
            emit = Emitter(graph, marker.meta)
            if dtype != value_of(source).dtype:
                result = emit(convert, source, dtype)
            elif is_returned(marker):  # must own its memory, like the result of a gather
                result = emit(torch.ops.aten.clone.default, source)
            else:
                result = source
        marker.replace_all_uses_with(result)
        graph.erase_node(marker)
