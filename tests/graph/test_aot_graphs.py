"""Inputs of AOTAutograd's graphs, told from what forward saved by their names."""

from __future__ import annotations

import pytest
import torch

from graphshard._torch.aot_graphs import graph_kind, original_inputs
from tests.graph.builder import Builder


@pytest.mark.parametrize("saved", ["argmax", "argmin_1", "argsort", "arg1", "arg1_1", "primals"])
def test_what_is_saved_is_no_input_whatever_its_name(saved: str) -> None:
    builder = Builder("0")
    shard = builder.primal(4, 2)
    builder._placeholder(saved, (4,), torch.int64)
    gradient = builder.tangent(4)
    graph = builder.module(gradient, shard).graph
    assert graph_kind(graph) == "backward"
    assert original_inputs(graph) == {shard: 0}


def test_inputs_of_inference_are_counted_from_0() -> None:
    builder = Builder("0")
    first, second = (builder._placeholder(f"arg{i}_1", (4,), torch.float32) for i in range(2))
    graph = builder.module(first, second).graph
    assert graph_kind(graph) == "inference"
    assert original_inputs(graph) == {first: 0, second: 1}
