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
from collections.abc import Callable

import torch
from torch import nn

from ..ops.accumulators import PARTIAL, UNSYNCED, Accumulator

SYNCS, ALL_REDUCES = "_graphshard_syncs", "_graphshard_all_reduces"
"""Flags of modules: whether gradients of their parameters are reduced, and over replicas, too."""


def flag_of(module: nn.Module, name: str) -> bool:
    return module.__dict__.get(name, True)


def set_flag(module: nn.Module, name: str, flag: bool) -> None:
    module.__dict__[name] = flag


class GradAccumulation:
    """Of one parameter.

    Attributes:
        syncs: gradients are reduced; ``all_reduces``: over the replicas of shards, too.

    Args:
        arrived: called when autograd has brought a gradient.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self.syncs = self.all_reduces = True
        self._arrived = arrived
        self._of: dict[str, Accumulator] = {}

    def of(
        self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Accumulator:
        known = self._of.get(name)
        if known is None or (known.stand_in.dtype, known.stand_in.device) != (dtype, device):
            self._of[name] = Accumulator(shape, dtype, device)
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
