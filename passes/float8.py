"""Traced, joint and inference graph: linears of weights that are to be used in fp8.

A weight is scaled and cast before it is gathered, by a scale that all ranks agree on, in forward; and
again to the same bytes in backward. The ops of ``graphshard.ops.float8_ops`` become scaled products:

    before   w = unshard(p, float8=..)                                  y = float8_mm(x, w)
    after    a = max_over_ranks(local_amax([p, ..]))   s = scale(a)
             w8 = unshard(p, float8=.., scales=s)   x8 = cast(x, ..)    y = _scaled_mm(x8, w8.T, ..)

All casts to fp8 are ATen ops that Inductor fuses into what computes their inputs; one that several
products need is made once. A weight that something else uses, too, or whose products the device refuses,
travels as it is, and so do its linears compute: its plan says why.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard._torch.distributed import process_group
from graphshard._torch.tensors import asking_fakes
from graphshard.ops import float8_math, float8_ops, markers
from graphshard.ops.bucket_copy import unpack
from graphshard.ops.emitter import Call, Emitter, run
from graphshard.ops.nodes import REASON

_aten = torch.ops.aten
_INVERSES = "graphshard_inverses"
"""Key in ``node.meta`` of a weight that is gathered in fp8: the node of all weights' inverse scales."""
_REGION = ("recompute", "ac_graph_id")
_LINEAR = torch.nn.functional.linear


def use_float8(gm: fx.GraphModule) -> None:
    """Give the linears of a graph that Dynamo traced, and of those in it, ops of their own, in place."""
    for graph_module in gm.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in graph_module.graph.find_nodes(op="call_function", target=_LINEAR):
                _use_float8(node)
            graph_module.recompile()


def _use_float8(node: fx.Node) -> None:
    names = ("input", "weight", "bias")
    given = {**dict.fromkeys(names), **dict(zip(names, node.args)), **node.kwargs}
    weight: Any = given["weight"]
    if weight.target is markers.unshard and (recipe := markers.arguments(weight)["float8"]):
        node.target = float8_ops.float8_linear
        node.args, node.kwargs = (*given.values(), recipe), {}


def gather_float8(gm: fx.GraphModule) -> None:
    """Take the ops of fp8 linears in a joint graph apart, in place."""
    scale_before_gather(gm.graph)
    gm.graph.eliminate_dead_code()


def scale_before_gather(graph: fx.Graph) -> None:
    """Gather in fp8 what only products in fp8 use."""
    chosen: dict[tuple[Any, ...], list[fx.Node]] = {}
    refused: dict[str, str | None] = {}
    for node in graph.find_nodes(op="call_function", target=markers.unshard):
        given, dtype = markers.arguments(node), node.meta["val"].dtype
        if not given["float8"] or not node.users:
            continue
        why = _refusal(node, refused)
        if why:
            node.meta[REASON] = f"travels as {dtype} and not in fp8: {why}"
        else:
            alike = given["float8"], dtype, given["group"], given["device"]
            chosen.setdefault(alike, []).append(node)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for alike, weights in chosen.items():
        with graph.inserting_before(first):
            _insert_scales(Emitter(graph, {}), weights, *alike)
    emitted: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in float8_ops.PRODUCTS:
            with graph.inserting_before(node):
                _take_apart(node, _once(Emitter(graph, node.meta, **_region(node)), emitted))


def _refusal(weight: fx.Node, refused: dict[str, str | None]) -> str | None:
    """Why a parameter is not gathered in fp8; None if it is."""
    dtype = weight.meta["val"].dtype
    if dtype not in float8_math.DTYPES:
        return f"linears in fp8 are of {' or '.join(map(str, float8_math.DTYPES))}"
    for user in weight.users:
        if user.target not in float8_ops.PRODUCTS or weight in (user.args[0], user.args[2]):
            return f"{user.target} uses it"
    return next(filter(None, (_device_refusal(user, refused) for user in weight.users)), None)


def _device_refusal(node: fx.Node, refused: dict[str, str | None]) -> str | None:
    """What torch's fakes say to shapes and layouts of a product; asked once of those of one kind."""
    values: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    left, weight, recipe = values[0], values[1], values[-1]
    shapes = f"{tuple(left.shape)} with a weight {tuple(weight.shape)}"
    of = f"{recipe} {float8_ops.PRODUCTS[node.target]} of {left.dtype} {shapes} on {left.device.type}"
    if of not in refused:
        with asking_fakes(weight):
            scaled = float8_math.quantised(run, weight, float8_math.E4M3, recipe, 1)
            try:
                _scaled_product(run, node.target, values, scaled)
                refused[of] = None
            except RuntimeError as error:
                refused[of] = f"{of}: {str(error).splitlines()[0]}"
    return refused[of]


def _insert_scales(
    emit: Call,
    weights: Sequence[fx.Node],
    recipe: str,
    dtype: torch.dtype,
    group: str,
    device: torch.device | None,
) -> None:
    """The scales of ``weights``, by one reduction. They are kept for backward, one behind the other; to
    its products each is a tensor of its own, so that equal layers share their kernels."""
    shards: Any = [weight.args[0] for weight in weights]
    amax = emit(float8_ops.local_amax, shards, dtype, group, recipe)
    if device is not None:  # the host has read its shards
        amax = emit(_aten._to_copy.default, amax, device=device)
    scales = float8_math.scale_of(
        emit, emit(markers.max_over_ranks, amax, group), float8_math.E4M3, recipe
    )
    sizes = [1] * len(weights)
    if recipe == float8_math.ROWWISE:
        world = process_group(group).size()
        sizes = [shard.meta["val"].shape[0] * world for shard in shards]
    inverse = emit(_aten.reciprocal.default, scales)
    parts, inverses = (emit(unpack, of, sizes, 1) for of in (scales, inverse))
    scales.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in (inverse, parts, inverses):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for at, weight in enumerate(weights):
        markers.change(weight, scales=parts, at=at)
        weight.meta[_INVERSES] = inverses


def _take_apart(node: fx.Node, emit: Call) -> None:
    """Replace a product by a scaled one; or by that of its matrices, if the weight is not in fp8."""
    weight: Any = node.args[1]
    if _INVERSES in weight.meta:
        scaled = float8_math.Scaled(weight, _inverse(weight, emit))
        product = _scaled_product(emit, node.target, node.args, scaled)
    else:
        product = _plain_product(node, emit)
    product.meta.update({key: node.meta[key] for key in _REGION if key in node.meta})
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)


def _scaled_product(call: Call, product: Any, arguments: Any, weight: float8_math.Scaled) -> Any:
    """One of ``PRODUCTS`` of these arguments, with the weight in fp8."""
    left, recipe = arguments[0], arguments[-1]
    if product is float8_ops.float8_mm:
        return float8_math.forward(call, left, weight, recipe)
    if product is float8_ops.float8_mm_grad_input:
        return float8_math.grad_input(call, left, weight, recipe)
    return float8_math.grad_weight(call, left, arguments[2], recipe)


def _inverse(weight: fx.Node, emit: Call) -> Any:
    """``[1, 1]`` or ``[1, rows]`` of a gathered weight."""
    inverse = emit(operator.getitem, weight.meta[_INVERSES], markers.arguments(weight)["at"])
    num, rows = inverse.meta["val"].shape[1], weight.meta["val"].shape[0]
    return emit(_aten.slice.Tensor, inverse, 1, 0, rows) if num > rows else inverse  # padding


def _plain_product(node: fx.Node, emit: Call) -> Any:
    left, right, *others = node.args
    if node.target is float8_ops.float8_mm:
        right = emit(_aten.permute.default, right, [1, 0])
    elif node.target is float8_ops.float8_mm_grad_weight:
        left, right = emit(_aten.permute.default, left, [1, 0]), others[0]
    return emit(_aten.mm.default, left, right)


def _region(node: fx.Node) -> dict[str, Any]:
    """What the partitioner is to know, under activation checkpointing, of what a product is made from:
    where a policy has the product saved, nothing else."""
    found = {key: node.meta[key] for key in _REGION if key in node.meta}
    if found.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        found["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return found


def _once(emit: Call, emitted: dict[Any, fx.Node]) -> Call:
    """``emit``, but what was inserted before is there already."""

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        lists = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)
        key = (op, lists, *kwargs.items())
        if key not in emitted:
            emitted[key] = emit(op, *args, **kwargs)
        return emitted[key]

    return call
