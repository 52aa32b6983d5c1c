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
def test_error_of_another_branch_names_the_differing_call(target: Any, environment: str) -> None:
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
        (WithCode, _itself),
        (WithCode, _called),
        (ReadsWithoutGrad, _called),
    ],
)
@on_ranks(2)
def test_models_with_equal_traces_train(kind: Any, target: Any) -> None:
    model = kind()
    ignored = {model.ignored} if kind is WithCode else set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHSHARD_CHECK", "1")
        twins = Twins(model, function=target, fullgraph=False, ignored_params=ignored)
        twins.backward([kind.batch(torch.Generator().manual_seed(0))] * 2)
