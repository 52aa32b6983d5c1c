"""Ops with misleading names or arguments.

A saved `argmax` is not a graph input like `arg0_1`, and a norm's second argument is not a dim.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests import ranks
from tests.numerics.compare import Twins, graphshard_warnings, train
from tests.ranks import on_ranks


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        order = x.detach().argsort(1)
        first, last = (pick(x.detach(), 1, keepdim=True) for pick in (torch.argmin, torch.argmax))
        x = x.gather(1, order) * x.gather(1, last) + x.gather(1, first).exp()
        return self.down(x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 7, generator=rng)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_argmax_results_may_be_saved_for_backward(compiler: str) -> None:
    ranks.run(2, train, Chosen, 2, compiler=compiler)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": F.normalize,
    "normalize by columns": lambda x: F.normalize(x, p=1.0, dim=0),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(0), p=3.0),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "vector_norm of all": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "vector_norm, ord of no dimension": lambda x: torch.linalg.vector_norm(x, 7.5, dim=(0, 1)),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, "fro"),
    "var": lambda x: x.var(0),
    "logsumexp": lambda x: x.logsumexp(-1),
}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.stack([norm(x).square().mean() for norm in NORMS.values()]).mean()


@on_ranks(2)
def test_norms_of_any_order_are_priced() -> None:
    with graphshard_warnings() as texts:
        Twins(Normed().eval()).train(Chosen.batch, 1)
    assert not texts  # the cost model supports every op
