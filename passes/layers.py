"""Traced graph: trace repeated layers with AOTAutograd once.

    traced     y = linear(x, p)   z = relu(y)   y_1 = linear(z, q)   z_1 = relu(y_1)   ..
    shared     z = invoke_subgraph(layer, x, p)[0]   z_1 = invoke_subgraph(layer, z, q)[0]   ..
    joint      the nodes of the layer's own joint graph, copied to each of its calls

AOTAutograd traces and differentiates ``layer`` once; the joint graph calls its forward and backward
graphs. Inductor's joint-graph passes process them once, then ``inline_layers`` inlines the calls.

[Note: equal layers] Layers share a trace only if plain tracing would record the same joint graph
for each of them, which makes results bitwise equal. The conditions are:

- Their nodes are equal in order: targets, constants, modes of autograd and autocast, and dtypes,
  sizes, strides, devices and ``requires_grad`` of all values. Symbolic sizes are equal expressions
  of the sizes of inputs. The same holds for nodes in the bodies of checkpoints, and for the
  policies that choose what a checkpoint saves.
- No node mutates a value that a layer reads or returns, and no two inputs or outputs of a layer
  share memory.
- They have exactly one output, which requires a gradient. With several outputs, AOTAutograd would
  pass zeros as the gradients of those that backward does not reach.
- No value that needs a gradient is read several times inside a layer and also outside it: its
  gradients would be added in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphshard._torch.recompute import CHECKPOINT, body_of, is_body, policy_of
from graphshard._torch.tensors import (
    FakeTensor,
    HigherOrderOperator,
    has_known_sizes,
    has_lazy_bits,
    is_known,
    is_mutated,
    traced_storage,
    tree_leaves,
    writes_arguments,
)
from graphshard.passes.contract import PassContext
from graphshard.passes.regions import frozen, metadata
from graphshard.planning.repeats import Repeat, find_repeats

INVOKE = torch.ops.higher_order.invoke_subgraph
SHARED_LAYER = "graphshard_layer"  # part of the name of each shared subgraph
_LEAST_SAVED = 48  # minimum number of nodes that a repeat saves from tracing


def share_layers(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace equal layers with calls of a shared subgraph, in place; see [Note: equal layers]."""
    if not torch.is_grad_enabled() or not any(map(_needs_gradient, _returned(gm))):
        return  # AOTAutograd will trace an inference graph
    nodes = list(_with_bodies(gm.graph))
    labels: dict[Hashable, int] = {}
    sequence = [labels.setdefault(label, len(labels)) for label in _labels(nodes)]
    repeats = find_repeats(sequence, _LEAST_SAVED)
    ends = [*(repeat.start for repeat in repeats[1:]), len(nodes)]
    for i, (repeat, end) in enumerate(zip(repeats, ends)):
        layers = _equal_layers(nodes, repeat, end)
        if layers:
            _replace(gm, f"{SHARED_LAYER}_{i}", layers)
            context.num_shared_layers += len(layers)


def _with_bodies(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield a graph's operators in order, each checkpoint followed by the operators of its body."""
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not is_body(node):
            yield node
            if node.target is CHECKPOINT:
                yield from _with_bodies(body_of(node).graph)


def _returned(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.output_node().all_input_nodes


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _needs_gradient(node: fx.Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _labels(nodes: Sequence[fx.Node]) -> Iterator[Hashable]:
    """Yield a label for each node; corresponding nodes of equal layers have equal labels.

    A node that no layer may contain is its own label.
    """
    modes = 0  # number of nodes so far that may have changed a mode
    place = 0  # position in a checkpoint's body, from 1; 0 outside
    for node in nodes:
        place = place + 1 if node.graph is not nodes[0].graph else 0
        if _may_be_inside(node):
            yield modes, place, _described(node, lambda used: _metadata(_value(used)))
        else:
            modes += node.op == "call_function" and _value(node) is None
            yield node  # equal to no other node


def _described(node: fx.Node, describe: Callable[[fx.Node], Hashable]) -> Hashable:
    arguments = frozen(node.args, describe), frozen(node.kwargs, describe)
    body = _described_body(node, describe) if node.target is CHECKPOINT else None
    return node.op, node.target, arguments, _metadata(_value(node)), body


def _described_body(checkpoint: fx.Node, describe: Callable[[fx.Node], Hashable]) -> Hashable:
    """Describe the size, results and policy of a checkpoint's body, but not its operators."""
    nodes = body_of(checkpoint).graph.nodes
    results = frozen(body_of(checkpoint).graph.output_node().args, describe)
    return len(nodes), results, policy_of(checkpoint)


def _may_be_inside(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or writes_arguments(node.target):
        return False
    if isinstance(node.target, HigherOrderOperator) and node.target is not CHECKPOINT:
        return False
    values = [_value(node), *(_value(used) for used in node.all_input_nodes if not is_body(used))]
    return all(map(_is_plain, values))


def _is_plain(value: object) -> bool:
    """Return whether a value consists of known sizes and unmutated strided tensors.

    The sizes, strides and offsets of the tensors must also be known.
    """
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, (int, torch.SymInt, torch.SymBool)):
        return is_known(value)
    return isinstance(value, FakeTensor) and has_known_sizes(value) and not is_mutated(value)


def _metadata(value: object) -> Hashable:
    if isinstance(value, fx.GraphModule):  # the body of a checkpoint
        return None
    if isinstance(value, torch.Tensor):
        return metadata(value), value.requires_grad, str(value.storage_offset())
    if isinstance(value, (tuple, list)):
        return tuple(map(_metadata, value))
    return repr(value)


class _Layer:
    """Consecutive nodes of the traced graph, to replace with one call.

    Args:
        nodes: nodes in graph order, each checkpoint followed by the nodes of its body.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._all = nodes
        self.nodes = [node for node in nodes if node.graph is nodes[0].graph]
        self._inside = set(self.nodes)
        read = dict.fromkeys(used for node in self.nodes for used in node.all_input_nodes)
        self.bodies = list(filter(is_body, read))
        self.inputs = [n for n in read if n not in self._inside and n not in self.bodies]
        self.outputs = [n for n in self.nodes if any(user not in self._inside for user in n.users)]

    def key(self) -> Hashable:
        """Return a key that is equal for all layers that one subgraph can replace."""
        passed = [n for call in self._all if call.target is CHECKPOINT for n in _passed(call)]
        numbered = enumerate([*self.inputs, *passed, *self._all])
        number: dict[Any, int] = {node: i for i, node in numbered}

        def place(node: fx.Node) -> Hashable:
            return None if is_body(node) else number.get(node, node)

        return (
            tuple(_metadata(_value(node)) for node in self.inputs),
            tuple(_described(node, place) for node in self._all),
            tuple(map(place, self.outputs)),
        )

    def is_separate(self) -> bool:
        """Return whether the layer has the same joint graph when it is traced by itself."""
        if len(self.outputs) != 1 or not _needs_gradient(self.outputs[0]):
            return False
        if any(has_lazy_bits(_value(node)) for node in [*self.inputs, *self.outputs]):
            return False  # ``invoke_subgraph`` has no kernel for such tensors
        tensors = [n for n in self.inputs if not isinstance(_value(n), torch.SymInt)]
        storages = [traced_storage(node) for node in [*tensors, *self.outputs]]
        if None in storages or len(set(storages)) < len(storages):
            return False
        return not any(self._adds_up(node) for node in self.inputs if _needs_gradient(node))

    def _adds_up(self, node: fx.Node) -> bool:
        """Return whether an input's gradient is summed both inside and outside the layer."""
        inside = [user for user in node.users if user in self._inside]
        return len(inside) < len(node.users) and _num_reads(node, inside) > 1

    def subgraph(self, owner: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.inputs):
            made[node] = graph.placeholder(f"in_{i}")
            made[node].meta = {"example_value": _value(node)}
        for node in [*self.bodies, *self.nodes]:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in self.outputs))
        return fx.GraphModule(owner, graph)

    def replace_by_call(self, target: fx.Node, name: str) -> None:
        (output,) = self.outputs
        graph = output.graph
        with graph.inserting_before(self.nodes[-1].next):
            call = graph.call_function(INVOKE, (target, name, *self.inputs))
            call.meta["example_value"] = (_value(output),)
            result = graph.call_function(operator.getitem, (call, 0))
            result.meta = dict(output.meta)
        output.replace_all_uses_with(result, lambda user: user not in self._inside)
        for node in reversed(self.nodes):
            graph.erase_node(node)


def _passed(checkpoint: fx.Node) -> list[fx.Node]:
    """Return the placeholders of a checkpoint's body."""
    placeholders: list[fx.Node] = body_of(checkpoint).graph.find_nodes(op="placeholder")
    return placeholders


def _num_reads(node: fx.Node, users: Iterable[fx.Node]) -> int:
    """Count how often operators read a node, including operators in the bodies of checkpoints."""
    count = 0
    for user in users:
        if user.target is CHECKPOINT:
            passed = zip(_passed(user), user.args[1:], strict=True)
            count += sum(_num_reads(inner, inner.users) for inner, outer in passed if outer is node)
        else:
            count += tree_leaves([user.args, user.kwargs]).count(node)
    return count


def _equal_layers(nodes: Sequence[fx.Node], repeat: Repeat, end: int) -> list[_Layer]:
    """Return a repeat's layers, cut at the first offset where one subgraph can replace all, or [].

    Layers must be equal and separate, and have distinct inputs. The last one may extend into
    ``repeat.rest``, up to ``end``.
    """
    stop = min(repeat.stop + repeat.rest, end)
    for begin in range(repeat.start, repeat.start + 2 * repeat.length):
        if nodes[begin].graph is not nodes[0].graph:
            continue  # in the body of a checkpoint
        starts = range(begin, stop - repeat.length + 1, repeat.length)
        layers = [_Layer(nodes[start : start + repeat.length]) for start in starts[:1]]
        if len(starts) < 2 or not layers[0].is_separate():
            continue
        layers = [_Layer(nodes[start : start + repeat.length]) for start in starts]
        keys = {layer.key() for layer in layers}
        # In the joint graph, calls with the same inputs could not be told apart.
        num_distinct = len({tuple(layer.inputs) for layer in layers})
        if len(keys) == 1 and num_distinct == len(layers) and all(x.is_separate() for x in layers):
            return layers
    return []


def _replace(gm: fx.GraphModule, name: str, layers: Sequence[_Layer]) -> None:
    setattr(gm, name, layers[0].subgraph(gm))
    with gm.graph.inserting_before(layers[0].nodes[0]):
        target = gm.graph.get_attr(name)
    # Last to first, because the inputs of a layer are outputs of earlier layers.
    for layer in reversed(layers):
        layer.replace_by_call(target, name)
    for body in dict.fromkeys(body for layer in layers for body in layer.bodies if not body.users):
        gm.graph.erase_node(body)
        if all(node.target != body.target for node in gm.graph.find_nodes(op="get_attr")):
            gm.delete_submodule(str(body.target))
