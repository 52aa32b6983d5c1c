"""What gradients of microbatches add up in, found by number from inside of a graph."""

from __future__ import annotations

import itertools
import weakref

import torch

from .._torch.autograd import at_end_of_backward

UNSYNCED, PARTIAL = ACCUMULATOR_NAMES = ("unsynced", "partial")
"""Arguments of markers."""


_accumulators: weakref.WeakValueDictionary[int, Accumulator] = weakref.WeakValueDictionary()


_numbers = itertools.count()


def take(key: torch.Tensor) -> torch.Tensor | None:
    """What has added up under ``key``, for a gradient that is about to be reduced."""
    found = _accumulators.get(int(key))
    return None if found is None else found.take()


class Accumulator:
    """Of the gradients of one stand-in.

    Attributes:
        key: by which a graph finds it, whoever copies what is saved for backward.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        number = next(_numbers)
        self.key = torch.tensor(number)
        _accumulators[number] = self
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


_unsettled: list[Accumulator] = []


def _settle() -> None:
    """What was taken and did not get to its parameter is there again."""
    for of in _unsettled:
        of.put_back()
    _unsettled.clear()
