"""Accumulators for the gradients of microbatches; graphs look up an accumulator by number."""

from __future__ import annotations

import functools
import itertools
import weakref

import torch

from .._torch.autograd import current_backward, on_backward_end

# Names of the marker arguments that take an accumulator's stand-in or key.
UNSYNCED, PARTIAL = ACCUMULATOR_NAMES = ("unsynced", "partial")


_accumulators: weakref.WeakValueDictionary[int, Accumulator] = weakref.WeakValueDictionary()


_numbers = itertools.count()


def take(key: torch.Tensor) -> torch.Tensor | None:
    """Remove and return the total of the accumulator with this key.

    Return None if the accumulator no longer exists or has no total.
    """
    accumulator = _accumulators.get(int(key))
    return None if accumulator is None else accumulator.take()


class Accumulator:
    """A total of gradients that are not reduced yet, or are reduced only within a replica.

    Attributes:
        stand_in: zero, expanded to the gradient's shape; autograd accumulates in its ``.grad``.
        key: number of the accumulator, as a tensor.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        number = next(_numbers)
        # Graphs look up accumulators by number, because hooks may copy tensors saved for backward.
        self.key = torch.tensor(number, device="cpu")  # regardless of the default device
        _accumulators[number] = self
        self._taken: dict[int, list[torch.Tensor]] = {}  # keyed by the backward that took them

    @property
    def total(self) -> torch.Tensor | None:
        return self.stand_in.grad

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient to the total directly, without autograd."""
        grad, like = grad.detach(), self.stand_in
        if self.total is None:  # owns its memory, because autograd adds to it in place
            dense = torch.contiguous_format
            like.grad = grad.to(like.device, like.dtype, copy=True, memory_format=dense)
        else:
            like.grad = self.total + grad.to(like)

    def take(self) -> torch.Tensor | None:
        """Remove and return the total, or None if there is none.

        The total is restored when the backward in progress ends, successful or not, unless
        ``drop_taken`` is called.
        """
        total = self.total
        if total is not None:
            self.stand_in.grad = None
            backward = current_backward()
            self._taken.setdefault(backward, []).append(total)
            on_backward_end(functools.partial(self._put_back, backward))
        return total

    def drop_taken(self) -> None:
        """Drop the totals taken in this backward, so that they are not restored when it ends.

        Called once the parameter has received these totals.
        """
        self._taken.pop(current_backward(), None)

    def _put_back(self, backward: int) -> None:
        for total in self._taken.pop(backward, []):
            self.add(total)
