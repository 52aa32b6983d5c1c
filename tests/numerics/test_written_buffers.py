"""Forwards that read a buffer, then write it: recomputation in backward reads the old value.

Plain ``torch.compile`` of torch 2.11 to 2.13 silently reads the new value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.numerics.compare import assert_close, assert_same, world_mesh
from tests.ranks import on_ranks

DIM = 16


class Averaging(nn.Module):
    """Model that adds a running average of its inputs; backward recomputes this cheap sum."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("average", torch.randn(DIM))
        self.gain = nn.Parameter(torch.randn(DIM))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain + self.view(self.average)
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean((0, 1)))
        return self.head(y.sin().cos()).square().mean()


def _as_it_is(average: Tensor) -> Tensor:
    return average


def _by_a_view(average: Tensor) -> Tensor:
    return average.view(2, -1).t()[:, 1:].reshape(-1).repeat(2)


def _by_rows(average: Tensor) -> Tensor:
    return average.expand(3, DIM)


@pytest.mark.parametrize(
    ("compiler", "view", "forwards"),
    [
        ("aot_eager", _as_it_is, 1),
        ("aot_eager", _as_it_is, 2),
        ("aot_eager", _by_a_view, 2),
        ("aot_eager", _by_rows, 2),
        ("inductor", _by_a_view, 2),
    ],
)
@on_ranks(2)
def test_backward_reads_buffer_before_write(
    compiler: str, view: Callable[[Tensor], Tensor], forwards: int
) -> None:
    torch.manual_seed(0)
    model = Averaging(view)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=graphshard.backend(world_mesh(), compiler=compiler))
    for _ in range(2):
        batches = [torch.randn(4, 3, DIM) for _ in range(forwards)]
        for module in (compiled, reference):
            torch.stack([module(x) for x in batches]).sum().backward()
        assert_same(model, reference)
        assert_close("average", model.average, reference.average)
