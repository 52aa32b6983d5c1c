"""Collectives and host copies that were launched and not yet waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .actions import WaitEvent
from .runs import GraphCall


@dataclass(frozen=True)
class Launched:
    """A collective in flight.

    Attributes:
        run: graph call that launched it.
        number: index of the launch in ``run``.
        event: event recorded after the launch.
        kept: tensors kept alive until the first wait.
    """

    run: GraphCall
    number: int
    event: int
    kept: list[torch.Tensor]

    def wait(self, stream: str) -> WaitEvent | None:
        """Release the kept tensors and return the action that makes ``stream`` wait."""
        self.kept.clear()
        return WaitEvent(self.event, stream)


@dataclass(frozen=True)
class Registered:
    """A ``Work`` of graphshard's operators; ``run`` and ``number`` as in `Launched`."""

    run: GraphCall
    number: int
    work: dist.Work

    def wait(self, stream: str) -> WaitEvent | None:
        """Call the work's own wait, which records its actions itself."""
        self.work.wait()
        return None
