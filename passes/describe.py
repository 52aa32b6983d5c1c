"""Describe the parameter and the transfer of each marker, and the model's own collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import fx

from graphshard._torch.aot_graphs import inputs_of_gradients, original_inputs
from graphshard._torch.tensors import size_hint, tree_leaves
from graphshard.kinds import HOST_COPIES, TransferKind
from graphshard.ops import markers
from graphshard.ops.collectives import needs_own_copy
from graphshard.ops.groups import GroupSpan, span_of
from graphshard.ops.marker_specs import (
    AllReduceGradSpec,
    MaxOverRanksSpec,
    ReduceGradSpec,
    UnshardSpec,
)
from graphshard.ops.nodes import (
    memory_bytes,
    num_bytes,
    root_of,
    users_through_views,
    value_of,
)
from graphshard.planning.plan import PlanParam, Transfer, UserCollective


def markers_of(graph: fx.Graph) -> list[fx.Node]:
    """Return a graph's markers in order."""
    return [node for node in graph.nodes if markers.is_marker(node)]


def source_of(marker: fx.Node) -> fx.Node:
    """Return a node's first argument: for a marker, the value to gather, reduce or copy."""
    source = marker.args[0]
    assert isinstance(source, fx.Node)
    return source


def describe_params(graph: fx.Graph) -> dict[fx.Node, PlanParam]:
    """Map each marker of a parameter to a description of the parameter, in graph order."""
    gradients = inputs_of_gradients(graph).items()
    inputs = {
        **original_inputs(graph),
        **{node: i for node, i in gradients if node.target in markers.REDUCE_MARKERS},
    }
    input_of = {
        marker: inputs[marker if marker in inputs else source_of(marker)]
        for marker in markers_of(graph)
        if marker.target in markers.PARAM_MARKERS
    }
    # Prefer the reduction, which has the parameter's own shard: a gather may have a secondary one.
    markers_of_input: dict[int, fx.Node] = {}
    for marker, i in input_of.items():
        if marker.target in markers.REDUCE_MARKERS or i not in markers_of_input:
            markers_of_input[i] = marker
    return {marker: _describe_param(markers_of_input[i], i) for marker, i in input_of.items()}


def _describe_param(marker: fx.Node, position: int) -> PlanParam:
    gathers = marker.target in markers.UNSHARD_MARKERS
    full, shard = (marker, source_of(marker)) if gathers else (source_of(marker), marker)
    split = marker.target in (markers.unshard, markers.reduce_grad)
    shard_value = value_of(shard)
    # A row gathered in mxfp8 also contains scales: take its other sizes from the shard.
    shape = *value_of(full).shape[:1], *shard_value.shape[1:]
    # A gradient's size may be symbolic, taken from an input. Its hint is the parameter's size.
    return PlanParam(
        input=position,
        shape=tuple(map(size_hint, shape)),
        dtype=str(shard_value.dtype),
        padded_rows=size_hint(shard_value.shape[0]) if split else None,
    )


def number_params(graph: fx.Graph) -> tuple[tuple[PlanParam, ...], dict[fx.Node, int]]:
    """Return the parameters of a graph, and each marker's index into them."""
    params = describe_params(graph)
    unique = tuple(sorted(dict.fromkeys(params.values()), key=lambda param: param.input))
    number = {param: i for i, param in enumerate(unique)}
    return unique, {marker: number[param] for marker, param in params.items()}


def describe_transfers(graph: fx.Graph, param_of: Mapping[fx.Node, int]) -> dict[fx.Node, Transfer]:
    """Return the transfers keyed by marker, in graph order, with copies of activations last."""
    kinds = [(node, kind) for node in markers_of(graph) if (kind := markers.read(node).kind)]
    # Ranks may copy different activations, but their collectives must have the same positions.
    kinds.sort(key=lambda pair: pair[1] in HOST_COPIES)
    return {node: _describe_transfer(node, kind, param_of.get(node)) for node, kind in kinds}


def _describe_transfer(marker: fx.Node, kind: TransferKind, param: int | None) -> Transfer:
    spec, value = markers.read(marker), value_of(marker)
    transfer = Transfer(
        param=param,
        kind=kind,
        num_bytes=num_bytes(value),
        dtype=str(value.dtype),
        shard_bytes=0,
        casts=False,
        group="",
        world=1,
        ready=0,  # ``build_problem`` fills in the steps
        due=0,
        last=0,
    )
    if kind in HOST_COPIES:
        return transfer
    assert isinstance(spec, UnshardSpec | ReduceGradSpec | AllReduceGradSpec | MaxOverRanksSpec)
    sent, span = spec.collective_input(), span_of(spec.group)
    gathers, source = kind == TransferKind.ALL_GATHER, value_of(source_of(marker))
    shard, sent_shard = (source, sent.shape) if gathers else (value, value.shape)
    num_shards = span.world if kind in (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER) else 1
    transfer = dataclasses.replace(
        transfer,
        num_bytes=size_hint(sent_shard.numel()) * num_shards * sent.wire_dtype.itemsize,
        dtype=str(sent.wire_dtype),
        shard_bytes=num_bytes(shard),
        casts=sent.tensor.dtype != sent.wire_dtype,
        group=spec.group,
        world=span.world,
        stride=span.stride,
        grad_bytes=0 if gathers else _held_bytes(source_of(marker)),
        copied_in=needs_own_copy(kind, sent, span.world),
        summed_in=_name(sent.summed_in),
    )
    if isinstance(spec, UnshardSpec):
        return dataclasses.replace(transfer, host=spec.device is not None)
    if not isinstance(spec, ReduceGradSpec):
        return transfer
    replicas = span_of(spec.replica_group) if spec.replica_group else GroupSpan(1, 1)
    if spec.exchange_dtype is not None:
        sent = spec.collective_input(exchanges=True)  # exchanged gradients are not cast
    return dataclasses.replace(
        transfer,
        copied_in=needs_own_copy(kind, sent, span.world),
        exchange_dtype=_name(spec.exchange_dtype),
        replicas=spec.replica_group or "",
        num_replicas=replicas.world,
        replica_stride=replicas.stride,
        host=spec.host_memory is not None,
    )


def _held_bytes(gradient: fx.Node) -> int:
    # A vocabulary-parallel embedding sends a view, which keeps the whole gradient in memory.
    root = root_of(gradient)
    is_tensor = isinstance(root.meta.get("val"), torch.Tensor)
    owns_memory = is_tensor and len(users_through_views(root)) == 1
    return memory_bytes(value_of(root if owns_memory else gradient))


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype)


def describe_user_collective(node: fx.Node, launch: int, wait: int) -> UserCollective:
    """Describe a collective that the model itself calls, given the steps of its launch and wait."""
    op = str(node.target).split(".")[1].removesuffix("_")
    group = node.kwargs.get("group_name", node.args[-1] if node.args else "")
    # A name or, since torch 2.13, the group itself; unknown if the graph computes it.
    name = getattr(group, "group_name", group)
    name = name if isinstance(name, str) else ""
    span = span_of(name) if name else GroupSpan(1, 1)
    kind = next((kind for kind in _RATES if op.startswith(kind)), TransferKind.ALL_GATHER)
    sent = _num_bytes([used.meta.get("val") for used in node.all_input_nodes])
    full = _num_bytes(node.meta.get("val")) if kind == TransferKind.ALL_GATHER else sent
    return UserCollective(op, kind, full, name, span.world, launch, wait, span.stride)


# Any other collective, such as an all-to-all or a broadcast, is priced as an all-gather of its
# result.
_RATES = (TransferKind.ALL_REDUCE, TransferKind.REDUCE_SCATTER)


def _num_bytes(value: object) -> int:
    return sum(num_bytes(v) for v in tree_leaves(value) if isinstance(v, torch.Tensor))
