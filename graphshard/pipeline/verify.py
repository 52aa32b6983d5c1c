"""Invariants of a partition and of a lowered graph, checked at every compile.

A violation is a bug of ours, never of the user's; it is raised before the graph can run.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..kinds import HOST_COPIES, TransferKind
from ..ops import collectives, host_copy, markers
from ..ops.nodes import PLANNED, num_bytes
from ..planning.plan import Bucket, Plan, events_by_step

_c10d = torch.ops._c10d_functional
_KINDS: dict[Any, str] = {
    _c10d.all_gather_into_tensor.default: TransferKind.ALL_GATHER,
    _c10d.all_gather_into_tensor_coalesced.default: TransferKind.ALL_GATHER,
    _c10d.reduce_scatter_tensor.default: TransferKind.REDUCE_SCATTER,
    _c10d.reduce_scatter_tensor_coalesced.default: TransferKind.REDUCE_SCATTER,
    collectives.EXCHANGE: TransferKind.REDUCE_SCATTER,
    _c10d.all_reduce.default: TransferKind.ALL_REDUCE,
    _c10d.all_reduce_coalesced.default: TransferKind.ALL_REDUCE,
    host_copy.to_device: TransferKind.COPY_TO_DEVICE,
    host_copy.to_host: TransferKind.COPY_TO_HOST,
}
Event = tuple[str, str, int]
"""launch or wait, kind of collective, and bytes of its full buffers, or its number."""


def verify_partition(forward: fx.GraphModule, derived: list[str], num_outputs: int) -> None:
    """Nothing that only parameters determine is saved for backward (ZeRO-3).

    Args:
        derived: names of the joint graph's nodes that are derived from parameters alone.
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
    """
    outputs: Any = forward.graph.output_node().args[0]
    saved = {n.name for n in outputs[num_outputs:] if isinstance(n, fx.Node)}
    full = sorted(saved.intersection(derived))
    if full:
        raise AssertionError(f"saved for backward, though parameters alone determine it: {full}")


def verify_lowered(graph: fx.Graph, plan: Plan) -> None:
    """The graph is sound, launches and waits for what ``plan`` says in its order, each once."""
    graph.lint()
    left = [node.name for node in graph.nodes if node.target in markers.MARKERS]
    if left:
        raise AssertionError(f"markers {left} were not lowered")
    planned, found = _planned(plan), _found(graph)
    if planned != found:
        raise AssertionError(f"planned {planned}, but the graph does {found}")


def _planned(plan: Plan) -> list[Event]:
    events: list[Event] = []
    numbers: dict[tuple[int, int], int] = {}  # the collective of each buffer of a bucket
    num_launched = 0
    for i, is_wait in itertools.chain(*events_by_step(plan.problem.num_steps, plan.buckets)):
        bucket = plan.buckets[i]
        kind = (
            TransferKind.ALL_REDUCE
            if bucket.kind == TransferKind.ALL_REDUCE_SHARDS
            else bucket.kind
        )
        if is_wait:
            events += [("wait", kind, numbers[i, p]) for p in range(_num_buffers(bucket))]
            continue
        sizes = _collectives(plan, bucket)
        events += [("launch", kind, size) for size in sizes]
        for buffer in range(_num_buffers(bucket)):
            numbers[i, buffer] = num_launched + min(buffer, len(sizes) - 1)
        num_launched += len(sizes)
    return events


def _num_buffers(bucket: Bucket) -> int:
    return len(bucket.transfers if bucket.kind in HOST_COPIES else bucket.buffers)


def _collectives(plan: Plan, bucket: Bucket) -> list[int]:
    """Bytes of each of the bucket's collectives: exchanges cannot be coalesced."""
    transfers = plan.problem.transfers
    dtype = getattr(torch, transfers[bucket.transfers[0]].dtype.removeprefix("torch."))
    if bucket.kind == TransferKind.REDUCE_SCATTER and collectives.exchanges(bucket.group, dtype):
        return [sum(transfers[i].num_bytes for i in parcel) for parcel in bucket.buffers]
    return [bucket.num_bytes]


def _found(graph: fx.Graph) -> list[Event]:
    """A model may have collectives of its own; they are not ours to check."""
    events: list[Event] = []
    launched: dict[fx.Node, tuple[str, int]] = {}  # what is waited for: its kind and number
    num_launched = 0
    for node in graph.nodes:
        if PLANNED not in node.meta:
            continue
        if node.target in _KINDS:
            kind = _kind(node)
            events.append(("launch", kind, _full_bytes(node)))
            buffers = list(node.users) if isinstance(node.meta["val"], list) else [node]
            for buffer in buffers:
                _verify_wait(buffer)
                launched[buffer] = (kind, num_launched)
            num_launched += 1
        elif node.target is _c10d.wait_tensor.default and node.args[0] in launched:
            events.append(("wait", *launched[node.args[0]]))  # others are the host's
    return events


def _kind(node: fx.Node) -> str:
    kind = _KINDS[node.target]
    return (
        TransferKind.ALL_REDUCE_MAX
        if kind == TransferKind.ALL_REDUCE and "max" in node.args
        else kind
    )


def _verify_wait(buffer: fx.Node) -> None:
    waits = [user for user in buffer.users if user.target is _c10d.wait_tensor.default]
    if len(waits) != 1 or len(buffer.users) != 1:
        raise AssertionError(f"{buffer.name} is waited for {len(waits)} times")


def _full_bytes(node: fx.Node) -> int:
    """Bytes of the gathered output, or of a reduction's input."""
    full: Any = node if _KINDS[node.target] == TransferKind.ALL_GATHER else node.args[0]
    tensors = tree_leaves(fx.map_arg(full, lambda n: n.meta["val"]))
    return sum(map(num_bytes, tensors))
