"""What a parameter's gradients add up in over microbatches that are not reduced, or not all the way.

A marker takes a tensor that requires a gradient and is as large as the parameter (``unsynced``), or as
its shard (``partial``), but has no memory of its own: autograd adds up its ``.grad``. The step that
reduces takes that sum in its place, adds it once, and sets its memory free:

    microbatch   unshard(shard, unsynced=stand-in)      stand-in.grad += gradient
    last one     unshard(shard, unsynced=total)         shard.grad = reduce(gradient + total)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

UNSYNCED, PARTIAL = NAMES = ("unsynced", "partial")
"""Arguments of markers."""
SYNCS, ALL_REDUCES = "_graphshard_syncs", "_graphshard_all_reduces"
"""Flags of modules: whether gradients of their parameters are reduced, and over replicas, too."""


def flag_of(module: nn.Module, name: str) -> bool:
    return module.__dict__.get(name, True)


def set_flag(module: nn.Module, name: str, flag: bool) -> None:
    module.__dict__[name] = flag


class _Sum:
    """Of the gradients of one stand-in."""

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        arrived: Callable[[], None],
    ) -> None:
        self.stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        self.stand_in.register_post_accumulate_grad_hook(self._on_gradient)
        self._total: torch.Tensor | None = None
        self._arrived = arrived

    @property
    def total(self) -> torch.Tensor | None:
        """One tensor for all that read the parameter; None before there is any, and once it was added.
        It may grow without a trace in its version."""
        return self._total if self._total is not None and not self._was_added() else None

    def _was_added(self) -> bool:
        return self._total is not None and not self._total.untyped_storage().size()

    def _on_gradient(self, stand_in: torch.Tensor) -> None:
        if self._total is None and stand_in.grad is not None:
            # It may share the memory, which will be set free, with that of another parameter.
            self._hold(stand_in.grad.clone())
        self._arrived()

    def _hold(self, grad: torch.Tensor) -> None:
        self.stand_in.grad = grad
        self._total = grad.data

    def add(self, grad: torch.Tensor) -> None:
        """A gradient that no graph hands to autograd."""
        if self.stand_in.grad is None:
            self._hold(grad.detach().to(self.stand_in.dtype, copy=True))
        else:
            self.stand_in.grad.add_(grad.detach())

    def drop_added(self) -> bool:
        if not self._was_added():
            return False
        self.stand_in.grad = self._total = None
        return True


class Sums:
    """Of one parameter.

    Attributes:
        syncs: gradients are reduced; ``all_reduces``: over the replicas of shards, too.

    Args:
        changed: called when markers have to be given others.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.syncs = self.all_reduces = True
        self._changed = changed
        self._of: dict[str, _Sum] = {}

    @property
    def asked(self) -> str:
        """Where gradients go, one of ``NAMES``; "" where they are reduced."""
        if not self.syncs:
            return UNSYNCED
        return "" if self.all_reduces else PARTIAL

    def pending(self, name: str) -> torch.Tensor | None:
        """What has added up and was not reduced."""
        return self._of[name].total if name in self._of else None

    def totals(self) -> list[torch.Tensor]:
        """All that is pending."""
        found = (of.total for of in self._of.values())
        return [total for total in found if total is not None]

    def stand_in(
        self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._sum(name, shape, dtype, device).stand_in

    def add(self, name: str, grad: torch.Tensor, dtype: torch.dtype) -> None:
        """A gradient that no graph hands to autograd."""
        self._sum(name, grad.shape, dtype, grad.device).add(grad)
        self._changed()

    def _sum(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Sum:
        known = self._of.get(name)
        if known is None or (known.stand_in.dtype, known.stand_in.device) != (dtype, device):
            self._of[name] = _Sum(shape, dtype, device, self._arrived)
            if known is not None and known.total is not None:
                self._of[name].add(known.total.to(device))
        return self._of[name]

    def _arrived(self) -> None:
        """Another total may have been added to the gradient; or its backward came when gradients of
        further forwards are reduced again."""
        if not self.drop_added() and not self.asked:
            self._changed()

    def drop_added(self) -> bool:
        """Forget totals that were added to what was reduced; whether there were any."""
        dropped = [of.drop_added() for of in self._of.values()]
        if any(dropped):
            self._changed()
        return any(dropped)
