"""Convert a normalized forward, backward or inference graph to a scheduling ``Problem``.

A step is a run of compute nodes. A new step starts where a transfer becomes ready to launch or must
have arrived, and where the model itself launches a collective or waits for one:

    graph    w = unshard(..)   a = x @ w   b = a.relu()   v = unshard(..)   t = v.t()   c = b @ t
    steps                     [a           b          ]                    [t           c       ]
"""

from __future__ import annotations

import dataclasses
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from graphshard._torch.aot_graphs import is_recomputed, is_tangent
from graphshard._torch.tensors import storage_of, tree_leaves
from graphshard.cost.fusion import GraphValues, UnmaterializedValues
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind
from graphshard.ops import markers
from graphshard.ops.groups import keeps_send_copies
from graphshard.ops.marker_specs import ReloadSpec, UnshardSpec
from graphshard.ops.nodes import (
    HELD_BYTES,
    WAIT,
    WHOLE_SHARD,
    is_user_launch,
    is_view,
    memory_bytes,
    num_in_memory,
    root_of,
    users_through_views,
    value_of,
)
from graphshard.passes.describe import describe_transfers, describe_user_collective, source_of
from graphshard.planning.live_bytes import Span, sum_spans
from graphshard.planning.plan import Problem, Transfer


class GraphProblem(NamedTuple):
    """A graph's ``Problem``, with the node of each transfer and step."""

    problem: Problem
    markers: list[fx.Node]  # marker of each transfer
    steps: list[fx.Node]  # first node of each step
    step_of: dict[fx.Node, int]


class _Reach(NamedTuple):
    """The positions of compute nodes that limit when a transfer can take place."""

    ready: int  # earliest launch: right before this node
    due: int  # latest wait: right before this node
    last: int  # last use of the result


def build_problem(
    graph: fx.Graph, kind: GraphKind, cost_model: CostModel, param_of: Mapping[fx.Node, int]
) -> GraphProblem:
    """Return the problem of a normalized graph, given the parameter number of each marker."""
    transfers = describe_transfers(graph, param_of)
    values = GraphValues(graph, cost_model.device_type)
    compute_us = cost_model.compute_us(graph, values)
    nodes = _compute_nodes(graph)
    position = {node: i for i, node in enumerate(nodes)}
    unmaterialized = cost_model.unmaterialized(values)
    last_uses = _last_uses(graph, position, unmaterialized.inlined)
    reaches = [_reach(marker, position, last_uses[marker]) for marker in transfers]
    bounds = {p for reach in reaches for p in (reach.ready, reach.due)}
    user_waits = _user_waits(nodes, position)
    for launch, wait in user_waits.items():  # a launch is a step of its own
        bounds |= {position[launch], position[launch] + 1, wait}
    starts = sorted({0, *bounds} - {len(nodes)}) if nodes else []
    ends = [*starts[1:], len(nodes)]
    runs_at, last_runs = position, last_uses
    if cost_model.fuses:
        runs_at = _positions_of_kernels(position, values, unmaterialized.inlined)
        last_runs = _last_uses(graph, runs_at, unmaterialized.inlined)
    alive = _alive_bytes(graph, kind, runs_at, unmaterialized, position)
    boundaries = [*starts, len(nodes)]  # first position of each step, then the graph's end
    placed = [_placed(t, reach, starts) for t, reach in zip(transfers.values(), reaches)]
    early = _freed_early(placed, [last_runs[marker] for marker in transfers], boundaries)
    is_backward = kind == GraphKind.BACKWARD
    problem = Problem(
        graph=kind,
        steps=tuple(nodes[start].name for start in starts),
        compute_us=tuple(
            sum(compute_us.get(node, 0.0) for node in nodes[start:end])
            for start, end in zip(starts, ends)
        ),
        fixed_bytes=tuple(
            max(map(operator.sub, alive.at[start:end], early[start:end]))
            for start, end in zip(starts, ends)
        ),
        fixed_boundary_bytes=tuple(alive.before[boundary] for boundary in boundaries),
        transfers=tuple(placed),
        copies_sent=any(keeps_send_copies(t.group) for t in placed if t.group),
        user_collectives=tuple(
            describe_user_collective(
                launch, bisect_left(starts, position[launch]), bisect_left(starts, wait)
            )
            for launch, wait in user_waits.items()
        ),
        peak_us=cost_model.peak_us(n for n in nodes if not (is_backward and is_recomputed(n))),
    )
    steps = [nodes[start] for start in starts]
    return GraphProblem(problem, list(transfers), steps, _step_of(graph, steps))


def _compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    around = ("placeholder", "output")
    return [node for node in graph.nodes if node.op not in around and not markers.is_marker(node)]


def _user_waits(nodes: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the position of the first wait for each of the user's launches, in graph order.

    A launch without a wait gets the graph's end, or the next position if the operator itself waits.
    """
    waits = {}
    for node in filter(is_user_launch, nodes):
        # A coalesced collective returns a list, whose items are waited for one by one.
        users = (*node.users, *(user for part in node.users for user in part.users))
        waited = [position[user] for user in users if user.target is WAIT]
        waits_itself = getattr(node.target, "namespace", "") == "_dtensor"
        waits[node] = min(waited, default=position[node] + 1 if waits_itself else len(nodes))
    return waits


def _step_of(graph: fx.Graph, steps: Sequence[fx.Node]) -> dict[fx.Node, int]:
    # Markers and inputs belong to the step around them.
    numbers, step = {node: i for i, node in enumerate(steps)}, 0
    return {node: (step := numbers.get(node, step)) for node in graph.nodes}


def _placed(transfer: Transfer, reach: _Reach, starts: list[int]) -> Transfer:
    return dataclasses.replace(
        transfer,
        ready=bisect_left(starts, reach.ready),
        due=bisect_left(starts, reach.due),
        last=bisect_right(starts, reach.last) - 1,
    )


def _reach(marker: fx.Node, position: Mapping[fx.Node, int], last_use: int) -> _Reach:
    end = len(position)
    due = min((position.get(user, end) for user in marker.users), default=end)
    if marker.target is markers.unshard:
        scales = UnshardSpec.of_node(marker).scales
        ready = position.get(scales, -1) + 1 if isinstance(scales, fx.Node) else 0
        return _Reach(ready, due, last_use)
    if marker.target is markers.reload_activation:
        return _Reach(0, due, last_use)
    source = source_of(marker)
    if marker.target is markers.offload_activation:
        # Not ready before the last use: an earlier copy could not free the activation's memory.
        used = [
            position[n] for n in (source, *users_through_views(root_of(source))) if n in position
        ]
        return _Reach(max(used) + 1, end, end - 1)
    ready = position.get(source, -1) + 1
    return _Reach(ready, max(ready, due), end - 1)


def _freed_early(
    transfers: Sequence[Transfer], last_runs: Sequence[int], boundaries: Sequence[int]
) -> list[int]:
    """Return, for each node, the bytes of fetched values last used before it in the same step."""
    # A schedule counts a fetched value until the end of the last step that uses it.
    spans = (
        Span(max(last_run, boundaries[t.last]) + 1, boundaries[t.last + 1], t.num_bytes)
        for t, last_run in zip(transfers, last_runs)
        if t.kind.is_fetch
    )
    return sum_spans(spans, boundaries[-1])


def _last_uses(
    graph: fx.Graph, position: Mapping[fx.Node, int], inlined: Container[fx.Node]
) -> dict[fx.Node, int]:
    """Return the position of each node's last use, or the last position if the graph returns it."""
    end, last = len(position) - 1, dict[fx.Node, int]()
    for node in reversed(graph.nodes):
        # Uses of views count. So do uses of an inlined value: its users recompute it.
        users = (
            last[user] if is_view(user) or user in inlined else position.get(user, end)
            for user in node.users
        )
        last[node] = max(users, default=position.get(node, end))
    return last


def _positions_of_kernels(
    position: Mapping[fx.Node, int], values: GraphValues, inlined: Container[fx.Node]
) -> dict[fx.Node, int]:
    """Return the position at which each node runs if Inductor fuses kernels."""
    last = len(position) - 1
    runs_at, waited_at = dict(position), _waits(position, values)
    read: dict[fx.Node, set[fx.Node]] = {}  # values that each node's kernel reads from memory
    for node in values.kinds:
        roots = {values.roots[used] for used in node.all_input_nodes}
        read[node] = set().union(*(read[r] if r in inlined else {r} for r in roots))
    # A kernel runs at the position of its first node (``min_order`` in
    # torch/_inductor/scheduler.py), or once all inputs are computed and waited for, if later.
    for kernel in values.fused_kernels:
        nodes = [node for node in kernel.nodes if node in position]
        sources = set().union(*(read[node] for node in nodes)) - set(nodes)
        start = min((position[node] for node in nodes), default=0)
        for source in sources:
            start = max(start, runs_at.get(source, -1) + 1, waited_at.get(source, 0))
        runs_at |= dict.fromkeys(nodes, min(last, start))
    return runs_at


def _waits(position: Mapping[fx.Node, int], values: GraphValues) -> dict[fx.Node, int]:
    return {
        node: min((position[user] for user in node.users if user in position), default=0)
        for node in values.kinds
        if markers.is_marker(node)
    }


class _AliveBytes(NamedTuple):
    at: list[int]  # bytes alive while the node runs
    before: list[int]  # bytes alive before the node runs; the last entry is the graph's end


def _alive_bytes(
    graph: fx.Graph,
    kind: GraphKind,
    position: Mapping[fx.Node, int],  # position at which each node runs
    unmaterialized: UnmaterializedValues,
    written: Mapping[fx.Node, int],  # position of each node in the graph
) -> _AliveBytes:
    """Return the bytes alive at each position, except those counted by transfers.

    Transfers count gathered parameters and reloaded activations. They count full gradients and
    offloaded activations only once these are ready to be sent.
    """
    end = len(position)
    holders: dict[fx.Node, set[fx.Node]] = {}  # nodes whose memory holds each value
    last_use: dict[fx.Node, int] = {}
    for node in graph.nodes:
        results = results_of(node)
        read = set().union(*(holders[used] for used in node.all_input_nodes if not results))
        is_marker = markers.is_marker(node)
        used = _needed_until(node, written) if is_marker else position.get(node, end)
        last_use |= {holder: max(last_use.get(holder, -1), used) for holder in read}
        if _is_cast_copy(node):
            holders[node] = {node}
        elif is_marker or waits_on_host(node) or node in unmaterialized.inside:
            holders[node] = set()
        elif node in unmaterialized.inlined:
            holders[node] = read
        elif results is not None and isinstance(node.meta.get("val"), torch.Tensor):
            holders[node] = {node} if holders[results] else set()
        else:
            shares = is_view(node) or node.target is WAIT
            # Some views are of a constant, such as the conjugate of ``1j``.
            holders[node] = holders.get(node.args[0], {node}) if shares else {node}
        if node.op == "placeholder":
            is_freed = kind == GraphKind.BACKWARD and not _is_shard(node)
            last_use[node] = -1 if is_freed else end
    owners = [n for n, own in holders.items() if n in own and n.op != "output"]
    at, before = [], []
    for node in owners:
        results = results_of(node)
        begin = position.get(results or node, -1)
        if _is_cast_copy(node):  # made right before its first use
            begin = min(position.get(user, end) for user in node.users)
        last = max(last_use.get(node, begin), begin)
        # At ``begin``, a multi-output operator counts the bytes of all its results.
        counted = begin + 1 if results else max(begin, 0)
        at.append(Span(counted, min(last + 1, end), _memory_bytes(node)))
        before.append(Span(begin + 1, last + 1, _memory_bytes(node)))
    return _AliveBytes(sum_spans(at, end), sum_spans(before, end + 1))


def results_of(node: fx.Node) -> fx.Node | None:
    """Return the multi-output operator that a ``getitem`` node reads, or None."""
    root = root_of(node) if node.target is operator.getitem else None
    return None if root is None or isinstance(root.meta.get("val"), torch.Tensor) else root


def _needed_until(marker: fx.Node, written: Mapping[fx.Node, int]) -> int:
    """Return the last position at which a marker's source is not yet counted by its transfer."""
    source = source_of(marker)
    if HELD_BYTES in source.meta:  # a secondary shard counts until its parameter is first used
        return min((written.get(user, -1) for user in marker.users), default=-1)
    # A fused kernel may compute a gradient before the position at which its transfer is ready.
    return written.get(source, -1)


def _is_cast_copy(node: fx.Node) -> bool:
    """Return whether a node is a replicated parameter that is cast, and therefore copied."""
    if node.target is not markers.replicate or not node.users:
        return False
    return value_of(node).dtype != value_of(source_of(node)).dtype


def waits_on_host(node: fx.Node) -> bool:
    """Return whether a node is an input in host memory: a shard or an offloaded activation."""
    if node.op != "placeholder":
        return False
    for user in node.users:
        if user.target is markers.reload_activation and ReloadSpec.of_node(user).device:
            return True
        if user.target is markers.unshard and UnshardSpec.of_node(user).device:
            return True
    return False


def shard_bytes(graph: fx.Graph) -> int:
    """Return the device bytes of the shards and replicated parameters among a graph's inputs."""
    return sum(
        memory_bytes(value_of(node))
        for node in graph.find_nodes(op="placeholder")
        if _is_shard(node) and (WHOLE_SHARD in node.meta or not waits_on_host(node))
    )


def saved_bytes(graph: fx.Graph) -> int | torch.SymInt:
    """Return the bytes that forward saves for a backward graph, without shards; may be symbolic."""
    inputs = graph.find_nodes(op="placeholder")
    saved = [node for node in inputs if not _is_shard(node) and not is_tangent(node)]
    values = [node.meta.get("val") for node in saved]
    by_storage = {storage_of(v): v for v in values if isinstance(v, torch.Tensor)}
    return sum(num_in_memory(tensor) * tensor.itemsize for tensor in by_storage.values())


def _is_shard(placeholder: fx.Node) -> bool:
    is_read = any(user.target in markers.UNSHARD_MARKERS for user in placeholder.users)
    return (WHOLE_SHARD in placeholder.meta or is_read) and HELD_BYTES not in placeholder.meta


def _memory_bytes(node: fx.Node) -> int:
    if HELD_BYTES in node.meta:
        held: int = node.meta[HELD_BYTES]
        return held
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return sum(map(memory_bytes, tensors))
