"""Agreement of all ranks on what to shard, before anything is changed.

One reduction compares the ranks; if they differ, all raise. Agreement on plans and calls, from the
first compile on, is in ``graphshard.ranks``. Around graph breaks, ranks also agree on which
parameters have gradients: ``eager._used_on_any_rank`` and
``ShardedModel._pending_on_any_rank``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .._torch.distributed import device_for, has_fake_ranks, process_group
from ..errors import BackendError
from ..options.options import Options
from .mesh import MeshGroups
from .param_spec import PlainParam

T = TypeVar("T")

ARGUMENTS, REQUIRES_GRAD, WITH_GRADIENT = (
    "arguments of graphshard",
    " requires_grad",
    " with a gradient",
)
"""Parts of descriptions from which ``_cause`` guesses why ranks differ."""


def check_same_shards(
    root: nn.Module,
    plain_params: Sequence[PlainParam],
    groups: MeshGroups,
    options: Options,
    *,
    fault: str | None,
) -> None:
    """Raise on all ranks if one has a fault, or if they are about to shard different things.

    Costs one reduction unless ranks differ: see :func:`raise_if_different`.

    Args:
        fault: reason why this rank cannot shard ``root``; None if it can.

    Raises:
        BackendError: on all ranks, if one has a fault or is about to shard something else.
    """
    descriptions = {ARGUMENTS: options.fingerprint()}
    if fault is None:
        descriptions |= {
            p.fqn: _describe(p.param) + (p.spec.float8_recipe or "") for p in plain_params
        }
        descriptions |= {name: _describe(buffer) for name, buffer in root.named_buffers()}
    raise_if_different(descriptions, groups, fault=fault)


def raise_if_different(
    descriptions: Mapping[str, str],
    groups: MeshGroups,
    *,
    fault: str | None = None,
    advice: str | None = None,
) -> None:
    """Raise on all ranks if one has a fault, or if their descriptions differ.

    One reduction compares a hash. Only if it differs are texts sent: each rank compares itself with
    the first rank of the mesh, and all ranks raise the text of the first rank that has a fault. If
    none has, they raise the text of the first rank that differs.

    Args:
        descriptions: texts that have to be equal on all ranks, by name.
        fault: reason why this rank cannot go on; None if it can.
        advice: what the user should do if texts differ; None derives it from the difference.

    Raises:
        BackendError: on all ranks, if one has a fault or another description.
    """
    if _all_agree(descriptions, fault, groups):
        return
    rank = dist.get_rank(process_group(groups.all_ranks))
    first = broadcast_from_rank(descriptions, 0, groups)
    difference = None if fault is not None else _difference(first, descriptions, rank, advice)
    if fault is not None:
        difference = f"rank {rank} of the mesh: {fault}"
    # Faults first: a rank with a fault describes less, so it also differs from all others.
    priority = 0 if fault is not None else 1
    raise BackendError(first_text(difference, groups, priority=priority) or "ranks differ")


@contextmanager
def raise_on_all_ranks(groups: MeshGroups) -> Iterator[None]:
    """Raise on all ranks if the body raises on one.

    Raises:
        Exception: the body's, on this rank.
        BackendError: the body raised on another rank; quotes the first such rank's error.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    rank = dist.get_rank(process_group(groups.all_ranks))
    text = None if error is None else f"rank {rank} of the mesh: {type(error).__name__}: {error}"
    first = first_text(text, groups)
    if error is not None:
        raise error
    if first is not None:
        raise BackendError(first)


def first_text(text: str | None, groups: MeshGroups, *, priority: int = 0) -> str | None:
    """Return, on all ranks, the text of the first rank that has one; None if no rank has.

    Costs one reduction, and one broadcast if there is a text.

    Args:
        priority: priority of this rank's text: all texts with 0 come before those with 1.
    """
    rank, num_ranks = dist.get_rank(process_group(groups.all_ranks)), groups.mesh.size()
    nobody = 2 * num_ranks
    own = nobody if text is None else priority * num_ranks + rank
    first = -_max_over_ranks([-own], groups)[0]
    return None if first == nobody else broadcast_from_rank(text, first % num_ranks, groups)


def _all_agree(descriptions: Mapping[str, str], fault: str | None, groups: MeshGroups) -> bool:
    """Return, on every rank, whether all have equal descriptions and none has a fault."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(descriptions.items()))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    most, least, faults = _max_over_ranks([digest, -digest, fault is not None], groups)
    return most == -least and not faults


def _max_over_ranks(values: Sequence[int], groups: MeshGroups) -> list[int]:
    """Return the elementwise maximum over all ranks."""
    group = process_group(groups.all_ranks)
    if has_fake_ranks(group):
        return list(values)  # uses no tensor: it has no values in a FakeTensorMode
    # Not on groups.device: the fault may be that the mesh's device does not exist.
    largest = torch.tensor(values, dtype=torch.int64, device=device_for(group))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    result: list[int] = largest.tolist()
    return result


def broadcast_from_rank(value: T, rank: int, groups: MeshGroups) -> T:
    """Return the value of one rank of the mesh, on all ranks."""
    group, box = process_group(groups.all_ranks), [value]
    source = dist.get_global_rank(group, rank)
    dist.broadcast_object_list(box, source, group=group)
    return box[0]


def _difference(
    first: Mapping[str, str], other: Mapping[str, str], rank: int, advice: str | None
) -> str | None:
    """Describe the first difference of ``rank`` from the mesh's first rank; None if equal."""
    for name in [*first, *other]:
        ours, theirs = first.get(name, "missing"), other.get(name, "missing")
        if ours != theirs:
            return (
                f"{name!r} differs between ranks: {ours} on rank 0 of the mesh, {theirs} on rank "
                f"{rank}. {advice or _cause(name, ours, theirs)}"
            )
    return None


def _cause(name: str, ours: str, theirs: str) -> str:
    """Return advice about the likely cause of a difference."""
    if name == ARGUMENTS:
        return "All ranks have to give the same ones: is one read from a file or a rank?"
    if ours.removesuffix(WITH_GRADIENT) == theirs.removesuffix(WITH_GRADIENT):
        return "All ranks have to call zero_grad() before, or none: has one made a step alone?"
    if ours.removesuffix(REQUIRES_GRAD) == theirs.removesuffix(REQUIRES_GRAD):
        return "All ranks have to freeze the same parameters: does one load or freeze by itself?"
    return "All ranks have to build the same model: is its code, or its config, chosen by rank?"


def _describe(tensor: torch.Tensor) -> str:
    """Return the properties of a parameter or buffer that have to be equal on all ranks."""
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.requires_grad:
        text += REQUIRES_GRAD
    return text + WITH_GRADIENT if tensor.grad is not None else text
