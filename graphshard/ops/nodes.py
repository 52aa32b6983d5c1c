"""Graph nodes: their values, views, sizes and uses, our keys in ``node.meta``, and new nodes.

A ``Call`` runs an operator now or inserts it into a graph (``Emitter``), so eager code and graph
rewrites can share functions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from .._torch.tensors import fake_mode_of, size_hint

Value: TypeAlias = torch.Tensor | fx.Node  # a tensor, or the graph node that stands for one

Values: TypeAlias = Sequence[torch.Tensor] | fx.Node  # tensors, or the node of a list of them

WAIT = torch.ops._c10d_functional.wait_tensor.default  # waits for a collective; returns its result

# Our keys in ``node.meta``. PLANNED marks nodes that lowering inserts to follow a plan.
PLANNED = "graphshard_planned"

# Reason why a parameter is not sent, or not used, in a smaller dtype.
REASON = "graphshard_reason"

# Marks an input that the model holds: a parameter's only shard or, in forecasts, a buffer.
WHOLE_SHARD = "graphshard_whole_shard"

# Bytes of a backward input that holds a full parameter, or a part of one, including padding. Unlike
# a shard's, its memory is freed after its last use.
HELD_BYTES = "graphshard_held_bytes"


def value_of(value: Value) -> torch.Tensor:
    """Return the tensor itself, or a node's fake tensor."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value is a view or an item of its first argument."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def is_user_launch(node: fx.Node) -> bool:
    """Return whether ``node`` launches a collective that the model itself calls."""
    if PLANNED in node.meta or node.target is WAIT:
        return False
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "_dtensor")


def is_random(node: fx.Node) -> bool:
    """Return whether ``node`` draws random numbers."""
    # Operators that write to their arguments are called through ``auto_functionalized_v2(op, ..)``.
    ops = (node.target, *node.args)
    return any(torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) for op in ops)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes, using hints for symbolic sizes."""
    return size_hint(tensor.numel()) * tensor.element_size()


def memory_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, counting those of expanded dimensions once."""
    return size_hint(num_in_memory(tensor)) * tensor.element_size()


def num_in_memory(tensor: torch.Tensor) -> int | torch.SymInt:
    """Return the number of a tensor's elements, counting those of expanded dimensions once."""
    if tensor.layout is not torch.strided:
        return tensor.numel()
    # Do not evaluate a symbolic size or stride: that could add a guard.
    sizes = [
        min(size, 1) if isinstance(size, int) and isinstance(stride, int) and not stride else size
        for size, stride in zip(tensor.shape, tensor.stride())
    ]
    return math.prod(sizes)


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a node's value."""
    while is_view(node) and isinstance(source := node.args[0], fx.Node):
        node = source
    return node


def is_returned(node: fx.Node) -> bool:
    """Return whether the graph returns a node's value, or a view of it."""
    return any(user.op == "output" or (is_view(user) and is_returned(user)) for user in node.users)


def users_through_views(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that use a node's value, directly or through views; excludes the output."""
    users = []
    for user in node.users:
        users += users_through_views(user) if is_view(user) else [user]
    return [user for user in users if user.op != "output"]


def replace_in_output(graph: fx.Graph, replacements: Mapping[fx.Node, fx.Node]) -> None:
    """Make ``graph`` return ``replacements[node]`` instead of ``node``, for all nodes at once.

    Each change of the output node takes time proportional to the number of its arguments. With
    saved values and gradients, these can be thousands.
    """
    output = graph.output_node()
    output.args = fx.map_arg(output.args, lambda node: replacements.get(node, node))


def replace_by_results(call: fx.Node, results: Sequence[Any]) -> None:
    """Replace the items of a call with several results by ``results``, and erase the call."""
    for item in list(call.users):
        position: Any = item.args[1]
        item.replace_all_uses_with(results[position])
        call.graph.erase_node(item)
    call.graph.erase_node(call)


def erase_unused(graph: fx.Graph) -> None:
    """Erase nodes that have neither users nor side effects."""
    # Unlike ``Graph.eliminate_dead_code``, check only unused nodes for side effects, keep random
    # operators, and do not lint the graph.
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return Dynamo's graph module and all of its subgraphs, such as the bodies of checkpoints."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


# ``call(op, *args)`` runs ``op`` on tensors, or inserts it into a graph for nodes.
Call: TypeAlias = Callable[..., Any]

# Entries of ``meta`` that describe a node's origin. Other entries, such as the eager inputs that
# Inductor reads, describe the replaced call, and do not fit the new nodes.
_ORIGIN = ("stack_trace", "nn_module_stack", "seq_nr", "custom")


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` eagerly."""
    return op(*args, **kwargs)


class Emitter:
    """A ``Call`` that inserts nodes with fake values into a graph.

    Args:
        origin: ``meta`` of the node to replace, from which new nodes copy the ``_ORIGIN`` entries.
        extra: additional entries for the ``meta`` of new nodes.
    """

    def __init__(self, graph: fx.Graph, origin: Mapping[str, object], **extra: object) -> None:
        self._graph = graph
        self._mode = fake_mode_of(node.meta.get("val") for node in graph.nodes)
        self._meta = {**{k: v for k, v in origin.items() if k in _ORIGIN}, **extra}

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            value = op(*fake_args, **fake_kwargs)
        node.meta = {**self._meta, "val": value}
        if torch.Tag.needs_exact_strides in getattr(op, "tags", ()):
            # As in torch/fx/experimental/proxy_tensor.py. Without this entry, Inductor may choose
            # layouts for the arguments of ``_scaled_mm`` that cuBLASLt refuses.
            node.meta["eager_input_vals"] = fake_args, fake_kwargs
        return node
