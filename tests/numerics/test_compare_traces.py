"""A forward that takes a different branch once its parameters are sharded raises an error.

Compiled modules, unlike functions, raise it only if GRAPHSHARD_CHECK=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import graphshard
from tests.models import GPT, MLP
from tests.numerics.compare import Twins, world_mesh
from tests.numerics.parallel import MLP as TensorParallelMLP
from tests.numerics.parallel import (
    assert_trains_like_fsdp2,
    batches,
    mesh_2d,
    split,
    under_fsdp2,
)
from tests.ranks import on_ranks


class LooksAtType(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y.relu() if type(self.linear) is nn.Linear else y.sigmoid()).mean()


def _called(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x)


def _itself(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize(
    ("target", "environment"), [(_called, "0"), (_itself, "1"), (_called, "1")]
)
@on_ranks(2)
def test_error_for_different_branch_names_differing_call(target: Any, environment: str) -> None:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHSHARD_CHECK", environment)
        compiled = torch.compile(target(LooksAtType()), backend=backend)
        with pytest.raises(ValueError, match=r"calls sigmoid where .* calls relu, at .*y\.sigmoid"):
            compiled(torch.ones(3, 5))


class WithCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.scale = nn.Parameter(torch.ones(7))
        self.ignored = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.ignored
        x = torch.cond(x.sum() > 0, lambda x: x * self.scale, lambda x: x - self.scale, (x,))
        loss: Tensor = torch.utils.checkpoint.checkpoint(self.mlp, x, use_reentrant=False)
        torch._dynamo.graph_break()
        return loss + self.scale.sum() + self.ignored.sum()

    batch = staticmethod(MLP.batch)


class Columns(nn.Module):
    """Model with a transposed parameter, which the test shards by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.weight = MLP(), nn.Parameter(torch.randn(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.mlp(x @ self.weight.movedim(0, 1))
        return loss

    batch = staticmethod(MLP.batch)


class ReadsWithoutGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.scale
        loss: Tensor = self.mlp(x * scale)
        return loss

    batch = staticmethod(MLP.batch)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (GPT, _itself),
        (MLP, _called),
        (Columns, _called),
        (WithCode, _itself),
        (ReadsWithoutGrad, _called),
    ],
)
@on_ranks(2)
def test_models_with_equal_traces_train(kind: Any, target: Any) -> None:
    model = kind()
    ignored = {model.ignored} if kind is WithCode else set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHSHARD_CHECK", "1")
        twins = Twins(
            model,
            function=target,
            fullgraph=False,
            ignored_params=ignored,
            overrides={"weight": {"dim": 1}} if kind is Columns else {},
        )
        twins.backward([kind.batch(torch.Generator().manual_seed(0))] * 2)


class Checkpointed(TensorParallelMLP):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return loss


@on_ranks(4)
def test_function_of_split_checkpointed_model_trains() -> None:
    mesh = mesh_2d()
    model = split(Checkpointed, mesh)
    backend = graphshard.backend(mesh["dp"], compiler="aot_eager")
    compiled = torch.compile(_called(model), backend=backend, fullgraph=True)
    eager, data = under_fsdp2(Checkpointed, mesh), batches(Checkpointed, mesh, 2)
    assert_trains_like_fsdp2(compiled, model, eager, data)
