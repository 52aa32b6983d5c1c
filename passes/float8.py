"""Traced, joint and inference graphs: compute linears in fp8, and gather their weights in fp8.

In forward, a weight is scaled by factors that all ranks share, and cast before it is gathered; in
backward it is cast again, to the same bytes. The ops of ``graphshard.ops.float8_ops`` become scaled
products:

    before   w = unshard(p, float8_recipe=..)                         y = float8_mm(x, w)
    after    a = max_over_ranks(local_amax([p, ..]))   s = copy_out(scale(a))
             w8 = unshard(p, .., scales=s)   x8 = cast(x, ..)         y = _scaled_mm(x8, w8.T, ..)

All casts to fp8 are ATen ops, which Inductor can fuse into the kernels that compute their inputs. A
weight that cannot be gathered in fp8 is used in its own dtype, and the plan records why.

The recipe "mxfp8" differs: forward and backward cast a weight in different blocks, so each gathers
its own cast. If that is not possible, a weight is gathered in its own dtype and then, if its sizes
allow, cast.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard._torch.distributed import process_group
from graphshard._torch.inductor import has_activation_budget
from graphshard._torch.recompute import REGION
from graphshard._torch.tensors import fake_mode_of, quiet_fake_tensors
from graphshard.ops import float8_math, float8_ops, markers, mx_math
from graphshard.ops.bucket_copy import copy_out
from graphshard.ops.marker_specs import MaxOverRanksSpec, UnshardSpec
from graphshard.ops.mx_math import BLOCK, MXFP8
from graphshard.ops.nodes import REASON, Call, Emitter, graph_modules, run, value_of
from graphshard.passes.contract import PassContext
from graphshard.passes.describe import source_of
from graphshard.passes.single_rank import is_alone

_CallKey: TypeAlias = tuple[Hashable, ...]  # an op and its arguments

_aten = torch.ops.aten
# Key in ``node.meta`` of a weight that is gathered in fp8: the node with the inverse scales of the
# weight's `_Scaling`.
_INVERSES = "graphshard_inverses"
# Keys in ``node.meta`` with which activation checkpointing instructs the partitioner.
_REGION = ("recompute", REGION)
_LINEAR = torch.nn.functional.linear
_OF_DTYPES = f"fp8 linears support only {' and '.join(map(str, float8_math.DTYPES))}"


def use_float8(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace linears whose weight has an fp8 recipe with fp8 linears, in place and recursively."""
    for part in graph_modules(gm):
        for node in part.graph.find_nodes(op="call_function", target=_LINEAR):
            _use_float8(node)


def _use_float8(node: fx.Node) -> None:
    names = ("input", "weight", "bias")
    arguments = {**dict.fromkeys(names), **dict(zip(names, node.args)), **node.kwargs}
    weight = arguments["weight"]
    if not isinstance(weight, fx.Node) or weight.target is not markers.unshard:
        return
    recipe = UnshardSpec.of_node(weight).float8_recipe
    if recipe is not None:
        node.target = float8_ops.float8_linear
        node.args, node.kwargs = (*arguments.values(), recipe), {}


def gather_float8(gm: fx.GraphModule, context: PassContext) -> None:
    """Gather weights in fp8 where possible, and lower all fp8 products, in place."""
    graph = gm.graph
    refused: dict[str, str | None] = {}  # torch's error or None, keyed by product
    chosen = _choose_weights(graph, refused, context)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for scaling, weights in chosen.items():
        with graph.inserting_before(first):
            _insert_scales(Emitter(graph, {}), weights, scaling)
    emitted: dict[_CallKey, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in float8_ops.PRODUCTS:
            with graph.inserting_before(node):
                emit = _once(Emitter(graph, node.meta, **_region(node)), emitted)
                _lower_product(node, emit, refused)
    for node in graph.find_nodes(op="call_function", target=float8_math.transposed_copy):
        # Save the source of the copy instead, as the partitioner does for ops that can be fused.
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


class _Scaling(NamedTuple):
    """Key shared by weights whose scales are computed by one reduction."""

    recipe: str
    dtype: torch.dtype  # dtype in which the weights are used
    group: str
    device: torch.device | None  # device to which host shards are copied, or None


def _choose_weights(
    graph: fx.Graph, refused: dict[str, str | None], context: PassContext
) -> dict[_Scaling, list[fx.Node]]:
    """Return the weights to gather with shared scales, keyed by scaling.

    Changes the markers of weights to gather in mxfp8, in place, and records why other weights are
    not gathered in fp8.
    """
    chosen: dict[_Scaling, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=markers.unshard):
        spec, dtype = UnshardSpec.of_node(node), value_of(node).dtype
        if spec.float8_recipe is None or not node.users:
            continue
        if spec.float8_recipe == MXFP8:
            if refusal := _mx_refusal(value_of(node)):
                node.meta[REASON] = f"computes in {dtype} instead of mxfp8: {refusal}"
            elif is_alone(spec.group):
                pass  # nothing to gather
            elif refusal := _mx_gather_refusal(node, refused, context):
                node.meta[REASON] = f"travels as {dtype} instead of mxfp8: {refusal}"
            else:
                _gather_blocks(node)
            continue
        if refusal := _refusal(node, refused):
            node.meta[REASON] = f"travels as {dtype} instead of fp8: {refusal}"
            continue
        scaling = _Scaling(spec.float8_recipe, dtype, spec.group, spec.device)
        chosen.setdefault(scaling, []).append(node)
    return chosen


def _refusal(weight: fx.Node, refused: dict[str, str | None]) -> str | None:
    if value_of(weight).dtype not in float8_math.DTYPES:
        return _OF_DTYPES
    return _use_refusal(weight, refused)


def _use_refusal(weight: fx.Node, refused: dict[str, str | None]) -> str | None:
    for user in weight.users:
        if user.target not in float8_ops.PRODUCTS or weight in (user.args[0], user.args[2]):
            return f"{user.target} uses it other than as the weight of an fp8 linear"
    return next(filter(None, (_device_refusal(user, refused) for user in weight.users)), None)


def _mx_refusal(weight: torch.Tensor) -> str | None:
    # Decide by the weight alone: training and inference then compute in the same dtype, although
    # inference lacks some of the products.
    if weight.dtype not in float8_math.DTYPES:
        return _OF_DTYPES
    if any(size % BLOCK for size in weight.shape):
        return f"its sizes {tuple(weight.shape)} are not multiples of {BLOCK}"
    return None


def _mx_gather_refusal(
    weight: fx.Node, refused: dict[str, str | None], context: PassContext
) -> str | None:
    spec = UnshardSpec.of_node(weight)
    rows = value_of(source_of(weight)).shape[0]
    if spec.regather_group is None:
        return "backward uses the values gathered in forward"
    if spec.regather_group != spec.group:
        return "backward gathers it from fewer ranks, which hold no shards of the cast"
    if rows % BLOCK:
        return f"the {rows} rows of a rank are not a multiple of {BLOCK}"
    if context.ranks_differ or has_activation_budget():
        # If only some ranks recomputed a product in backward, only they would gather its weight.
        return "ranks may differ in what backward recomputes"
    return _use_refusal(weight, refused)


def _gather_blocks(weight: fx.Node) -> None:
    """Make a marker gather mxfp8 in forward's blocks, and add a marker for backward's blocks."""
    backward = [user for user in weight.users if user.target is float8_ops.float8_mm_grad_input]
    if backward:
        with weight.graph.inserting_after(weight):
            other = weight.graph.node_copy(weight)
        for user in backward:
            user.replace_input_with(weight, other)
        markers.change(other, block_dim=0)
    markers.change(weight, block_dim=1)


def _device_refusal(node: fx.Node, refused: dict[str, str | None]) -> str | None:
    """Return the error of torch's fake ops for a product's shapes and layouts, or None."""
    values: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    left, weight, recipe = values[0], values[1], values[-1]
    shapes = f"{tuple(left.shape)} with a weight {tuple(weight.shape)}"
    result = float8_ops.PRODUCTS[node.target]  # type: ignore[index]  # targets are ops or names
    product = f"{recipe} {result} of {left.dtype} {shapes} on {left.device.type}"
    if product not in refused:
        with quiet_fake_tensors(), fake_mode_of([weight]):
            try:
                float8_ops.product(run, node.target, values)
                refused[product] = None
            except RuntimeError as error:
                refused[product] = f"{product}: {str(error).splitlines()[0]}"
    return refused[product]


def _insert_scales(emit: Call, weights: Sequence[fx.Node], scaling: _Scaling) -> None:
    """Compute the scales of ``weights`` with one reduction, and add them to the markers."""
    shards = [source_of(weight) for weight in weights]
    amax = emit(float8_ops.local_amax, shards, scaling.dtype, scaling.group, scaling.recipe)
    if scaling.device is not None:  # amax of host shards is on the host
        amax = emit(_aten._to_copy.default, amax, device=scaling.device)
    amax = MaxOverRanksSpec(amax=amax, group=scaling.group).call(emit)
    scales = float8_math.scale_of(emit, amax, float8_math.E4M3, scaling.recipe)
    sizes = [1] * len(weights)
    if scaling.recipe == float8_math.ROWWISE:
        world = process_group(scaling.group).size()
        sizes = [value_of(shard).shape[0] * world for shard in shards]
    inverse = emit(_aten.reciprocal.default, scales)
    # One tensor per weight, so equal layers share their kernels.
    scale_of_each = emit(copy_out, scales, sizes, 1)
    inverse_of_each = emit(copy_out, inverse, sizes, 1)
    # Forward saves all scales for backward in one tensor.
    scales.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in (inverse, scale_of_each, inverse_of_each):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for i, weight in enumerate(weights):
        markers.change(weight, scales=scale_of_each, scale_index=i)
        weight.meta[_INVERSES] = inverse_of_each


def _lower_product(node: fx.Node, emit: Call, refused: dict[str, str | None]) -> None:
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    in_fp8 = _in_fp8(weight, emit)
    if in_fp8 is not None or _casts_to_mx(node, refused):
        product = float8_ops.product(emit, node.target, node.args, in_fp8)
    else:
        product = _plain_product(node, emit)  # the weight is not in fp8
    product.meta.update({key: node.meta[key] for key in _REGION if key in node.meta})
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)


def _casts_to_mx(product: fx.Node, refused: dict[str, str | None]) -> bool:
    """Return whether to cast the weight of a product to mxfp8, if it was not gathered in fp8."""
    weight: Any = product.args[1]
    if product.args[-1] != MXFP8 or _mx_refusal(value_of(weight)):
        return False
    return _device_refusal(product, refused) is None


def _in_fp8(weight: fx.Node, emit: Call) -> float8_math.Scaled | mx_math.Blocks | None:
    """Return a weight gathered in fp8 with its scales; None if it is not gathered in fp8.

    An inverse scale is ``[1, 1]`` or ``[1, rows]``, without padding.
    """
    if weight.target is not markers.unshard:  # for example, a cast by autocast
        return None
    spec = UnshardSpec.of_node(weight)
    if spec.block_dim is not None:
        return mx_math.unpacked(emit, weight, spec.block_dim)
    if _INVERSES not in weight.meta:
        return None
    inverse: fx.Node = emit(operator.getitem, weight.meta[_INVERSES], spec.scale_index)
    num_scales, rows = value_of(inverse).shape[1], value_of(weight).shape[0]
    if num_scales > rows:
        inverse = emit(_aten.slice.Tensor, inverse, 1, 0, rows)
    return float8_math.Scaled(weight, inverse)


def _plain_product(node: fx.Node, emit: Call) -> fx.Node:
    left, right, *others = node.args
    if node.target is float8_ops.float8_mm:
        right = emit(_aten.permute.default, right, [1, 0])
    elif node.target is float8_ops.float8_mm_grad_weight:
        left, right = emit(_aten.permute.default, left, [1, 0]), others[0]
    product: fx.Node = emit(_aten.mm.default, left, right)
    return product


def _region(node: fx.Node) -> dict[str, Any]:
    """Return the activation checkpointing tags for nodes that replace a product."""
    region = {key: node.meta[key] for key in _REGION if key in node.meta}
    # If the policy saves the product, its helper nodes are recomputed.
    if region.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        region["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return region


def _once(emit: Call, emitted: dict[_CallKey, fx.Node]) -> Call:
    """Wrap ``emit`` to return the existing node for a repeated call."""

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        lists = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)
        key = (op, lists, *kwargs.items())
        if key not in emitted:
            emitted[key] = emit(op, *args, **kwargs)
        return emitted[key]

    return call
