"""Nodes computed from parameters without activations or randomness are marked to be recomputed."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.passes.reshard import param_derived, reshard
from tests.graph.builder import CONTEXT, Builder, add, mul, t, to_copy

RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


def _recomputed(gm: fx.GraphModule) -> list[fx.Node]:
    reshard(gm, CONTEXT)
    return [node for node in gm.graph.nodes if node.meta.get("recompute") is RECOMPUTE]


def test_casts_and_transposes_of_parameter_are_recomputed(group: str) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(1, 8), 8)
    cast = build.call(to_copy, full, dtype=torch.bfloat16)
    turned = build.call(t, cast)
    gm = build.module(turned)
    assert _recomputed(gm) == [full, cast, turned]


def test_products_of_parameters_are_recomputed(group: str) -> None:
    build = Builder(group)
    first, second = (build.unshard(build.primal(1, 8), 8) for _ in range(2))
    product = build.call(mul, first, second)
    gm = build.module(build.call(add, product, build.primal(8, 8)))
    assert _recomputed(gm) == [first, second, product]


def test_products_with_constants_are_recomputed_but_not_constants(group: str) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(1, 8), 8)
    ones = build.call(torch.ops.aten.ones.default, [8, 8], device=torch.device("cpu"))
    gm = build.module(build.call(mul, full, ones), ones)
    assert len(_recomputed(gm)) == 2
    assert ones not in param_derived(gm.graph)


def test_parameter_expanded_to_batch_is_recomputed(group: str) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(1, 8), 1)
    rows = build.graph.placeholder("primals_2")
    rows.meta["val"] = ShapeEnv().create_unbacked_symint()
    expanded = build.graph.call_function(torch.ops.aten.expand.default, (full, [rows, -1]))
    gm = build.module(expanded, rows)
    assert _recomputed(gm) == [full, expanded]


def test_activations_are_left_to_partitioner(group: str) -> None:
    build = Builder(group)
    full, x = build.unshard(build.primal(1, 8), 8), build.primal(3, 8)
    y = build.call(torch.ops.aten.mm.default, x, full)
    gm = build.module(y)
    assert _recomputed(gm) == [full]


def test_random_values_are_not_recomputed(group: str) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(1, 8), 8)
    noise = build.call(torch.ops.aten.rand_like.default, full)
    gm = build.module(build.call(mul, full, noise))
    assert _recomputed(gm) == [full]


@torch.library.custom_op(
    "graphshard_tests::add_noise_", mutates_args={"x"}, tags=[torch.Tag.nondeterministic_seeded]
)
def _add_noise_(x: torch.Tensor) -> None:
    x.add_(torch.rand_like(x))


def test_random_values_that_custom_op_writes_are_not_recomputed(group: str) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(1, 8), 8)
    call = torch.ops.higher_order.auto_functionalized_v2
    op = torch.ops.graphshard_tests.add_noise_.default
    written = build.call(call, op, _x_base_index=0, _all_bases=[full])
    gm = build.module(build.call(operator.getitem, written, 1))
    assert _recomputed(gm) == [full]


def test_kept_parameters_are_saved(group: str) -> None:
    build = Builder(group)
    full = build.unshard(build.primal(1, 8), 8, reshard=False)
    gm = build.module(build.call(t, full))
    assert _recomputed(gm) == []
    assert full.meta["recompute"] is CheckpointPolicy.MUST_SAVE
