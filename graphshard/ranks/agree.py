"""Compare values across ranks, for operations that run once, such as sharding or loading.

A single all-reduce compares hashes; texts are sent only if they differ or a rank has an error.
``group`` is the name of the group of all participating ranks. Operations that may be repeated are
logged in the call log instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from .._torch.distributed import device_for, has_fake_ranks, process_group
from ..errors import BackendError

T = TypeVar("T")


def raise_if_different(
    descriptions: Mapping[str, str],
    group: str,
    advise: Callable[[str, str, str], str],
    *,
    error: str | None = None,
) -> None:
    """Raise on all ranks if any has an error, or if their descriptions differ.

    Args:
        descriptions: texts that must be equal on all ranks, keyed by name.
        advise: function that returns advice for the user, given the name of a description and its
            texts on two ranks.
        error: this rank's error, or None.

    Raises:
        BackendError: on all ranks, with the error of the first rank that has one, or else with the
            difference between rank 0 and the first rank that differs from it.
    """
    text = "\n".join(f"{name} {value}" for name, value in sorted(descriptions.items()))
    number = int(digest(text)[:14], 16)  # fits into an int64
    most, least, any_error = max_over_ranks([number, -number, error is not None], group)
    if most == -least and not any_error:
        return
    rank = dist.get_rank(process_group(group))
    first = broadcast_from_rank(descriptions, 0, group)
    difference = _difference(first, descriptions, rank, advise)
    error = None if error is None else f"rank {rank} of the mesh: {error}"
    # Errors first: a rank with an error describes less, and therefore also differs from the others.
    raise BackendError(first_text(error, group) or first_text(difference, group) or "ranks differ")


def _difference(
    first: Mapping[str, str],
    other: Mapping[str, str],
    rank: int,
    advise: Callable[[str, str, str], str],
) -> str | None:
    for name in [*first, *other]:
        ours, theirs = first.get(name, "missing"), other.get(name, "missing")
        if ours != theirs:
            return (
                f"{name!r} differs between ranks: {ours} on rank 0 of the mesh, {theirs} on rank "
                f"{rank}. {advise(name, ours, theirs)}"
            )
    return None


@contextmanager
def raise_on_all_ranks(group: str) -> Iterator[None]:
    """Raise on all ranks if the body raises on one.

    Raises:
        Exception: the body's error, on a rank where it raised.
        BackendError: the body raised on another rank; quotes the first such rank's error.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    rank = dist.get_rank(process_group(group))
    text = None if error is None else f"rank {rank} of the mesh: {type(error).__name__}: {error}"
    first = first_text(text, group)
    if error is not None:
        raise error
    if first is not None:
        raise BackendError(first)


def first_text(text: str | None, group: str) -> str | None:
    """Return, on all ranks, the text of the first rank that has one, or None if none has."""
    # One reduction, and one broadcast if there is a text.
    members = process_group(group)
    rank, num_ranks = members.rank(), members.size()
    first = -max_over_ranks([-num_ranks if text is None else -rank], group)[0]
    return None if first == num_ranks else broadcast_from_rank(text, first, group)


def digest(text: str) -> str:
    """Return the SHA-256 hash of ``text`` in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def max_over_ranks(values: Sequence[int], group: str) -> list[int]:
    """Return the elementwise maximum over all ranks."""
    members = process_group(group)
    if has_fake_ranks(members):
        return list(values)  # without a tensor, which has no values in a FakeTensorMode
    # Use the group's device, because the mesh's may not exist.
    largest = torch.tensor(values, dtype=torch.int64, device=device_for(members))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=members)
    return largest.tolist()


def broadcast_from_rank(value: T, rank: int, group: str) -> T:
    """Return the value of one rank of the group, on all ranks."""
    box, members = [value], process_group(group)
    if not has_fake_ranks(members):  # fake ranks send nothing
        dist.broadcast_object_list(box, group=members, group_src=rank)
    return box[0]
