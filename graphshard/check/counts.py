"""Count the kernels, copies, collectives and waits of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .actions import HOST, Action, WaitEvent, Work
from .runs import GraphCall

_BUCKET_COPIES = ("aten._foreach_copy_", "aten._chunk_cat", "aten.split_with_sizes_copy")


@dataclass(frozen=True)
class Counts:
    """Kernels, copies and waits of a step; waits over the whole step, the rest within its graphs.

    Attributes:
        kernels: number of kernels, including ``bucket_copies``.
        bucket_copies: number of kernels that copy into and out of packed buffers.
        collectives: number of launches.
        host_copies: number of tensors copied between host and device.
        host_waits: number of times that the host waits for the device, to read gradients or in
            one of ``blocking``.
        blocking: names of the copies and synchronisations that block the host.
    """

    kernels: int
    bucket_copies: int
    collectives: int
    host_copies: int
    host_waits: int
    blocking: tuple[str, ...]


def count(actions: Sequence[Action], runs: Iterable[GraphCall]) -> Counts:
    """Count the actions of a step.

    Args:
        actions: all actions of the step; each run holds its positions in this list.
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
