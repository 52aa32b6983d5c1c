"""Which rows of a tensor a rank owns.

Rows are split as ``torch.chunk`` splits them: ``ceil(rows / world)`` to each rank, fewer or none to
the last ones. See [Note: padded shards] in ``graphshard.ops.markers``.
"""

from __future__ import annotations


def padded_rows(rows: int, world: int) -> int:
    """How many rows every rank's shard has, padding included."""
    return -(-rows // world)


def rows_of_rank(rows: int, world: int, rank: int) -> slice:
    """The rows that ``rank`` owns, without padding."""
    size = padded_rows(rows, world)
    start = min(size * rank, rows)
    return slice(start, min(start + size, rows))
