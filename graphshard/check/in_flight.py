"""Keeps track of launched collectives and host copies until somebody waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .actions import WaitEvent
from .runs import GraphRun


@dataclass(frozen=True)
class Launched:
    """A collective in flight.

    Attributes:
        run: the call of a graph that has launched it.
        number: of the launch in ``run``.
        event: recorded behind it.
        kept: tensors that it keeps until somebody waits.
    """

    run: GraphRun
    number: int
    event: int
    kept: list[torch.Tensor]

    def wait(self, stream: str) -> WaitEvent | None:
        """Return what has ``stream`` wait, and keep nothing any more."""
        self.kept.clear()
        return WaitEvent(self.event, stream)


@dataclass(frozen=True)
class Registered:
    """A ``Work`` of this project's own; attributes as of `Launched`."""

    run: GraphRun
    number: int
    work: dist.Work

    def wait(self, stream: str) -> WaitEvent | None:
        """Wait as the work does, which tells of it by itself."""
        self.work.wait()
        return None
