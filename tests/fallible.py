"""A model whose graphs fail midway on demand, as if out of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphshard._torch.distributed import num_registered_works

DIM, ROWS = 64, 4

fails_in: set[str] = set()
"""Graphs that raise on their next run: "forward", "backward"."""

passes_left: list[int] = []
"""Number of `may_fail` calls in these graphs that still succeed: one element, or none for 0."""

in_flight_then: list[int] = []
"""Number of collectives in flight at each failure."""


@torch.library.custom_op("graphshard_test::may_fail", mutates_args=())
def may_fail(x: Tensor, where: str) -> Tensor:
    if where in fails_in and not _pass_once():
        in_flight_then.append(num_registered_works())
        raise MemoryError(where)
    return x.clone()


def _pass_once() -> bool:
    if not passes_left or not passes_left[0]:
        return False
    passes_left[0] -= 1
    return True


@may_fail.register_fake
def _(x: Tensor, where: str) -> Tensor:
    return torch.empty_like(x)


may_fail.register_autograd(lambda ctx, grad: (may_fail(grad, "backward"), None))


class Fallible(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = may_fail(torch.tanh(layer(x)), "forward")
        return x.square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(ROWS, DIM, generator=rng)
