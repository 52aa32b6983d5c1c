"""The model of a case, and its batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.compare import generator
from tests.numerics.fuzz.case import Block, Case
from tests.numerics.fuzz.formulas import FORMULAS, Computed
from tests.numerics.fuzz.modules import MODULES, SPLIT, WRAPPERS, Flag, Wrapper, call

VOCAB = 11
WIDTH = 3


class _Builder:
    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.leaves: list[nn.Module] = []
        self.linears: list[nn.Linear] = []

    def build(self, block: Block) -> nn.Module:
        kind, *rest = block
        if kind in WRAPPERS:
            return Wrapper(kind, [self.build(part) for part in rest])
        if kind == "again" and self.leaves:
            return self.leaves[rest[0] % len(self.leaves)]
        leaf = self._leaf(kind, rest)
        self.leaves.append(leaf)
        return leaf

    def _leaf(self, kind: str, rest: list[int]) -> nn.Module:
        if kind in FORMULAS:
            return Computed(kind, self.dim)
        if kind in MODULES or kind in SPLIT:
            return (MODULES | SPLIT)[kind](self.dim)
        linear = nn.Linear(self.dim, self.dim)
        if kind == "tied" and self.linears:
            linear.weight = self.linears[rest[0] % len(self.linears)].weight
        self.linears.append(linear)
        return linear


class Model(nn.Module):
    """Blocks between an entry and a head; entry and head are never frozen."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.output = case.output
        if case.entry == "tokens":
            self.entry: nn.Module = nn.Embedding(VOCAB, case.dim)
            self.head = nn.Linear(case.dim, VOCAB, bias=False)
            self.head.weight = self.entry.weight
        else:
            self.entry = nn.Linear(WIDTH, case.dim)
            self.head = nn.Linear(case.dim, 5)
        builder = _Builder(case.dim)
        self.blocks = nn.ModuleList(builder.build(block) for block in case.blocks)
        if case.precision == "float64":
            self.double()

    def forward(self, x: Tensor, flag: Flag) -> Any:
        """Return the loss, or outputs that `loss` reduces to one."""
        x = torch.tanh(self.entry(x))
        for block in self.blocks:
            x = torch.tanh(call(block, x, flag))
        logits = self.head(x)
        if self.output == "tensor":
            return logits
        if self.output == "tuple":
            return x, [logits, x.shape[0]]
        if self.output == "dict":
            return {"logits": logits, **({"hidden": x} if flag else {"none": None})}
        if self.output == "parameter":
            return logits, self.head.weight.sum(0), self.head.weight
        return F.cross_entropy(logits.flatten(0, 1), _labels(x))


def _labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] * x.shape[1], device=x.device) % 5


def loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else output.square().mean() + output.mean()
    values = output.values() if isinstance(output, dict) else output
    parts = [loss(value) for value in values if isinstance(value, Tensor | list)]
    return torch.stack([part.double() for part in parts]).sum()


def flag(case: Case, step: int, micro: int) -> bool:
    return (case.seed + step + micro) % 2 == 0


def batch(case: Case, step: int, micro: int, rank: int) -> Tensor:
    """Return one rank's inputs: `[rows, length]` tokens or `[rows, length, 3]` floats."""
    rows = 4
    if case.rows in ("by_step", "by_both"):
        rows += step
    if case.rows in ("by_rank", "by_both"):
        rows += (rank + step) % 3
    length = 3 + (step if case.rows == "by_both" else 0)
    rng = generator(case.seed, step, micro, rank)
    if case.entry == "tokens":
        return torch.randint(VOCAB, (rows, length), generator=rng)
    dtype = torch.float64 if case.precision == "float64" else torch.float32
    return torch.randn(rows, length, WIDTH, generator=rng, dtype=dtype)
