"""Accumulators of the gradients of microbatches, found by number from inside of a graph."""

from __future__ import annotations

import functools
import itertools
import weakref

import torch

from .._torch.autograd import after_backward, current_backward

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
        self._taken: dict[int, list[torch.Tensor]] = {}  # by number of the backward that has them

    @property
    def total(self) -> torch.Tensor | None:
        return self.stand_in.grad

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient that no graph hands to autograd."""
        grad = grad.detach().to(self.stand_in)
        self.stand_in.grad = grad if self.total is None else self.total + grad

    def take(self) -> torch.Tensor | None:
        """Take the total away; it comes back at the end of this backward unless it is delivered.

        Also where the backward fails.
        """
        total = self.total
        if total is not None:
            self.stand_in.grad = None
            backward = current_backward()
            self._taken.setdefault(backward, []).append(total)
            after_backward(functools.partial(self._put_back, backward))
        return total

    def delivered(self) -> None:
        """Forget what this backward has taken: it has come to its parameter."""
        self._taken.pop(current_backward(), None)

    def _put_back(self, backward: int) -> None:
        """Add what that backward has taken again."""
        for total in self._taken.pop(backward, []):
            self.add(total)
