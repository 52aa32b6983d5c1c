"""Random small models for a property test: a model is described by plain data, which hypothesis
draws and shrinks and which travels to ranks, and every rank builds it from that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Tree = tuple[Any, ...]
"""(kind, *children or sizes)."""


@dataclass(frozen=True)
class Description:
    """A model: its width, its tree, and which of its parameters are frozen, in turn."""

    dim: int
    tree: Tree
    frozen: tuple[bool, ...]


LEAVES = ("linear", "no_bias", "norm", "gain", "scalar", "row", "tanh", "unused", "frozen_int")


def _nodes(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    """Return a strategy of trees whose root has `children`."""
    several = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("chain"), several),
        st.tuples(st.just("sum"), several),
        st.tuples(st.just("residual"), children),
        st.tuples(st.just("twice"), children),
    )


_leaves = st.one_of(
    st.tuples(st.sampled_from(LEAVES)),
    st.tuples(st.just("bottleneck"), st.integers(1, 9)),
    # One of the modules built before, or a linear layer with the weight of one.
    st.tuples(st.sampled_from(("again", "tied")), st.integers(0, 20)),
)

descriptions = st.builds(
    Description,
    dim=st.integers(2, 7),
    tree=st.recursive(_leaves, _nodes, max_leaves=8),
    frozen=st.lists(st.booleans(), max_size=4).map(tuple),
)


class _Gain(nn.Module):
    """Multiplies by a parameter of any shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` times the parameter."""
        return x * self.gain


class _Unused(nn.Module):
    """Has a parameter that nothing reads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(3, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x


class _Shift(nn.Module):
    """Integers are added, and a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.randint(-2, 3, (dim,)), requires_grad=False)
        self.register_buffer("offset", torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus the parameter and the buffer."""
        return x + self.steps + self.offset


class _Combined(nn.Module):
    """Calls its children one after the other, twice, or side by side."""

    def __init__(self, kind: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the children make of `x`."""
        if self.kind == "chain":
            for part in self.parts:
                x = part(x)
            return x
        if self.kind == "twice":
            return torch.tanh(self.parts[0](torch.tanh(self.parts[0](x))))
        outputs = [part(x) for part in self.parts]
        return sum(outputs, x if self.kind == "residual" else torch.zeros_like(x))


class _Builder:
    """Builds a tree, and remembers what may be used again."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.built: list[nn.Module] = []
        self.linears: list[nn.Linear] = []

    def build(self, tree: Tree) -> nn.Module:
        """Return the module of a tree, which may be one that was built before."""
        kind, *args = tree
        if kind == "again" and self.built:
            return self.built[args[0] % len(self.built)]
        if kind in ("chain", "sum"):
            module: nn.Module = _Combined(kind, [self.build(child) for child in args[0]])
        elif kind in ("residual", "twice"):
            module = _Combined(kind, [self.build(args[0])])
        elif kind == "tied" and self.linears:
            module = nn.Linear(self.dim, self.dim)
            module.weight = self.linears[args[0] % len(self.linears)].weight
        else:
            module = self._leaf(kind, args)
        self.built.append(module)
        return module

    def _leaf(self, kind: str, args: list[int]) -> nn.Module:
        """Return a new module without children."""
        dim = self.dim
        if kind == "bottleneck":
            return nn.Sequential(nn.Linear(dim, args[0]), nn.Tanh(), nn.Linear(args[0], dim))
        if kind == "linear":
            linear = nn.Linear(dim, dim)
            self.linears.append(linear)
            return linear
        simple = {
            "norm": lambda: nn.LayerNorm(dim),
            "gain": lambda: _Gain(dim),
            "scalar": lambda: _Gain(),
            "row": lambda: _Gain(1, dim),
            "tanh": nn.Tanh,
            "unused": lambda: _Unused(dim),
            "frozen_int": lambda: _Shift(dim),
        }
        return simple.get(kind, lambda: nn.Linear(dim, dim, bias=False))()


class RandomModel(nn.Module):
    """What is described, between an input layer and a loss; the input layer is never frozen.

    In double precision, so that a gradient that is zero but for rounding is far from any other.
    """

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, description.dim)
        self.body = _Builder(description.dim).build(description.tree)
        for param, frozen in zip(self._trainable(), cycle(description.frozen or (False,))):
            param.requires_grad_(not frozen)
        self.double()

    def _trainable(self) -> Iterator[nn.Parameter]:
        """Return the parameters that can have gradients, in order."""
        return (param for param in self.body.parameters() if param.is_floating_point())

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of `x` `[4, 3]`."""
        # Bounded, so that no draw explodes in a few steps.
        return torch.tanh(self.body(torch.tanh(self.inputs(x)))).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        """Return inputs `[4, 3]` in double precision."""
        return torch.randn(4, 3, generator=rng, dtype=torch.float64)
