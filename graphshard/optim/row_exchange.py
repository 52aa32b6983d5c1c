"""Assign matrices to ranks, send their rows there, and send the results back.

    matrices, largest first        A A A A B B B c c c c
    owner (least work so far)      0 1 2 3 0 1 2 3 3 0 1
    buckets (bytes)               |A A A A|B B B c c c c|

    a bucket, ordered by owner     rows of each rank ──► all_to_all ──► whole matrices of the owner
                                   rows of each rank ◄── all_to_all ◄── its results

Equal shapes are adjacent, so a bucket gives each rank about the same work. With replicas (HSDP), an
owner takes rows from its own replica and sends results to all ranks: the work is spread over all
ranks, and replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._torch.distributed import process_group
from ..ops.groups import rows_of_rank
from ..params.mesh import MeshGroups

# Dtype in which Muon orthogonalizes, so sending rows in it loses no precision.
WIRE_DTYPE = torch.bfloat16
Shape = tuple[int, int]


class Owned(NamedTuple):
    """A matrix, and its owner: the rank that orthogonalizes it."""

    rank: int  # owner's rank in the group
    matrix: int  # position in the list of all matrices
    shape: Shape


# The matrices of one exchange, ordered by owner.
MatrixBatch = tuple[Owned, ...]


def assign_matrices(
    shapes: Sequence[Shape], num_ranks: int, max_bytes_per_rank: float
) -> list[MatrixBatch]:
    """Assign each matrix to an owner and a bucket; return the buckets in the order of exchange.

    Args:
        max_bytes_per_rank: limit of a bucket's total size in ``WIRE_DTYPE``, divided by
            ``num_ranks``. A bucket of at most ``num_ranks`` matrices may exceed it.
    """
    buckets: list[MatrixBatch] = []
    pending: list[Owned] = []
    work, num_bytes = [0] * num_ranks, 0
    for i in sorted(range(len(shapes)), key=lambda i: (-cost(shapes[i]), shapes[i], i)):
        shape, owner = shapes[i], work.index(min(work))
        work[owner] += cost(shape)
        num_bytes += shape[0] * shape[1] * WIRE_DTYPE.itemsize
        if len(pending) >= num_ranks and num_bytes > max_bytes_per_rank * num_ranks:
            buckets.append(tuple(sorted(pending)))
            pending, num_bytes = [], shape[0] * shape[1] * WIRE_DTYPE.itemsize
        pending.append(Owned(owner, i, shape))
    return [*buckets, tuple(sorted(pending))] if pending else buckets


def cost(shape: Shape) -> int:
    """Return a number roughly proportional to the flops of a Newton-Schulz step."""
    rows, columns = shape
    return rows * columns * min(rows, columns)


class InFlight(NamedTuple):
    """An all-to-all that has been launched."""

    work: dist.Work
    received: torch.Tensor
    shapes: list[torch.Size]  # shapes of the received rows, in buffer order
    sent: torch.Tensor  # kept alive, because it is read until the wait

    def wait(self) -> list[torch.Tensor]:
        self.work.wait()
        parts = self.received.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]


class RowExchange:
    """Exchange of rows among all ranks of a mesh, used in every step of an optimizer."""

    def __init__(self, groups: MeshGroups) -> None:
        self._group = process_group(groups.all_ranks)
        self._device, self._num_shards = groups.device, groups.num_shards
        self.rank = dist.get_rank(self._group)
        table = groups.mesh.mesh.reshape(-1, self._num_shards)
        places = {
            rank: divmod(i, self._num_shards) for i, rank in enumerate(table.flatten().tolist())
        }
        ranks = dist.get_process_group_ranks(self._group)
        # Indexed by rank in the group, which may order ranks differently from the mesh.
        replicas, self._shards = zip(*(places[rank] for rank in ranks))
        self.num_ranks = len(ranks)
        self._replica_ranks = [
            rank for rank in range(len(ranks)) if replicas[rank] == replicas[self.rank]
        ]

    def to_owners(self, bucket: MatrixBatch, rows_of: Callable[[int], torch.Tensor]) -> InFlight:
        """Send this rank's rows of each matrix to its owner if the owner is in the same replica."""
        # Call ``rows_of`` exactly once per matrix, because Muon's updates the momentum.
        rows = [(owned.rank, rows_of(owned.matrix)) for owned in bucket]
        sends = [(owner, own) for owner, own in rows if owner in self._replica_ranks]
        receives = [
            (rank, self._shape(owned, rank))
            for rank in self._replica_ranks
            for owned in self.owned(bucket)
        ]
        return self._launch(sends, receives)

    def whole(self, bucket: MatrixBatch, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Assemble the matrices that this rank owns from rows received by :meth:`to_owners`."""
        owned = self.owned(bucket)
        matrices = [self._empty(*one.shape) for one in owned]
        rows = iter(received)
        for rank in self._replica_ranks:
            for one, matrix in zip(owned, matrices):
                matrix[self._rows(one, rank)] = next(rows)
        return matrices

    def to_all(self, bucket: MatrixBatch, results: Sequence[torch.Tensor]) -> InFlight:
        """Send each rank its rows of ``results``, which are ordered like ``owned(bucket)``."""
        sends = [
            (rank, result[self._rows(owned, rank)])
            for rank in range(self.num_ranks)
            for owned, result in zip(self.owned(bucket), results)
        ]
        return self._launch(sends, [(one.rank, self._shape(one, self.rank)) for one in bucket])

    def owned(self, bucket: MatrixBatch) -> list[Owned]:
        return [owned for owned in bucket if owned.rank == self.rank]

    def _rows(self, owned: Owned, rank: int) -> slice:
        return rows_of_rank(owned.shape[0], self._num_shards, self._shards[rank])

    def _shape(self, owned: Owned, rank: int) -> torch.Size:
        rows = self._rows(owned, rank)
        return torch.Size((rows.stop - rows.start, owned.shape[1]))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=WIRE_DTYPE, device=self._device)

    def _launch(
        self, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Size]]
    ) -> InFlight:
        """Launch an all-to-all; ``sends`` and ``receives`` are ordered by rank."""
        send_sizes, receive_sizes = [0] * self.num_ranks, [0] * self.num_ranks
        for rank, rows in sends:
            send_sizes[rank] += rows.numel()
        for rank, shape in receives:
            receive_sizes[rank] += shape.numel()
        flat = [rows.to(self._device, WIRE_DTYPE).flatten() for _, rows in sends]
        sent = torch.cat([self._empty(0), *flat])
        received = self._empty(sum(receive_sizes))
        work = dist.all_to_all_single(
            received, sent, receive_sizes, send_sizes, group=self._group, async_op=True
        )
        assert work is not None
        return InFlight(work, received, [shape for _, shape in receives], sent)
