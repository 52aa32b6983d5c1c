"""Accumulate microbatch gradients that are not reduced, or not yet averaged over replicas.

A marker takes a stand-in: a tensor that requires a gradient and has the shape of the parameter
(``unsynced``) or of its shard (``partial``), but no memory of its own. Autograd accumulates into
its ``.grad``. The microbatch that reduces takes a key instead, by which its backward looks up the
total:

    microbatch   unshard(shard, unsynced=stand-in)      stand-in.grad += gradient
    last one     unshard(shard, unsynced=key)           shard.grad = reduce(gradient + total of key)

A total is added once, by the first backward that takes it. It is put back if it never reaches the
parameter (``torch.autograd.grad`` of an input runs all of a compiled backward).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from .._torch.dynamo import run_with_callees_as_python
from ..ops.accumulators import PARTIAL, UNSYNCED, Accumulator

SYNCS, ALL_REDUCES = "_graphshard_syncs", "_graphshard_all_reduces"
"""Flags of a module: whether to reduce its gradients; whether to average them over replicas."""


def module_flag(module: nn.Module, name: str) -> bool:
    """Return the flag ``SYNCS`` or ``ALL_REDUCES`` of ``module``, True by default."""
    flag: bool = module.__dict__.get(name, True)
    return flag


def set_module_flag(module: nn.Module, name: str, flag: bool) -> None:
    """Set the flag ``SYNCS`` or ``ALL_REDUCES`` of ``module``."""
    module.__dict__[name] = flag


class GradAccumulation:
    """The accumulators of one parameter, and whether its gradients go there.

    Attributes:
        syncs: whether gradients are reduced over shards.
        all_reduces: whether reduced shards are averaged over replicas.

    Args:
        on_accumulated: callback for when autograd has added a gradient to an accumulator.
    """

    def __init__(self, on_accumulated: Callable[[], None]) -> None:
        self.syncs = self.all_reduces = True
        self._on_accumulated = on_accumulated
        self._accumulators: dict[str, Accumulator] = {}

    def accumulator(
        self, name: str, *, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Accumulator:
        """Return the accumulator ``name``; a new dtype or device makes a new one with its total."""
        known = self._accumulators.get(name)
        if known is not None and (known.stand_in.dtype, known.stand_in.device) == (dtype, device):
            return known
        accumulator = self._accumulators[name] = Accumulator(shape, dtype, device)
        accumulator.stand_in.register_post_accumulate_grad_hook(
            functools.partial(self._on_gradient, name)
        )
        if known is not None and known.total is not None:
            accumulator.add(known.total)
        return accumulator

    @run_with_callees_as_python
    def _on_gradient(self, name: str, _: torch.Tensor) -> None:
        if name == PARTIAL and UNSYNCED in self._accumulators:
            # The full gradients that were reduced to this shard may include the unsynced total.
            self._accumulators[UNSYNCED].drop_taken()
        self._on_accumulated()

    def key(self, name: str) -> torch.Tensor | None:
        """Return the key of accumulator ``name``, or None if it has no total to reduce."""
        accumulator = self._accumulators.get(name)
        return None if accumulator is None or accumulator.total is None else accumulator.key

    def stand_ins(self) -> list[torch.Tensor]:
        """Return the leaves that may get gradients instead of the shard."""
        return [accumulator.stand_in for accumulator in self._accumulators.values()]

    def totals(self) -> list[torch.Tensor]:
        """Return all totals that are not reduced yet."""
        totals = [accumulator.total for accumulator in self._accumulators.values()]
        return [total for total in totals if total is not None]

    def drop_taken(self) -> None:
        """Drop the totals that were taken, once they have reached the parameter."""
        for accumulator in self._accumulators.values():
            accumulator.drop_taken()
