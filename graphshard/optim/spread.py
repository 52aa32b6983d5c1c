"""Decide which rank orthogonalises which matrix, and which matrices travel together; pure.

    matrices, largest first    A A A A B B B c c c c
    owners (least work so far) 0 1 2 3 0 1 2 3 3 0 1
    buckets (bytes)            |A A A A|B B B c c c c|
    batches of a bucket        one per owner, shape and parameter group

Equal shapes are adjacent, so that a bucket gives each rank about the same work, and a rank can
orthogonalise its matrices of a bucket by batched products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .newton_schulz import WIRE_DTYPE


class MatrixSpec(NamedTuple):
    """The facts about a matrix that decide where it goes.

    Attributes:
        shape: ``(rows, columns)``, both at least 1.
        group: number of the optimizer's parameter group.
    """

    shape: tuple[int, int]
    group: int

    @property
    def cost(self) -> int:
        """Number of multiplications in a Newton-Schulz step, up to a constant factor."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix as it travels."""
        return self.shape[0] * self.shape[1] * WIRE_DTYPE.itemsize


class Batch(NamedTuple):
    """Matrices of one shape and group that one rank orthogonalises together.

    Attributes:
        owner: number of the rank in the process group.
        shape: shape of each matrix.
        matrices: numbers of the matrices.
    """

    owner: int
    shape: tuple[int, int]
    matrices: tuple[int, ...]


Bucket = tuple[Batch, ...]
"""The batches of one exchange, ordered by owner."""


def plan_buckets(
    specs: Sequence[MatrixSpec], num_ranks: int, max_bytes_per_rank: float
) -> list[Bucket]:
    """Return the buckets in the order of their exchange; every matrix is in exactly one.

    Args:
        max_bytes_per_rank: largest size of a bucket's matrices in bytes, divided by the number of
            ranks. A bucket may have one matrix per rank, whatever its size.
    """
    order = sorted(range(len(specs)), key=lambda i: (-specs[i].cost, specs[i], i))
    owners, num_bytes = _owners(specs, order, num_ranks), 0
    buckets: list[Bucket] = []
    pending: list[int] = []
    for i in order:
        grown = num_bytes + specs[i].num_bytes
        if len(pending) >= num_ranks and grown > max_bytes_per_rank * num_ranks:
            buckets.append(_batches(specs, pending, owners))
            pending, grown = [], specs[i].num_bytes
        pending.append(i)
        num_bytes = grown
    return [*buckets, _batches(specs, pending, owners)] if pending else buckets


def _owners(specs: Sequence[MatrixSpec], order: Sequence[int], num_ranks: int) -> dict[int, int]:
    """Assign each matrix to the rank with the least work so far; ties go to the lowest rank."""
    work, owners = [0] * num_ranks, {}
    for i in order:
        owners[i] = work.index(min(work))
        work[owners[i]] += specs[i].cost
    return owners


def _batches(specs: Sequence[MatrixSpec], pending: Sequence[int], owners: dict[int, int]) -> Bucket:
    together: dict[tuple[int, MatrixSpec], list[int]] = {}
    for i in pending:
        together.setdefault((owners[i], specs[i]), []).append(i)
    by_owner = sorted(together.items(), key=lambda item: item[0][0])
    return tuple(Batch(owner, spec.shape, tuple(matrices)) for (owner, spec), matrices in by_owner)
