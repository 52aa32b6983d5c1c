"""What a sharded model needs on a rank, beside what it would need unsharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor import DTensor

from .sharded_param import sharded_param_of


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
        on_host: what of parameters, gradients and optimizer the host keeps (``offload_policy``).
    """

    parameters: Held
    buffers: Held
    gradients: Held
    sums: Held
    optimizer: Held
    gathered: Held
    on_host: Held

    @property
    def total(self) -> Held:
        """With all gathered parameters that are ever there at once; activations are not in it."""
        parts = [held for name, held in vars(self).items() if name != "on_host"]
        return Held(*map(sum, zip(*parts)))

    def __str__(self) -> str:
        of = {**vars(self), "total": self.total, "of it on the host": self.on_host}
        del of["on_host"]
        rows = [[name, held.rank / 1e6, held.unsharded / 1e6] for name, held in of.items()]
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
    links = [link for link in map(sharded_param_of, params) if link is not None]
    on_host = [
        param
        for param in params
        if sharded_param_of(param) in links and sharded_param_of(param).layout.host
    ]
    sums = [total for link in links for total in link.sums.totals()]
    of_model, of_host = (_of(given, optimizer) for given in (params, on_host))
    return MemoryReport(
        of_model[0],
        _held(model.buffers()),
        of_model[1],
        Held(sum(total.nbytes for total in sums), 0),
        of_model[2],
        Held(max((link.model.gathered_bytes for link in links), default=0), 0),
        Held(sum(held.rank for held in of_host), 0),
    )


def _of(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> tuple[Held, Held, Held]:
    """Parameters, gradients and the optimizer's state."""
    states = [optimizer.state.get(param, {}) for param in params] if optimizer is not None else []
    return (
        _held(params),
        _held(param for param in params if param.requires_grad),
        _held(value for state in states for value in state.values()),
    )


def _held(tensors: Iterable[Any]) -> Held:
    found = {id(of): of for of in tensors if isinstance(of, torch.Tensor)}.values()
    return Held(sum(map(_rank_bytes, found)), sum(of.numel() * of.element_size() for of in found))


def _rank_bytes(tensor: torch.Tensor) -> int:
    link = sharded_param_of(tensor)
    if link is not None:
        return int(link.leaf.nbytes)
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes)
