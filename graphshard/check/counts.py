"""Counts of what a step asks of a device: `count`, from the actions of its graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .actions import HOST, Action, WaitEvent, Work
from .runs import GraphRun

_BUCKET_COPIES = ("aten._foreach_copy_", "aten._chunk_cat", "aten.split_with_sizes_copy")


@dataclass(frozen=True)
class Counts:
    """Numbers of kernels, copies and waits of a step: waits of all of it, the rest of its graphs.

    Attributes:
        kernels: all kernels, those of ``bucket_copies`` among them.
        bucket_copies: kernels that copy into packed buffers and out of them.
        collectives: launches.
        host_copies: tensors that are copied between host and device.
        host_waits: how often the host waits for the device: where it reads gradients, and for
            what is in ``blocking``.
        blocking: names of copies and synchronisations that make it wait.
    """

    kernels: int
    bucket_copies: int
    collectives: int
    host_copies: int
    host_waits: int
    blocking: tuple[str, ...]


def count(actions: Sequence[Action], runs: Iterable[GraphRun]) -> Counts:
    """Count what a step asks for.

    Args:
        actions: of the step, in which those of ``runs`` lie.
    """
    own = [action for run in runs for action in actions[slice(*run.actions)]]
    work = [action for action in own if isinstance(action, Work)]
    return Counts(
        kernels=sum(action.kernels for action in work),
        bucket_copies=sum(w.kernels for w in work if w.name.startswith(_BUCKET_COPIES)),
        collectives=sum(w.name.startswith("_c10d_functional.") for w in work),
        host_copies=sum(w.name.startswith("aten.copy_") and not w.kernels for w in work),
        host_waits=sum(isinstance(a, WaitEvent) and a.stream == HOST for a in actions),
        blocking=tuple(a.name for a in actions if isinstance(a, Work) and a.blocks_host),
    )
