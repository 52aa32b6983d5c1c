"""The cost model for all torch ops with samples, all reductions, and an op that makes it fail."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from graphshard.cost import flops as flops_module
from graphshard.cost import fusion, model
from graphshard.cost.flops import flops
from tests.plan.machines import MACHINE, Graph

aten = torch.ops.aten


def test_every_operator_has_a_price() -> None:
    # Prices are between the bytes written and the bytes moved without fusion; flops equal torch's.
    command = [sys.executable, "-m", "tests.plan.op_samples"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["faults"], "\n".join(found["faults"])
    assert found["graphs"] > 900


def test_grouped_matmuls_of_experts_are_priced_as_matmuls() -> None:
    pytest.importorskip("transformers.integrations.moe")
    ops = torch.ops.transformers
    graph = Graph()
    tokens, weight = graph.input(1000, 400), graph.input(4, 400, 700)
    offs, grad = graph.input(4, dtype=torch.int32), graph.input(1000, 700)
    product = graph(ops.grouped_mm_fallback.default, tokens, weight, offs)
    backward = graph(ops.grouped_mm_fallback_backward.default, tokens, weight, offs, grad)
    assert flops(product).num_flops == 2 * 1000 * 400 * 700
    assert flops(backward).num_flops == 2 * flops(product).num_flops


def test_grouped_matmuls_with_split_columns_or_rows_are_priced_as_matmuls() -> None:
    graph = Graph()
    offs = graph.input(3, dtype=torch.int32)
    shapes = (16, 8), (3, 8, 8), (8, 16), (3, 8, 16)
    inputs = [graph.input(*shape, dtype=torch.bfloat16) for shape in shapes]
    rows, columns, weight, weights = inputs
    split_rows = graph(aten._grouped_mm.default, rows, weights, offs)
    split_columns = graph(aten._grouped_mm.default, columns, weight, offs)
    assert flops(split_rows).num_flops == 2 * 16 * 8 * 16
    assert flops(split_columns).num_flops == 2 * 8 * 8 * 16


def test_product_summed_over_batches_is_priced_as_all_products() -> None:
    graph = Graph()
    out, left, right = graph.input(4, 5), graph.input(3, 4, 6), graph.input(3, 6, 5)
    assert flops(graph(aten.addbmm.default, out, left, right)).num_flops == 2 * 3 * 4 * 6 * 5


OTHER_ARGUMENTS = {"p": 3.0, "ord": 3.0, "unbiased": True, "dtype": torch.float32, "keepdim": True}


def _reductions() -> list[Any]:
    packets = [getattr(aten, name) for name in aten]
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [op for op in ops if torch.Tag.reduction in op.tags and _takes_dims(op)]


def _takes_dims(op: Any) -> bool:
    arguments = op._schema.arguments
    is_other = any(a.is_out or "str" in str(a.type) for a in arguments)  # dims by name
    return "dim" in [argument.name for argument in arguments] and not is_other


def _call(graph: Graph, op: Any, dims: list[int]) -> Any:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.name == "self":
            args.append(graph.input(3, 4, 5))
        elif argument.name == "dim":
            value = dims if _lists(op) else dims[0]
            kwargs |= {"dim": value} if argument.kwarg_only else {}
            args += [] if argument.kwarg_only else [value]
        elif not argument.kwarg_only:
            args.append(OTHER_ARGUMENTS[argument.name])
        elif not argument.has_default_value():
            kwargs[argument.name] = OTHER_ARGUMENTS[argument.name]
    return graph(op, *args, **kwargs)


def _num_bytes(node: Any) -> int:
    return sum(value.nbytes for value in tree_leaves(node.meta["val"]))


def _cases() -> list[tuple[Any, list[int]]]:
    one: list[list[int]] = [[2], [-1], [0], [1]]
    several = [*one, [1, 2], [0, 1], [0, 1, 2]]
    return [(op, dims) for op in _reductions() for dims in (several if _lists(op) else one)]


def _lists(op: Any) -> bool:
    return "int[" in str(op._schema)


@pytest.mark.parametrize(("op", "dims"), _cases(), ids=str)
def test_only_reductions_over_last_dims_fuse_with_their_users(op: Any, dims: list[int]) -> None:
    graph = Graph()
    node = _call(graph, op, dims)
    is_tuple = isinstance(node.meta["val"], (tuple, list))
    result = graph(operator.getitem, node, 0) if is_tuple else node
    used = graph(aten.logical_not.default, result)
    fused_us = 3 * 4 * 5 * 4 + _num_bytes(used) + 1
    is_fused = dims in ([2], [-1], [1, 2])
    apart_us = fused_us + _num_bytes(node) + _num_bytes(result) + 1
    assert sum(graph.costs(used).values()) == (fused_us if is_fused else apart_us)


def test_op_with_failing_cost_is_priced_by_bytes_and_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> bool:
        raise IndexError("no such dimension")

    monkeypatch.setattr(flops_module, "_warned", set())
    monkeypatch.setattr(fusion, "_reduces_last_dims", fail)
    monkeypatch.setattr(model, "flops", fail)
    graph = Graph()
    x = graph.input(10, 10)
    reduced = [graph(aten.sum.dim_IntList, x, [1]) for _ in range(2)]
    product = graph(aten.mm.default, x, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costs = graph.costs(*reduced, product)
    assert costs[product] == 2 * 400 + 1  # x is read once
    assert sum(costs[node] for node in reduced) == 400 + 2 * 40 + 1
    named = [str(w.message) for w in caught]
    assert len(named) == 2
    assert "aten.sum.dim_IntList" in named[1] or "aten.sum.dim_IntList" in named[0]
    assert all("no such dimension" in text for text in named)


def test_error_in_memory_estimate_does_not_stop_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Any:
        raise IndexError("no such dimension")

    monkeypatch.setattr(flops_module, "_warned", set())
    monkeypatch.setattr(fusion, "_expression", fail)
    graph = Graph()
    graph.graph.output(graph(aten.exp.default, graph(aten.exp.default, graph.input(10))))
    values = fusion.GraphValues(graph.graph)
    with pytest.warns(UserWarning, match="unmaterialized values .* no such dimension"):
        assert model.CostModel(MACHINE).unmaterialized(values) == fusion.UnmaterializedValues()
