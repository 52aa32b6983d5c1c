"""What a sharded model needs on a rank, beside what it would need unsharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor import DTensor

from .link import link_of


class Held(NamedTuple):
    """Bytes on this rank, and those without sharding."""

    rank: int
    unsharded: int


@dataclass(frozen=True)
class MemoryReport:
    """As ``print`` shows it in a table, in MB of a million bytes.

    Attributes:
        parameters: padding included.
        gradients: of what requires one, once backward has run.
        sums: unreduced gradients of microbatches that are there now (``no_sync``).
        optimizer: its state as it is now.
        gathered: the most that any graph compiled so far holds gathered at once, by its plan.
    """

    parameters: Held
    buffers: Held
    gradients: Held
    sums: Held
    optimizer: Held
    gathered: Held

    @property
    def total(self) -> Held:
        """With all gathered parameters that are ever there at once; activations are not in it."""
        return Held(*map(sum, zip(*vars(self).values())))

    def __str__(self) -> str:
        rows = [
            [name, held.rank / 1e6, held.unsharded / 1e6]
            for name, held in [*vars(self).items(), ("total", self.total)]
        ]
        return tabulate(rows, ["MB", "per rank", "unsharded"], floatfmt=".3f")


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """What ``model`` and its optimizer hold on this rank; nothing is communicated.

    Args:
        model: sharded by graphshard or not yet, compiled or not.

    Raises:
        ValueError: ``model`` is no module, or ``optimizer`` no optimizer.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module that is trained")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
    params = list(model.parameters())
    links = [link for link in map(link_of, params) if link is not None]
    trained = [param for param in params if param.requires_grad]
    states = optimizer.state.values() if optimizer is not None else ()
    sums = [total for link in links for total in link.sums.totals()]
    return MemoryReport(
        _held(params),
        _held(model.buffers()),
        _held(trained),
        Held(sum(total.nbytes for total in sums), 0),
        _held(value for state in states for value in state.values()),
        Held(max((link.model.gathered_bytes for link in links), default=0), 0),
    )


def _held(tensors: Iterable[Any]) -> Held:
    found = {id(of): of for of in tensors if isinstance(of, torch.Tensor)}.values()
    return Held(sum(map(_rank_bytes, found)), sum(of.numel() * of.element_size() for of in found))


def _rank_bytes(tensor: torch.Tensor) -> int:
    link = link_of(tensor)
    if link is not None:
        return int(link.leaf.nbytes)
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes)
