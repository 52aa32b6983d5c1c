"""Plans cover the parameters of layers marked with ``torch.compiler.nested_compile_region``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import ranks
from tests.numerics.compare import Twins

DIM, LAYERS = 6, 2


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
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(4, DIM, generator=generator)


def _planned() -> list[set[str]]:
    twins = Twins(Marked(), compiler="inductor")
    twins.train(Marked.batch, steps=2)
    return [{param.fqn for param in plan.params} for plan in twins.backend.plans]


def test_plans_cover_parameters_of_all_regions() -> None:
    names = {name for name, _ in Marked().named_parameters()}
    for forward, backward in ranks.run(2, _planned):
        assert forward == backward == names
