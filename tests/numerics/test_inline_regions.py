"""Plans cover the parameters of layers marked with ``torch.compiler.nested_compile_region``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import ranks
from tests.numerics.compare import Twins

DIM, LAYERS = 6, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(2 * DIM, DIM),
        )
        self.register_buffer("scale", torch.full((DIM,), 0.5))

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.half(self.norm(x) * self.scale)

    @torch.compiler.nested_compile_region
    def half(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.down(self.up(x).sin()), x, use_reentrant=False)


class Marked(nn.Module):
    def __init__(self, in_checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.in_checkpoint = in_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.in_checkpoint else layer(x)
        return x.square().mean()

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(4, DIM, generator=generator)


def _planned(in_checkpoint: bool) -> list[set[str]]:
    twins = Twins(Marked(in_checkpoint), compiler="aot_eager" if in_checkpoint else "inductor")
    twins.train(Marked.batch, steps=2)
    return [{param.fqn for param in plan.params} for plan in twins.backend.plans]


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_plans_cover_parameters_of_all_regions(in_checkpoint: bool) -> None:
    names = {name for name, _ in Marked().named_parameters()}
    for forward, backward in ranks.run(2, _planned, in_checkpoint):
        assert forward == backward == names
