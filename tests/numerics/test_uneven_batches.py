"""Ranks whose batches differ so much that they trace different graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests import ranks
from tests.numerics.compare import Twins, generator, num_graphs
from tests.ranks import on_ranks

DIM = 16


class Encoder(nn.Module):
    """Encoder whose trace for a single sample reads the weights in a different order."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.encoder(x) - x).square().mean()


def _sequences(step: int, sizes: Sequence[int]) -> list[Tensor]:
    return [torch.randn(n, 5, DIM, generator=generator(step, r)) for r, n in enumerate(sizes)]


def _train_encoder(sizes: Sequence[Sequence[int]], overlap: bool) -> int:
    twins = Twins(Encoder(), schedule=graphshard.SchedulePolicy(overlap=overlap))
    for step, batch_sizes in enumerate(sizes):
        twins.backward(_sequences(step, batch_sizes))
        twins.check()
        twins.zero_grad()
    return num_graphs()


@pytest.mark.parametrize(
    ("sizes", "overlap"),
    [([(4, 4), (1, 4)], True), ([(4, 4), (4, 1)], False)],
)
def test_last_batch_may_have_one_sample_on_one_rank(sizes: Any, overlap: bool) -> None:
    assert max(ranks.run(2, _train_encoder, sizes, overlap)) == len(sizes)


class Positions(nn.Module):
    """Model with a parameter whose gradient is an expanded tensor for one sample, a sum for two."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.positions).mean()


@on_ranks(2)
def test_gradient_may_be_expanded_on_one_rank() -> None:
    twins = Twins(Positions())
    for step, batch_sizes in enumerate([(1, 2), (2, 1)]):
        twins.backward(_sequences(step, batch_sizes))
        twins.check()
        twins.zero_grad()


class Table(nn.Module):
    """Model whose rows ``table[ids]`` torch's partitioner recomputes only if there are many ids."""

    def __init__(self, *row: int) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(1000, *row)), nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = nn.functional.gelu(self.table[ids])
        return self.out(rows.view(len(ids), -1).expand(-1, 64)).square().mean()


@pytest.mark.parametrize("row", [(64,), ()])
@on_ranks(2)
def test_batch_size_does_not_decide_what_backward_gathers(row: tuple[int, ...]) -> None:
    twins = Twins(Table(*row))
    twins.backward([torch.arange(400), torch.arange(100)])
    twins.check()


class Pooled(nn.Module):
    """Model whose pooled rows torch's partitioner recomputes only if there are at most four."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gain, self.bias = (nn.Parameter(torch.randn(DIM)) for _ in range(2))
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * self.gain + self.bias).sin().square().mean()


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(0)


def _first(rows: Tensor) -> Tensor:
    return rows[[0]]


@pytest.mark.parametrize(("pool", "num_rows"), [(_mean, 1), (_mean, 4), (_first, 1)])
@on_ranks(2)
def test_number_of_rows_does_not_decide_what_backward_gathers(
    pool: Callable[[Tensor], Tensor], num_rows: int
) -> None:
    twins = Twins(Pooled(pool))
    twins.backward(_sequences(0, (8, num_rows)))
    twins.check()


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        layers = [self.first, self.second]
        if len(inputs) < 2:
            layers.reverse()
        return torch.stack([layer(x).square().mean() for x in inputs for layer in layers]).sum()


@on_ranks(2)
def test_ranks_may_have_lists_of_different_lengths() -> None:
    twins = Twins(Lists(), compiler="inductor", reshard_after_forward=False)
    for step, lengths in enumerate([(2, 1), (1, 2), (2, 2)]):
        twins.backward(
            [
                [torch.randn(3, DIM, generator=generator(step, rank, i)) for i in range(length)]
                for rank, length in enumerate(lengths)
            ]
        )
        twins.check()
        twins.zero_grad()


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).values().square().mean()  # type: ignore[operator]


@on_ranks(2)
def test_ranks_may_have_jagged_tensors_of_different_lengths() -> None:
    twins = Twins(Ragged())
    for step in range(2):
        rows = [[torch.randn(n, DIM) for n in (3 + rank + step, 2)] for rank in range(2)]
        twins.backward([torch.nested.nested_tensor(r, layout=torch.jagged) for r in rows])
        twins.check()
