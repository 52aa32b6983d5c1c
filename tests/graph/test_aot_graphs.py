"""Inputs of AOTAutograd's graphs, as opposed to saved activations, tokens and constants."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrizations import orthogonal

import graphshard
from graphshard._torch.aot_graphs import graph_kind, original_inputs
from graphshard.kinds import TransferKind
from tests.graph.builder import Builder


@pytest.mark.parametrize("saved", ["argmax", "argmin_1", "argsort", "arg1", "arg1_1", "primals"])
def test_saved_activations_are_not_inputs_whatever_their_names(saved: str) -> None:
    builder = Builder("0")
    shard = builder.primal(4, 2)
    builder._placeholder(saved, (4,), torch.int64)
    gradient = builder.tangent(4)
    graph = builder.module(gradient, shard).graph
    assert graph_kind(graph) == "backward"
    assert original_inputs(graph) == {shard: 0}


def test_inference_inputs_are_numbered_from_0() -> None:
    builder = Builder("0")
    first, second = (builder._placeholder(f"arg{i}_1", (4,), torch.float32) for i in range(2))
    graph = builder.module(first, second).graph
    assert graph_kind(graph) == "inference"
    assert original_inputs(graph) == {first: 0, second: 1}


class _WithTokenAndConstant(nn.Module):
    """A model whose graphs have a token (``linalg.solve``) and a constant (``table``) as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = orthogonal(nn.Linear(7, 7), orthogonal_map="cayley")
        self.third = nn.Linear(7, 3)
        self.table = torch.ones(7)
        torch._dynamo.mark_static_address(self.table)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.third(self.second(self.first(x) * self.table)).square().mean()
        return loss


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_parameters_are_distinguished_from_tokens_and_constants(
    mesh: DeviceMesh, compiler: str
) -> None:
    model = _WithTokenAndConstant()
    backend = graphshard.backend(mesh, compiler=compiler)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(torch.ones(5, 7)).backward()
    with torch.no_grad():
        compiled(torch.ones(5, 7))
    names = {name for name, _ in model.named_parameters()}
    assert [plan.graph for plan in backend.plans] == ["forward", "backward", "inference"]
    for plan in backend.plans:
        assert {param.fqn for param in plan.params} <= names
    forward, backward, inference = backend.plans
    assert {p.fqn for p in forward.params} == {p.fqn for p in inference.params} == names
    reductions = [t for t in backward.problem.transfers if t.kind == TransferKind.REDUCE_SCATTER]
    assert {backward.fqn_of(transfer) for transfer in reductions} == names
