"""What a parameter's gradients add up in over microbatches that are not reduced, or not all the way.

A marker takes a stand-in: a tensor that requires a gradient and is as large as the parameter
(``unsynced``), or as its shard (``partial``), but has no memory of its own. Autograd adds up its
``.grad``. The step that reduces takes a number instead, by which its backward finds that sum:

    microbatch   unshard(shard, unsynced=stand-in)      stand-in.grad += gradient
    last one     unshard(shard, unsynced=key)           shard.grad = reduce(add_sum(gradient, key))

The sum is added once, by whichever backward comes first, and comes back if what it was added to never
reaches the parameter (``torch.autograd.grad`` of an input runs all of a compiled backward).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ._torch import at_end_of_backward

UNSYNCED, PARTIAL = NAMES = ("unsynced", "partial")
"""Arguments of markers."""
SYNCS, ALL_REDUCES = "_graphshard_syncs", "_graphshard_all_reduces"
"""Flags of modules: whether gradients of their parameters are reduced, and over replicas, too."""


def flag_of(module: nn.Module, name: str) -> bool:
    return module.__dict__.get(name, True)


def set_flag(module: nn.Module, name: str, flag: bool) -> None:
    module.__dict__[name] = flag


_sums: weakref.WeakValueDictionary[int, _Sum] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def take(key: torch.Tensor) -> torch.Tensor | None:
    """What has added up under ``key``, for a gradient that is about to be reduced."""
    found = _sums.get(int(key))
    return None if found is None else found.take()


class _Sum:
    """Of the gradients of one stand-in.

    Attributes:
        key: by which a graph finds it, whoever copies what is saved for backward.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        number = next(_numbers)
        self.key = torch.tensor(number)
        _sums[number] = self
        self._taken: list[torch.Tensor] = []

    @property
    def total(self) -> torch.Tensor | None:
        return self.stand_in.grad

    def add(self, grad: torch.Tensor) -> None:
        """A gradient that no graph hands to autograd."""
        grad = grad.detach().to(self.stand_in)
        self.stand_in.grad = grad if self.total is None else self.total + grad

    def take(self) -> torch.Tensor | None:
        total = self.total
        if total is not None:
            self._taken.append(total)
            self.stand_in.grad = None
            _unsettled.append(self)
            at_end_of_backward(_settle)
        return total

    def delivered(self) -> None:
        self._taken.clear()

    def put_back(self) -> None:
        for total in self._taken:
            self.add(total)
        self._taken.clear()


_unsettled: list[_Sum] = []


def _settle() -> None:
    """What was taken and did not get to its parameter is there again."""
    for of in _unsettled:
        of.put_back()
    _unsettled.clear()


class Sums:
    """Of one parameter.

    Attributes:
        syncs: gradients are reduced; ``all_reduces``: over the replicas of shards, too.

    Args:
        arrived: called when autograd has brought a gradient.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self.syncs = self.all_reduces = True
        self._arrived = arrived
        self._of: dict[str, _Sum] = {}

    def of(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Sum:
        known = self._of.get(name)
        if known is None or (known.stand_in.dtype, known.stand_in.device) != (dtype, device):
            self._of[name] = _Sum(shape, dtype, device)
            self._of[name].stand_in.register_post_accumulate_grad_hook(
                functools.partial(self._on_gradient, name)
            )
            if known is not None and known.total is not None:
                self._of[name].add(known.total)
        return self._of[name]

    def _on_gradient(self, name: str, _: torch.Tensor) -> None:
        if name == PARTIAL and UNSYNCED in self._of:
            # What was reduced to the one may have had the other added.
            self._of[UNSYNCED].delivered()
        self._arrived()

    def key(self, name: str) -> torch.Tensor | None:
        """Of what has added up and was not reduced, if anything has."""
        found = self._of.get(name)
        return None if found is None or found.total is None else found.key

    def totals(self) -> list[torch.Tensor]:
        """All that is pending."""
        return [of.total for of in self._of.values() if of.total is not None]

    def delivered(self) -> None:
        """What was taken has come to the parameter."""
        for of in self._of.values():
            of.delivered()
