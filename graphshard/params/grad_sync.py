"""Gradient accumulation: which backward passes communicate, by the names of FSDP2 and DDP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .grad_accumulation import ALL_REDUCES, SYNCS, module_flag
from .parametrization import set_flags
from .sharded_model import sharded_model_of


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not reduce gradients of microbatches whose forward runs in this context.

    Their full gradients accumulate on each rank, in ``reduce_dtype`` if there is one. The backward
    of the next forward outside adds them to its own gradients, once, and reduces the total. Until
    then a rank holds full gradients.

    Args:
        model: a module that graphshard has sharded or will shard, compiled or not, or a part of it.

    Raises:
        ValueError: ``model`` is no module.
    """
    _check(model, True)
    before = {module: module_flag(module, SYNCS) for module in model.modules()}
    try:
        set_flags(dict.fromkeys(before, False), SYNCS)
        yield
    finally:
        set_flags(before, SYNCS)


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Set whether gradients of the forwards that follow are reduced, as FSDP2's method does.

    See :func:`no_sync`.

    Raises:
        ValueError: ``model`` is no module, or the flag no bool.
    """
    _check(model, requires_gradient_sync)
    set_flags(dict.fromkeys(model.modules(), requires_gradient_sync), SYNCS)


def set_requires_all_reduce(model: nn.Module, requires_all_reduce: bool) -> None:
    """Set whether gradients of the forwards that follow are averaged over replicas, too.

    As FSDP2's method does, for a mesh with replicas (HSDP). Without this all-reduce, the shards
    that are reduced within each replica accumulate, and the next backward that averages over
    replicas averages the total once. A rank never holds full gradients for this.

    Raises:
        ValueError: ``model`` is no module, or the flag no bool.
    """
    _check(model, requires_all_reduce)
    set_flags(dict.fromkeys(model.modules(), requires_all_reduce), ALL_REDUCES)


def set_gradient_divide_factor(model: nn.Module, factor: float) -> None:
    """Divide the sums of gradients over all ranks by ``factor``, and not by the number of ranks.

    As FSDP2's method does, for a whole model: 1.0 is for losses that are divided by what all ranks
    have together, such as the number of their tokens.

    Args:
        model: a module that graphshard has sharded, or a part of it.

    Raises:
        ValueError: ``model`` is not sharded, or ``factor`` is not a positive number.
    """
    sharded = sharded_model_of(model) if isinstance(model, nn.Module) else None
    if sharded is None:
        raise ValueError(
            f"{type(model).__name__} is not sharded yet: call graphshard.shard(model, mesh) before"
        )
    if (
        isinstance(factor, bool)
        or not isinstance(factor, (int, float))
        or not 0 < factor < math.inf
    ):
        raise ValueError(f"factor={factor!r}: must be a positive number")
    sharded.gradient_divide_factor = float(factor)


def _check(model: object, flag: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module that is trained")
    if not isinstance(flag, bool):
        raise ValueError(f"the flag is {flag!r}: must be True or False")
