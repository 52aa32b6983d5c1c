"""Accumulators of the gradients of microbatches, found by number from inside of a graph."""

from __future__ import annotations

import itertools
import weakref

import torch

from .._torch.autograd import at_end_of_backward

UNSYNCED, PARTIAL = ACCUMULATOR_NAMES = ("unsynced", "partial")
"""Arguments of markers that take an accumulator's stand-in, or its key."""


_accumulators: weakref.WeakValueDictionary[int, Accumulator] = weakref.WeakValueDictionary()


_numbers = itertools.count()


def take(key: torch.Tensor) -> torch.Tensor | None:
    """Take the total of the accumulator with that key, to add it to a gradient.

    None: nothing has added up, or the accumulator is there no more.
    """
    accumulator = _accumulators.get(int(key))
    return None if accumulator is None else accumulator.take()


class Accumulator:
    """The total of gradients that are not reduced yet, or not all the way.

    Attributes:
        stand_in: a tensor without memory of its own, whose ``.grad`` autograd adds gradients up in.
        key: its number as a tensor. A graph finds the accumulator by it, also where hooks have
            copied the tensors that are saved for backward.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        number = next(_numbers)
        self.key = torch.tensor(number, device="cpu")  # whatever the default device is
        _accumulators[number] = self
        self._taken: list[torch.Tensor] = []

    @property
    def total(self) -> torch.Tensor | None:
        return self.stand_in.grad

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient that no graph hands to autograd."""
        grad = grad.detach().to(self.stand_in)
        self.stand_in.grad = grad if self.total is None else self.total + grad

    def take(self) -> torch.Tensor | None:
        """Take the total away; it comes back at the end of this backward unless it is delivered."""
        total = self.total
        if total is not None:
            self._taken.append(total)
            self.stand_in.grad = None
            _undelivered.append(self)
            at_end_of_backward(_put_back_undelivered)
        return total

    def delivered(self) -> None:
        """Forget what was taken: it has come to its parameter."""
        self._taken.clear()

    def put_back(self) -> None:
        """Add what was taken again."""
        for total in self._taken:
            self.add(total)
        self._taken.clear()


_undelivered: list[Accumulator] = []


def _put_back_undelivered() -> None:
    for accumulator in _undelivered:
        accumulator.put_back()
    _undelivered.clear()
