"""Send the rows of matrices to the ranks that orthogonalise them, and the results back.

Each direction is one all-to-all per bucket, launched here and waited for by the reader:

    rows of each rank ──► [owner, batch, matrix, rows] ─► all_to_all ─► whole matrices of owner
    rows of each rank ◄── all_to_all ◄─ [rank, batch, matrix, rows] ◄── results at their owner

With replicas (HSDP), an owner takes rows from the ranks of its own replica and sends results to all
ranks: the work is spread over all ranks, and replicas stay bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._torch.distributed import process_group
from ..ops.groups import rows_of_rank
from ..params.mesh import MeshGroups
from .newton_schulz import WIRE_DTYPE
from .spread import Batch, Bucket


class InFlight(NamedTuple):
    """An all-to-all that has been launched.

    Attributes:
        work: handle to wait for.
        received: receive buffer, with the elements from each rank in rank order.
        sent: send buffer, which is read until the wait.
    """

    work: dist.Work
    received: torch.Tensor
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Wait, and return what was received."""
        self.work.wait()
        return self.received


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
        self._replicas, self._shards = zip(*(places[rank] for rank in ranks))
        self.num_ranks = len(ranks)

    def to_owners(self, bucket: Bucket, rows_of: Callable[[int], torch.Tensor]) -> InFlight:
        """Send this rank's rows of each matrix to the matrix's owner.

        Args:
            rows_of: function that returns this rank's rows of a matrix, given its number; called
                once per matrix, in the order of ``bucket``.
        """
        own = self._shards[self.rank]
        sizes_out, sizes_in = [0] * self.num_ranks, [0] * self.num_ranks
        for batch in bucket:
            if self._is_near(batch.owner):
                sizes_out[batch.owner] += self._num_elements(batch, own)
        for rank in range(self.num_ranks):
            if self._is_near(rank):
                sizes_in[rank] = sum(
                    self._num_elements(b, self._shards[rank]) for b in self._own(bucket)
                )
        sent, start = self._empty(sum(sizes_out)), 0
        for batch in bucket:
            for matrix in batch.matrices:
                rows = rows_of(matrix)
                if self._is_near(batch.owner):
                    sent[start : start + rows.numel()].view(rows.shape).copy_(rows)
                    start += rows.numel()
        return self._launch(sent, sizes_out, sizes_in)

    def whole(self, bucket: Bucket, received: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole matrices of this rank's batches, each ``[matrices, rows, columns]``."""
        batches = self._own(bucket)
        whole = [self._empty(len(b.matrices), *b.shape) for b in batches]
        start = 0
        for rank in filter(self._is_near, range(self.num_ranks)):
            for batch, full in zip(batches, whole):
                part = full[:, self._rows(batch, self._shards[rank])]
                part.copy_(received[start : start + part.numel()].view(part.shape))
                start += part.numel()
        return whole

    def to_all(self, bucket: Bucket, results: Sequence[torch.Tensor]) -> InFlight:
        """Send each rank its rows of the results.

        Args:
            results: one tensor per batch of this rank, shaped as returned by :meth:`whole`.
        """
        batches, own = self._own(bucket), self._shards[self.rank]
        sizes_out = [sum(self._num_elements(b, shard) for b in batches) for shard in self._shards]
        sizes_in = [0] * self.num_ranks
        for batch in bucket:
            sizes_in[batch.owner] += self._num_elements(batch, own)
        sent, start = self._empty(sum(sizes_out)), 0
        for shard in self._shards:
            for batch, result in zip(batches, results):
                part = result[:, self._rows(batch, shard)]
                sent[start : start + part.numel()].view(part.shape).copy_(part)
                start += part.numel()
        return self._launch(sent, sizes_out, sizes_in)

    def own_rows(
        self, bucket: Bucket, received: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of each matrix in the bucket, with this rank's rows of its result."""
        start, shard = 0, self._shards[self.rank]
        for batch in bucket:
            rows = self._rows(batch, shard)
            shape = (len(batch.matrices), rows.stop - rows.start, batch.shape[1])
            size = math.prod(shape)
            yield from zip(batch.matrices, received[start : start + size].view(shape))
            start += size

    def _is_near(self, rank: int) -> bool:
        """Return whether ``rank`` belongs to this rank's replica."""
        return bool(self._replicas[rank] == self._replicas[self.rank])

    def _own(self, bucket: Bucket) -> list[Batch]:
        return [batch for batch in bucket if batch.owner == self.rank]

    def _rows(self, batch: Batch, shard: int) -> slice:
        return rows_of_rank(batch.shape[0], self._num_shards, shard)

    def _num_elements(self, batch: Batch, shard: int) -> int:
        rows = self._rows(batch, shard)
        return len(batch.matrices) * (rows.stop - rows.start) * batch.shape[1]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=WIRE_DTYPE, device=self._device)

    def _launch(self, sent: torch.Tensor, sizes_out: list[int], sizes_in: list[int]) -> InFlight:
        received = self._empty(sum(sizes_in))
        work = dist.all_to_all_single(
            received, sent, sizes_in, sizes_out, group=self._group, async_op=True
        )
        assert work is not None
        return InFlight(work, received, sent)
