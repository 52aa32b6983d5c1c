"""Equal layers become calls of one subgraph; launches, waits and results do not change."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ops.nodes import PLANNED
from graphshard.passes.regions import share_regions
from graphshard.planning.plan import Regions
from tests.graph.builder import CONTEXT

aten = torch.ops.aten
INVOKE = torch.ops.higher_order.invoke_subgraph


def _traced(function: Any, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def _shared(gm: fx.GraphModule) -> Regions:
    context = replace(CONTEXT, is_worth_sharing=lambda _: True)
    share_regions(gm, context)
    gm.graph.lint()
    gm.recompile()
    return context.regions


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=INVOKE)


def _layer(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w.t()).view(2, 2, 8).transpose(0, 1).contiguous().view(4, 8)
    return x + torch.sigmoid(h * 0.5).exp() * h


def _deep(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = _layer(x, w)
    return x


def _inputs(layers: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(layers))]


def test_equal_layers_become_one_subgraph() -> None:
    inputs = _inputs()
    gm = _traced(_deep, *inputs)
    expected, num_nodes = gm(*inputs), len(gm.graph.nodes)
    regions = _shared(gm)
    assert (regions.num_compiled_regions, regions.num_calls) == (1, 9)
    assert regions.num_nodes == 9 * regions.num_compiled == num_nodes - 11
    assert {call.args[1] for call in _calls(gm)} == {"region_0"}
    assert torch.equal(gm(*inputs), expected)


def test_regions_not_worth_sharing_are_not_shared() -> None:
    gm = _traced(_deep, *_inputs())
    context = replace(CONTEXT, is_worth_sharing=lambda _: False)
    share_regions(gm, context)
    assert context.regions == Regions()
    assert not _calls(gm)


def test_different_layers_become_different_subgraphs() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            x = _layer(x, w) * (2.0 if i < 9 else 3.0)
        return x

    inputs = _inputs(18)
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    regions = _shared(gm)
    assert regions.num_compiled_regions == 2
    assert torch.equal(gm(*inputs), expected)


def test_regions_do_not_span_launches() -> None:
    gm = _traced(_deep, *_inputs())
    products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    launch = products[3].next
    with gm.graph.inserting_before(launch):
        planned = gm.graph.call_function(aten.neg.default, (products[0].args[0],))
    planned.meta = {"val": products[0].args[0].meta["val"], PLANNED: True}
    regions = _shared(gm)
    assert regions.num_compiled_regions == 1  # all regions now begin after the matmul
    names = [n for n in gm.graph.nodes if n.target is INVOKE or n is planned]
    assert names.index(planned) == 3  # after the end of the third layer
    assert planned in gm.graph.nodes


def test_no_region_returns_a_view() -> None:
    def deep(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for w in weights:
            x = _layer(x, w)
            kept.append(x.view(2, 16).t())  # returned, not used in the graph
        return (x, *kept)

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    assert _shared(gm).num_compiled_regions == 1
    for call in _calls(gm):
        region: Any = getattr(gm, call.args[1])
        returned = region.graph.output_node().args[0]
        assert not any(getattr(node.target, "is_view", False) for node in returned)
    for ours, theirs in zip(gm(*inputs), expected):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_constants_are_created_inside_regions() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = torch.where(_layer(x, w) > 1, x, torch.full((), -2.0))
        return x

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    assert _shared(gm).num_compiled_regions == 1
    assert not gm.graph.find_nodes(op="call_function", target=aten.full.default)
    assert torch.equal(gm(*inputs), expected)


def test_getitems_stay_with_their_operator() -> None:
    def deep(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for w in weights:
            x, indices = aten.max.dim(_layer(x, w).view(4, 2, 4), 1)
            x = torch.cat([x, x], 1)
            kept.append(indices)
        return (x, *kept)

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    assert _shared(gm).num_compiled_regions == 1
    assert all(torch.equal(*pair) for pair in zip(gm(*inputs), expected))
    tuples = {
        n.args[0].target for n in gm.graph.find_nodes(op="call_function", target=operator.getitem)
    }
    assert tuples == {INVOKE}


def _passed(gm: fx.GraphModule) -> list[Tensor]:
    return [node.meta["val"] for call in _calls(gm) for node in call.args[2:]] + _results(gm)


def test_no_region_takes_a_tuple() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            # Layers are equal from the parts of the tuple on.
            values, indices = aten.topk.default(_layer(x, w), 3, -1, True, i != 1)
            x = x + values.sum(-1, keepdim=True) * indices.sum(-1, keepdim=True)
        return x

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    assert _shared(gm).num_calls > 0
    assert all(isinstance(value, Tensor) for value in _passed(gm))
    assert torch.equal(gm(*inputs), expected)


@pytest.mark.parametrize("is_input", [False, True])
def test_no_region_passes_a_conjugate_view(is_input: bool) -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        views = [weight.conj() for weight in weights]
        for w in views:
            x = torch.sin((x @ w) / 8) * w + x
            x = torch.exp(x / x.abs().sum()) + x / 8
        return x

    x, *weights = [torch.view_as_complex(torch.randn(4, 4, 2)) for _ in range(10)]
    if is_input:
        weights[:2] = [weight.conj() for weight in weights[:2]]
    gm = _traced(deep, x, *weights)
    expected = gm(x, *weights)
    assert _shared(gm).num_calls > 0
    assert not any(value.is_conj() for value in _passed(gm))
    assert torch.equal(gm(x, *weights), expected)


def test_order_of_random_draws_is_kept() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = aten.native_dropout.default(_layer(x, w), 0.5, True)[0] + torch.rand(8)
        return x

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    torch.manual_seed(0)
    expected = gm(*inputs)
    assert _shared(gm).num_calls > 0
    torch.manual_seed(0)
    assert torch.equal(gm(*inputs), expected)


def test_mutating_ops_are_in_no_region() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = _layer(x, w)
            aten.copy_.default(w, x[:1].expand(8, 8))
        return x

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*[t.clone() for t in inputs])
    assert _shared(gm).num_compiled_regions == 1
    assert len(gm.graph.find_nodes(op="call_function", target=aten.copy_.default)) == 9
    assert torch.equal(gm(*[t.clone() for t in inputs]), expected)


def _normalized(x: Tensor, w: Tensor) -> Tensor:
    convert = torch.ops.prims.convert_element_type.default
    h = convert(x @ w.t(), torch.float32)
    centred = (h - h.mean(0, keepdim=True)) * torch.rsqrt(h.var(0, keepdim=True) + 1e-5)
    return convert(torch.relu(centred * w[0] + 1), torch.bfloat16)


def _deep_normalized(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = _normalized(x, w)
    return x


def _wide_inputs(layers: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.bfloat16() for t in (torch.randn(64, 8), *torch.randn(layers, 8, 8).unbind())]


def _insert_cuts_after(gm: fx.GraphModule, op: Any) -> None:
    anything = next(iter(gm.graph.nodes))
    for node in gm.graph.find_nodes(op="call_function", target=op):
        with gm.graph.inserting_after(node):
            planned = gm.graph.call_function(aten.neg.default, (anything,))
        planned.meta = {"val": anything.meta["val"], PLANNED: True}


def _results(gm: fx.GraphModule) -> list[Tensor]:
    parts = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    return [part.meta["val"] for part in parts if part.args[0].target is INVOKE]


def test_only_values_in_memory_cross_region_boundary_in_norm() -> None:
    inputs = _wide_inputs()
    gm = _traced(_deep_normalized, *inputs)
    expected = gm(*inputs)
    _insert_cuts_after(gm, aten.rsqrt.default)
    assert _shared(gm).num_calls > 9  # two per layer, except for the first and last
    large = {result.dtype for result in _results(gm) if result.numel() == 64 * 8}
    assert large == {torch.bfloat16}
    assert torch.equal(gm(*inputs), expected)


def test_activation_is_recomputed_in_region_of_its_product() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(torch.nn.functional.silu(-(x @ w.t())) * (x @ w) + x)
        return x

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    _insert_cuts_after(gm, aten.silu.default)
    assert _shared(gm).num_lost_fusions == 0
    for call in _calls(gm):
        region: Any = getattr(gm, call.args[1])
        returned = {node.target for node in region.graph.output_node().args[0]}
        assert returned <= {aten.mm.default, aten.tanh.default}
    assert torch.equal(gm(*inputs), expected)


def test_values_are_computed_before_write_to_their_input() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            scale = torch.ops.prims.convert_element_type.default(w, torch.float32)[0]
            x = _normalized(x, w)
            aten.copy_.default(w, x[:1].expand(8, 8))
            x = torch.ops.prims.convert_element_type.default(x * scale, torch.bfloat16)
        return x

    inputs = _wide_inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*[t.clone() for t in inputs])
    assert _shared(gm).num_calls == 9
    assert torch.equal(gm(*[t.clone() for t in inputs]), expected)


@pytest.mark.parametrize(("device", "num_regions"), [("cpu", 1), ("meta", 2)])
def test_inputs_of_a_region_are_equally_aligned_on_devices(device: str, num_regions: int) -> None:
    lookup_seed = torch.ops.prims.inductor_lookup_seed.default

    def deep(x: Tensor, labels: Tensor, seeds: Tensor, *weights: Tensor) -> Tensor:
        shifted = [labels[i : i + 8] for i in range(18)]  # every second one at 16 bytes
        for i, w in enumerate(weights):
            x = _layer(x, w) * shifted[i] + lookup_seed(seeds, i)
        return x

    x, *weights = (tensor.to(device) for tensor in _inputs(18))
    labels, seeds = torch.zeros(26, dtype=torch.int64), torch.zeros(18, dtype=torch.int64)
    gm = _traced(deep, x, labels.to(device), seeds.to(device), *weights)
    regions = _shared(gm)
    assert (regions.num_compiled_regions, regions.num_calls) == (num_regions, 18)


@pytest.mark.parametrize(
    ("num_returned", "writes", "num_outside"), [(9, False, 0), (8, False, 8), (9, True, 9)]
)
def test_values_only_returned_are_computed_in_regions(
    num_returned: int, writes: bool, num_outside: int
) -> None:
    def deep(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        sums = []
        for w in weights:
            x = _layer(x, w)
            sums.append(x.sum(0))
        if writes:
            for total in sums:
                aten.add_.Tensor(total, 1)
        return (x, *sums, *(aten.sqrt.default(total).abs() for total in sums[:num_returned]))

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    # With a square root in eight of the nine layers, the ninth could not share their region.
    assert _shared(gm).num_compiled_regions == 1
    assert len(gm.graph.find_nodes(op="call_function", target=aten.sqrt.default)) == num_outside
    for ours, theirs in zip(gm(*inputs), expected):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("changes", [True, False])
def test_convolutions_are_shared_only_if_layouts_are_kept(changes: bool) -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = _layer(x, w)
        images = x.view(4, 8, 1, 1).expand(4, 8, 5, 5)
        for w in weights:
            weight = w.view(8, 8, 1, 1)
            images = torch.relu(torch.conv2d(images, weight) * 2 + images).exp().sigmoid()
        return images

    inputs = _inputs()
    gm = _traced(deep, *inputs)
    expected = gm(*inputs)
    with inductor_config.patch(force_layout_optimization=changes, layout_optimization=changes):
        num_calls = _shared(gm).num_calls
    assert num_calls == 9 if changes else num_calls > 9
    assert torch.equal(gm(*inputs), expected)
