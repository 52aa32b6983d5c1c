"""The rows of a tensor that each rank owns.

Rows are split as ``torch.chunk`` splits them: ``ceil(rows / world)`` per rank, fewer or none on the
last ranks. See [Note: padded shards] in ``graphshard.ops.markers``.
"""

from __future__ import annotations


def padded_rows(rows: int, world: int) -> int:
    """Return the number of rows of every rank's shard, padding included."""
    return -(-rows // world)


def rows_of_rank(rows: int, world: int, rank: int) -> slice:
    """Return the rows that ``rank`` owns, without padding."""
    size = padded_rows(rows, world)
    start = min(size * rank, rows)
    return slice(start, min(start + size, rows))
