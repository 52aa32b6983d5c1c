"""Forward, backward and inference graph: read as a ``Problem``, to be scheduled.

Gathered parameters, and views of them, first move to their first use; tracing left them higher up.
What lies between two points where something has to be there, or is ready to leave, is one step:

    before   w = unshard(..)   v = unshard(..)   t = v.t()   a = x @ w   b = a.relu()   c = b @ t
    after    w = unshard(..)   a = x @ w   b = a.relu()   v = unshard(..)   t = v.t()   c = b @ t
    steps                     [a           b          ]                    [t           c       ]
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from graphshard._torch.tensors import fake_mode_of
from graphshard.kinds import GraphKind
from graphshard.ops import markers
from graphshard.ops.bucket_copy import unpack
from graphshard.ops.nodes import is_view, num_bytes, root_of, uses
from graphshard.planning.plan import Problem, Transfer


def raise_scales(graph: fx.Graph) -> None:
    """Move what is gathered by, where it is an input, to the front."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="call_function", target=unpack):
        if node.args[0].op == "placeholder":
            first.prepend(node)


def sink_gathered(graph: fx.Graph) -> None:
    """Move every gathered parameter, and views of it, in front of its first use."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    before: dict[fx.Node, fx.Node] = {}  # what was moved in front of a node last
    for node in reversed(list(position)):
        if node.users and _is_gathered(node):
            first = min(node.users, key=position.__getitem__)
            before.get(first, first).prepend(node)
            before[first] = node
            position[node] = position[first]


def _is_gathered(node: fx.Node) -> bool:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node.target in (*markers.UNSHARD, markers.reload_activation)


def fill_values(graph: fx.Graph) -> None:
    """Give a fake value to nodes without one, so that their time and bytes are counted.

    AOTAutograd leaves it out where it wraps an operator in the state of a random generator.
    """
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            with fake_mode_of((args, kwargs)):
                node.meta["val"] = node.target(*args, **kwargs)


def _compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """All that runs and is not a marker, in order."""
    around = ("placeholder", "output")
    return [n for n in graph.nodes if n.op not in around and n.target not in markers.MARKERS]


def read_problem(
    graph: fx.Graph,
    kind: GraphKind,
    transfers: Mapping[fx.Node, Transfer],
    compute_us: Mapping[fx.Node, float],
) -> tuple[Problem, list[fx.Node]]:
    """The problem of ``graph``, and the first node of every step.

    Args:
        transfers: by marker in graph order; ``ready``, ``due`` and ``last`` are filled in here.
        compute_us: predicted time by node.
    """
    nodes = _compute_nodes(graph)
    at = {node: i for i, node in enumerate(nodes)}
    reach = [_reach(marker, at) for marker in transfers]
    bounds = {p for ready, due, _ in reach for p in (ready, due) if p < len(nodes)}
    starts = sorted({0, *bounds}) if nodes else []
    ends = [*starts[1:], len(nodes)]
    alive = _alive_bytes(graph, kind, at)
    problem = Problem(
        graph=kind,
        steps=tuple(nodes[start].name for start in starts),
        compute_us=tuple(
            sum(compute_us.get(node, 0.0) for node in nodes[start:end])
            for start, end in zip(starts, ends)
        ),
        other_bytes=tuple(max(alive[start:end]) for start, end in zip(starts, ends)),
        transfers=tuple(
            _placed(transfer, *positions, starts)
            for transfer, positions in zip(transfers.values(), reach)
        ),
    )
    return problem, [nodes[start] for start in starts]


def step_of(graph: fx.Graph, steps: Sequence[fx.Node]) -> Callable[[fx.Node], int]:
    """What tells the step that a node is in.

    Args:
        steps: their first nodes.
    """
    at = {node: i for i, node in enumerate(graph.nodes)}
    starts = [at[node] for node in steps]
    return lambda node: max(0, bisect_right(starts, at[node]) - 1)


def _placed(transfer: Transfer, ready: int, due: int, last: int, starts: list[int]) -> Transfer:
    """``transfer`` with positions of nodes turned into steps."""
    return dataclasses.replace(
        transfer,
        ready=bisect_left(starts, ready),
        due=bisect_left(starts, due),
        last=bisect_right(starts, last) - 1,
    )


def _reach(marker: fx.Node, at: Mapping[fx.Node, int]) -> tuple[int, int, int]:
    """Positions: launched before at the earliest, waited for before at the latest, used last."""
    end = len(at)
    due = min((at.get(user, end) for user in marker.users), default=end)
    if marker.target is markers.unshard:
        scales = markers.arguments(marker)["scales"]
        return at.get(scales, -1) + 1, due, _last_use(marker, at)
    if marker.target is markers.reload_activation:
        return 0, due, _last_use(marker, at)
    if (
        marker.target is markers.offload_activation
    ):  # what is used until then is not set free before
        (source,) = marker.all_input_nodes
        used = [at[node] for node in (source, *uses(root_of(source))) if node in at]
        return max(used) + 1, end, end - 1
    ready = at.get(marker.all_input_nodes[0], -1) + 1
    return ready, max(ready, due), end - 1


def _last_use(node: fx.Node, at: Mapping[fx.Node, int]) -> int:
    """Of ``node`` and of views of it; the end of the graph where that is what it returns."""
    end = len(at) - 1
    uses = [_last_use(user, at) if is_view(user) else at.get(user, end) for user in node.users]
    return max(uses, default=at.get(node, end))


def _alive_bytes(graph: fx.Graph, kind: GraphKind, at: Mapping[fx.Node, int]) -> list[int]:
    """By position, the bytes of all tensors but gathered parameters and what a reduction sends."""
    end = len(at)
    holder: dict[fx.Node, fx.Node | None] = {}  # whose memory a node's value is in
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if node.target not in markers.MARKERS and (owner := holder[used]) is not None:
                last[owner] = at.get(node, end - 1)
        if node.target in markers.MARKERS or _waits_on_host(node):
            holder[node] = None
        else:
            holder[node] = holder[node.args[0]] if is_view(node) else node
        if node.op == "placeholder":
            freed = kind == GraphKind.BACKWARD and not any(
                u.target in markers.UNSHARD for u in node.users
            )
            last[node] = 0 if freed else end - 1
    change = [0] * (end + 1)
    for node in (n for n, owner in holder.items() if n is owner and n.op != "output"):
        begin = at.get(node, 0)
        change[begin] += (size := _num_bytes(node))
        change[min(max(last.get(node, begin), begin) + 1, end)] -= size
    return list(accumulate(change))[:end]


def _waits_on_host(node: fx.Node) -> bool:
    """Whether it is a shard that is kept there, or an activation."""
    copied = [
        user for user in node.users if user.target in (markers.unshard, markers.reload_activation)
    ]
    return node.op == "placeholder" and any(markers.arguments(user)["device"] for user in copied)


def _num_bytes(node: fx.Node) -> int:
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return sum(map(num_bytes, tensors))
