"""Verify every partition, and every lowered graph against its plan.

A violation is a bug in graphshard, and raises an AssertionError before the graph can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch.tensors import tree_leaves
from ..kinds import HOST_COPIES, TransferKind
from ..ops import collectives, host_copy, markers
from ..ops.nodes import PLANNED, WAIT, graph_modules, is_user_launch, num_bytes
from ..passes.describe import describe_user_collective
from ..passes.saving import saved_nodes
from ..planning.buckets import events_by_step
from ..planning.plan import Bucket, Plan, sent_buffers

_c10d = torch.ops._c10d_functional
_KIND_OF_LAUNCH: dict[object, TransferKind] = {
    _c10d.all_gather_into_tensor.default: TransferKind.ALL_GATHER,
    _c10d.all_gather_into_tensor_coalesced.default: TransferKind.ALL_GATHER,
    _c10d.reduce_scatter_tensor.default: TransferKind.REDUCE_SCATTER,
    _c10d.reduce_scatter_tensor_coalesced.default: TransferKind.REDUCE_SCATTER,
    collectives.EXCHANGE: TransferKind.REDUCE_SCATTER,
    _c10d.all_reduce.default: TransferKind.ALL_REDUCE,
    _c10d.all_reduce_coalesced.default: TransferKind.ALL_REDUCE,
    host_copy.copy_to_device: TransferKind.COPY_TO_DEVICE,
    host_copy.copy_to_host: TransferKind.COPY_TO_HOST,
}


@dataclass(frozen=True)
class Launch:
    """The launch of a collective or host copy."""

    kind: TransferKind
    num_bytes: int  # size of its full buffers


@dataclass(frozen=True)
class Wait:
    """The wait for one buffer of a launch."""

    kind: TransferKind
    launch: int  # index of the launch in the graph


Event = Launch | Wait | str  # text for the launch of a user collective


def verify_partition(
    forward: fx.GraphModule, param_derived: Iterable[str], num_outputs: int
) -> None:
    """Check that forward saves no node of ``param_derived`` for backward (ZeRO-3)."""
    saved = {node.name for node in saved_nodes(forward.graph, num_outputs)}
    wrongly_saved = sorted(saved.intersection(param_derived))
    if wrongly_saved:
        raise AssertionError(f"forward saves {wrongly_saved}, which depend on parameters alone")


def verify_lowered(graph: fx.Graph, plan: Plan) -> None:
    """Check that the graph is valid and does what ``plan`` says.

    The graph must launch every collective once and wait for each buffer once, in the plan's order,
    with every launch on the planned side of each user collective. Neither it nor its subgraphs may
    contain markers.
    """
    graph.lint()
    owner = graph.owning_module
    assert owner is not None
    nodes = (node for part in graph_modules(owner) for node in part.graph.nodes)
    left = [node.name for node in nodes if markers.is_marker(node)]
    if left:
        raise AssertionError(f"the {plan.graph} graph has markers that were not lowered: {left}")
    planned, in_graph = _planned_events(plan), _graph_events(graph)
    if planned != in_graph:
        raise AssertionError(f"the plan has {planned}, but the graph has {in_graph}")


def _planned_events(plan: Plan) -> list[Event]:
    events: list[Event] = []
    launch_of: dict[tuple[int, int], int] = {}  # (bucket, buffer) to index of the launch
    num_launched = 0
    problem, users = plan.problem, plan.problem.user_collectives
    for step in events_by_step(problem.num_steps, plan.buckets, users):
        for i, is_wait in step:
            if i >= len(plan.buckets):
                if not is_wait:
                    events.append(str(users[i - len(plan.buckets)]))
                continue
            bucket = plan.buckets[i]
            # In a graph, an all-reduce of shards looks like any other all-reduce.
            over_replicas = bucket.kind == TransferKind.ALL_REDUCE_SHARDS
            kind = TransferKind.ALL_REDUCE if over_replicas else bucket.kind
            waits = bucket.transfers if bucket.kind in HOST_COPIES else bucket.buffers
            buffers = range(len(waits))
            if is_wait:
                events += [Wait(kind, launch_of[i, buffer]) for buffer in buffers]
                continue
            sizes = _launched_bytes(plan, bucket)
            events += [Launch(kind, size) for size in sizes]
            for buffer in buffers:
                launch_of[i, buffer] = num_launched + min(buffer, len(sizes) - 1)
            num_launched += len(sizes)
    return events


def _launched_bytes(plan: Plan, bucket: Bucket) -> list[int]:
    if plan.num_launches(bucket) == 1:
        return [bucket.num_bytes]
    over_replicas = bucket.kind == TransferKind.ALL_REDUCE_SHARDS
    return [
        sum(t.reduced_bytes if over_replicas else t.num_bytes for t in buffer)
        for buffer in sent_buffers(plan.problem.transfers, bucket)
    ]


def _graph_events(graph: fx.Graph) -> list[Event]:
    events: list[Event] = []
    launches: dict[fx.Node, Wait] = {}  # the event of the wait for each buffer
    num_launched = 0
    for node in graph.nodes:
        if is_user_launch(node):
            events.append(str(describe_user_collective(node, launch=0, wait=0)))
        elif PLANNED not in node.meta:
            continue
        elif node.target in _KIND_OF_LAUNCH:
            kind = _launch_kind(node)
            events.append(Launch(kind, _full_bytes(node)))
            buffers = list(node.users) if isinstance(node.meta["val"], list) else [node]
            for buffer in buffers:
                _verify_one_wait(buffer)
                launches[buffer] = Wait(kind, num_launched)
            num_launched += 1
        elif node.target is WAIT and node.args[0] in launches:
            # Our other waits, which plans do not list, make the host wait for copies to the host.
            events.append(launches[node.args[0]])
    return events


def _launch_kind(node: fx.Node) -> TransferKind:
    kind = _KIND_OF_LAUNCH[node.target]
    is_max = kind == TransferKind.ALL_REDUCE and "max" in node.args
    return TransferKind.ALL_REDUCE_MAX if is_max else kind


def _verify_one_wait(buffer: fx.Node) -> None:
    users = list(buffer.users)
    if [user.target for user in users] != [WAIT]:
        raise AssertionError(f"{buffer.name} must have one user, its wait, but has {users}")


def _full_bytes(node: fx.Node) -> int:
    """Return the size in bytes of an all-gather's output, or of the input of another launch."""
    is_gather = _KIND_OF_LAUNCH[node.target] == TransferKind.ALL_GATHER
    full: Any = node if is_gather else node.args[0]
    return sum(map(num_bytes, tree_leaves(fx.map_arg(full, lambda n: n.meta["val"]))))
