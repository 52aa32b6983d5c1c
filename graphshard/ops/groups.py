"""Process groups, given by name: ranks, backend, and the rows that each rank owns."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._torch.distributed import process_group
from .nodes import Value, value_of


class GroupSpan(NamedTuple):
    """The size of a process group and the spacing of its global ranks."""

    world: int  # number of ranks
    stride: int  # largest distance between global ranks of neighbors, at least 1


def span_of(group: str) -> GroupSpan:
    """Return the number of ranks in a process group, and the stride of their global ranks."""
    ranks = dist.get_process_group_ranks(process_group(group))
    stride = max((after - before for before, after in pairwise(ranks)), default=1)
    return GroupSpan(len(ranks), max(1, stride))


def uses_all_to_all(group: str, dtype: torch.dtype) -> bool:
    """Return whether a group always reduces gradients of ``dtype`` by an all-to-all, as on gloo."""
    # gloo's reduce-scatter is an all-reduce of a copy, which sends twice as many bytes
    # (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). On two ranks, 40 MB took 52 ms, or 20 ms
    # with an all-to-all. gloo has no all-to-all for complex numbers.
    return not dtype.is_complex and keeps_send_copies(group)


def keeps_send_copies(group: str) -> bool:
    """Return whether the backend copies sent data and keeps the copy until the wait, like gloo."""
    return set(_backends(group).values()) == {"gloo"}


def averages(group: str, value: Value) -> bool:
    """Return whether the backend can average in an all-reduce of ``value``; gloo only sums."""
    # A fake group simulates NCCL.
    return _backends(group).get(value_of(value).device.type) in ("nccl", "fake")


def _backends(group: str) -> dict[str, str]:
    pairs = dist.get_backend_config(process_group(group)).split(",")
    return dict(pair.split(":") for pair in pairs)


def padded_rows(rows: int, world: int) -> int:
    """Return the number of rows of every rank's shard, including padding.

    See [Note: padded shards] in ``graphshard.ops.markers``.
    """
    return -(-rows // world)


def rows_of_rank(rows: int, world: int, rank: int) -> slice:
    """Return the rows that ``rank`` owns, without padding."""
    size = padded_rows(rows, world)
    start = min(size * rank, rows)
    return slice(start, min(start + size, rows))
