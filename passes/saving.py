"""Forward and backward graphs: change the values that forward saves for backward.

    forward   w = unshard(shard)   y = mm(x, w)   a = gelu(y)   ..      return loss, shard, a
    backward  w = unshard(shard)   ..   mm(g, w)   ..   f(a)            shard, a: inputs

Each of these passes replaces a saved value:

    keep_gathered           w                          a full parameter: not gathered in backward
    keep_secondary_shards   p = secondary_shard(w)     a larger shard: backward gathers it from few
                                                       ranks, w = unshard(p) (hpZ)
    offload_activations     h = offload_activation(a)  an activation on the host; in backward,
                                                       a = reload_activation(h)
    clone_mutated_inputs    clone(input)               an input before forward writes to it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphshard._torch.aot_graphs import mutated_inputs, outputs_of
from graphshard._torch.tensors import size_hint
from graphshard.kinds import GraphKind
from graphshard.ops import markers
from graphshard.ops.groups import span_of
from graphshard.ops.host_copy import PINNED
from graphshard.ops.marker_specs import OffloadSpec, ReloadSpec, UnshardSpec
from graphshard.ops.markers import change, secondary_shard, unshard
from graphshard.ops.nodes import (
    HELD_BYTES,
    Emitter,
    erase_unused,
    is_view,
    memory_bytes,
    num_bytes,
    root_of,
    users_through_views,
    value_of,
)
from graphshard.passes.build_problem import GraphProblem, build_problem, results_of
from graphshard.passes.contract import PassContext
from graphshard.passes.describe import describe_params, source_of
from graphshard.passes.normalize import normalize
from graphshard.planning.offload import SavedActivation

MIN_BYTES = 1 << 16  # minimum size of an activation that is worth a copy


def saved_nodes(forward: fx.Graph, num_outputs: int) -> list[fx.Node]:
    """Return the nodes that a forward graph saves: its outputs after the first ``num_outputs``."""
    return [node for node in outputs_of(forward)[num_outputs:] if isinstance(node, fx.Node)]


def _replace_saved(
    forward: fx.Graph, replacements: Mapping[fx.Node, fx.Node], num_outputs: int
) -> None:
    outputs = outputs_of(forward)
    saved: Any = fx.map_arg(outputs[num_outputs:], lambda node: replacements.get(node, node))
    forward.output_node().args = ((*outputs[:num_outputs], *saved),)


def read_partition(gm: fx.GraphModule, context: PassContext) -> tuple[GraphProblem, GraphProblem]:
    """Normalize the forward and the backward graph in place, and return their problems.

    In these problems, ``Transfer.param`` is the number of a graph input.
    """
    assert context.backward is not None
    forward = _read(gm, GraphKind.FORWARD, context)
    return forward, _read(context.backward, GraphKind.BACKWARD, context)


def _read(gm: fx.GraphModule, kind: GraphKind, context: PassContext) -> GraphProblem:
    input_of = {node: param.input for node, param in describe_params(gm.graph).items()}
    normalize(gm, context)
    return build_problem(gm.graph, kind, context.cost_model, input_of)


# --- parameters ----------------------------------------------------------------------------------


def _regathered_params(gm: fx.GraphModule, context: PassContext) -> dict[fx.Node, fx.Node]:
    """Map backward's markers to forward's, for the parameters that both graphs gather."""
    saved = {node.name: node for node in saved_nodes(gm.graph, context.num_outputs)}
    gathered = {m.args[0]: m for m in gm.graph.find_nodes(op="call_function", target=unshard)}
    pairs = {}
    for marker in context.backward_graph.find_nodes(op="call_function", target=unshard):
        shard = source_of(marker)
        if UnshardSpec.of_node(marker).block_dim is not None:
            continue  # forward gathers other values
        if len(shard.users) == 1 and saved.get(shard.name) in gathered:
            pairs[marker] = gathered[saved[shard.name]]
    return pairs


def keep_secondary_shards(gm: fx.GraphModule, context: PassContext) -> None:
    """Save secondary shards of parameters that backward gathers in another group than forward."""
    saved: dict[fx.Node, fx.Node] = {}
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    for marker, gathered in _regathered_params(gm, context).items():
        spec = UnshardSpec.of_node(marker)
        if spec.regather_group in (None, spec.group):
            continue
        users = users_through_views(gathered) or [gathered]  # no users if it is only returned
        with gm.graph.inserting_after(min(users, key=position.__getitem__)):
            emit = Emitter(gm.graph, gathered.meta)
            secondary = emit(secondary_shard, gathered, spec.regather_group)
        saved[source_of(gathered)] = secondary
        _set_input(source_of(marker), secondary.meta["val"], num_bytes(value_of(secondary)))
        change(
            marker, group=spec.regather_group, dtype=None, scales=None, scale_index=0, device=None
        )
    _replace_saved(gm.graph, saved, context.num_outputs)
    erase_unused(context.backward_graph)


def note_held_bytes(gm: fx.GraphModule, context: PassContext) -> None:
    """Annotate backward's inputs with the bytes that saved gathered parameters keep alive."""
    saved = {node.name: node for node in outputs_of(gm.graph) if isinstance(node, fx.Node)}
    for placeholder in context.backward_graph.find_nodes(op="placeholder"):
        node = saved.get(placeholder.name)
        # Forward saves a view without the padding, which keeps all of the memory alive.
        if node is not None and (gathered := root_of(node)).target is unshard:
            placeholder.meta[HELD_BYTES] = _gathered_bytes(gathered)


def keep_gathered(gm: fx.GraphModule, context: PassContext) -> None:
    """Keep chosen parameters unsharded for backward, which then does not gather them."""
    assert context.choose_kept is not None
    before, after = read_partition(gm, context)
    pairs = _regathered_params(gm, context)
    transfers = dict(zip(before.markers, before.problem.transfers, strict=True))
    gathered = {i: transfers[pairs[m]] for i, m in enumerate(after.markers) if m in pairs}
    chosen = context.choose_kept(before.problem, after.problem, gathered, context.cost_model)
    kept = {after.markers[i]: pairs[after.markers[i]] for i in chosen}
    _keep(gm.graph, kept, context.num_outputs)
    erase_unused(context.backward_graph)
    context.kept = [node.name for node in kept.values()]


def _keep(forward: fx.Graph, pairs: Mapping[fx.Node, fx.Node], num_outputs: int) -> None:
    saved = {source_of(gathered): gathered for gathered in pairs.values()}
    _replace_saved(forward, saved, num_outputs)
    for marker, gathered in pairs.items():
        change(gathered, regather_group=None)
        shard = source_of(marker)
        _set_input(shard, marker.meta["val"], _gathered_bytes(gathered))
        marker.replace_all_uses_with(shard)
        marker.graph.erase_node(marker)


def _set_input(placeholder: fx.Node, value: torch.Tensor, held_bytes: int) -> None:
    # A new dictionary: the forward graph's node may share the old one.
    placeholder.meta = {**placeholder.meta, HELD_BYTES: held_bytes, "val": value}


def _gathered_bytes(gathered: fx.Node) -> int:
    """Return the bytes of a gathered parameter, including padding."""
    spec, full = UnshardSpec.of_node(gathered), value_of(gathered)
    rows = span_of(spec.group).world * size_hint(value_of(source_of(gathered)).shape[0])
    return num_bytes(full) // max(size_hint(full.shape[0]), 1) * rows


# --- activations ---------------------------------------------------------------------------------


def offload_activations(gm: fx.GraphModule, context: PassContext) -> None:
    """Offload chosen activations to host memory until backward uses them."""
    assert context.choose_offloaded is not None
    pairs = _offloadable(gm, context)
    before, after = read_partition(gm, context)
    saved = _describe_saved(pairs, before.step_of, after.step_of)
    chosen = context.choose_offloaded(before.problem, after.problem, saved, context.cost_model)
    placeholders = list(pairs)
    offloaded = {placeholders[i]: pairs[placeholders[i]] for i in chosen}
    _offload(gm.graph, offloaded, context.num_outputs)


def _offloadable(gm: fx.GraphModule, context: PassContext) -> dict[fx.Node, fx.Node]:
    """Map backward's placeholders to forward's nodes, for activations that may be offloaded.

    They are large, used by backward, and share their memory with no other output, so that forward
    can free it after their last use. Inputs and gathered parameters are not activations.
    """
    # Number of outputs that share each node's memory.
    num_returned = Counter(_owner(n) for n in outputs_of(gm.graph) if isinstance(n, fx.Node))
    inputs = context.backward_graph.find_nodes(op="placeholder")
    placeholders = {node.name: node for node in inputs}
    return {
        placeholders[node.name]: node
        for node in saved_nodes(gm.graph, context.num_outputs)
        if num_returned[_owner(node)] == 1 and _is_large(node) and placeholders[node.name].users
    }


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that owns a value's memory; each of several results owns its own."""
    while results_of(node) is None and is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_large(node: fx.Node) -> bool:
    root, value = root_of(node), node.meta.get("val")
    if root.op == "placeholder" or markers.is_marker(root) or root.target is secondary_shard:
        return False
    if not isinstance(value, torch.Tensor):
        return False
    # An expanded tensor takes less memory than its copy would.
    return memory_bytes(value) == num_bytes(value) >= MIN_BYTES


def _describe_saved(
    pairs: Mapping[fx.Node, fx.Node],
    forward_step: Mapping[fx.Node, int],
    backward_step: Mapping[fx.Node, int],
) -> list[SavedActivation]:
    descriptions = []
    for placeholder, saved in pairs.items():
        uses = (saved, *users_through_views(_owner(saved)))
        backward_steps = [backward_step[n] for n in users_through_views(placeholder)] or [0]
        descriptions.append(
            SavedActivation(
                num_bytes=num_bytes(value_of(saved)),
                last=max(forward_step[node] for node in uses),
                first=min(backward_steps),
                until=max(backward_steps),
            )
        )
    return descriptions


def _offload(forward: fx.Graph, pairs: Mapping[fx.Node, fx.Node], num_outputs: int) -> None:
    offloaded: dict[fx.Node, fx.Node] = {}
    output = forward.output_node()
    for placeholder, saved in pairs.items():
        with forward.inserting_before(output):
            emit = Emitter(forward, saved.meta)
            copied = OffloadSpec(activation=saved, host_memory=PINNED).call(emit)
        offloaded[saved] = copied
        placeholder.meta = {**placeholder.meta, "val": copied.meta["val"]}
        placeholder.meta.pop("tensor_meta", None)
        users = list(placeholder.users)
        with placeholder.graph.inserting_before(min(users)):
            emit = Emitter(placeholder.graph, placeholder.meta)
            reload = ReloadSpec(offloaded=placeholder, device=value_of(saved).device)
            reloaded = reload.call(emit)
        for user in users:
            user.replace_input_with(placeholder, reloaded)
    _replace_saved(forward, offloaded, num_outputs)


# --- mutated inputs ------------------------------------------------------------------------------


def clone_mutated_inputs(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace saved inputs that forward writes to, and saved views of them, with clones."""
    # The partitioner saves an input that backward recomputes from, even if forward writes to it,
    # such as a buffer with a running average. Backward would read the new value. If Inductor's
    # graph writes the input, gradients are silently wrong; if AOTAutograd writes it, autograd
    # raises an error (torch 2.11 to 2.13, pytorch/pytorch#197039).
    written = mutated_inputs(gm.graph)
    nodes = saved_nodes(gm.graph, context.num_outputs)
    saved = [node for node in nodes if root_of(node) in written]
    copies = {root: _clone(root) for root in dict.fromkeys(map(root_of, saved))}
    clones = {node: _as_view(node, copies) for node in saved}
    _replace_saved(gm.graph, clones, context.num_outputs)


def _clone(node: fx.Node) -> fx.Node:
    inputs = node.graph.find_nodes(op="placeholder")
    with node.graph.inserting_after(inputs[-1]):  # before anything is written
        return Emitter(node.graph, node.meta)(torch.ops.aten.clone.default, node)


def _as_view(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Apply the view ``node``, whose strides backward expects, to the clone of its root."""
    if node in copies:
        return copies[node]
    view: Any = node.target
    source: Any = node.args[0]
    with node.graph.inserting_after(node):
        emit = Emitter(node.graph, node.meta)
        return emit(view, _as_view(source, copies), *node.args[1:], **node.kwargs)
