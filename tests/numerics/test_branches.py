"""Code that runs as values say: ranks whose values differ gather alike, or there is an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard.errors import BackendError
from tests import ranks
from tests.numerics.compare import Twins, world_mesh

DIM = 6


class Branches(nn.Module):
    """Takes one of two layers of one shape; ranks need not take the same."""

    def __init__(self, reads_before: bool) -> None:
        super().__init__()
        self.positive, self.negative = (nn.Linear(DIM, DIM, False) for _ in range(2))
        self.reads_before = reads_before

    def forward(self, x: Tensor) -> Tensor:
        if not self.reads_before:
            return torch.cond(
                x.sum() > 0, lambda x: self.positive(x).sin(), lambda x: self.negative(x), (x,)
            ).sum()
        positive, negative = self.positive.weight, self.negative.weight
        return torch.cond(
            x.sum() > 0,
            lambda x: F.linear(x, positive).sin(),
            lambda x: F.linear(x, negative),
            (x,),
        ).sum()


class Loop(nn.Module):
    """Calls a layer as often as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        halved = torch.while_loop(
            lambda x: x.abs().sum() > 1, lambda x: (self.layer(x).tanh() / 2,), (x,)
        )
        return halved[0].sum()


def _batch(sign: float) -> Tensor:
    return torch.full((2, DIM), sign)


def _error(model: nn.Module) -> str:
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    with pytest.raises(BackendError) as caught, torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(_batch(1.0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "name", "operator"),
    [(Branches(False), "positive.weight", "cond"), (Loop(), "layer.weight", "while_loop")],
    ids=["cond", "while_loop"],
)
def test_a_parameter_that_is_read_within_raises(model: nn.Module, name: str, operator: str) -> None:
    for error in ranks.run(2, _error, model):
        assert f"parameter {name!r} is read within torch.{operator}" in error


def _train() -> None:
    twins = Twins(Branches(True))
    for signs in ((1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)):
        twins.backward([_batch(sign) for sign in signs])
        twins.check()


def test_parameters_that_are_read_before_train_as_unsharded_ones() -> None:
    ranks.run(2, _train)
