"""Gradient accumulation: which backward passes communicate. The names are those of FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from .grad_accumulation import ALL_REDUCES, SYNCS, flag_of, set_flag
from .parametrization import ShardedModule


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Microbatches whose forward runs in this context are not reduced: their full gradients add up on
    each rank, in ``reduce_dtype`` if there is one, and the backward of the next forward outside adds
    them to its own, once, and reduces the sum. Until then a rank holds full gradients.

    Args:
        model: a module that graphshard has sharded or will shard, compiled or not, or a part of one.

    Raises:
        ValueError: ``model`` is no module.
    """
    _check(model, True)
    before = {module: flag_of(module, SYNCS) for module in model.modules()}
    try:
        _set(dict.fromkeys(before, False), SYNCS)
        yield
    finally:
        _set(before, SYNCS)


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """As FSDP2's: whether gradients of the forwards that follow are reduced; see :func:`no_sync`."""
    _check(model, requires_gradient_sync)
    _set(dict.fromkeys(model.modules(), requires_gradient_sync), SYNCS)


def set_requires_all_reduce(model: nn.Module, requires_all_reduce: bool) -> None:
    """As FSDP2's, for a mesh with replicas (HSDP): whether gradients of the forwards that follow are
    averaged over replicas, too. If not, the shards that are reduced within each replica add up, and the
    next backward that may averages the sum once; a rank never holds full gradients for it."""
    _check(model, requires_all_reduce)
    _set(dict.fromkeys(model.modules(), requires_all_reduce), ALL_REDUCES)


def _check(model: object, flag: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module that is trained")
    if not isinstance(flag, bool):
        raise ValueError(f"the flag is {flag!r}: must be True or False")


def _set(flags: Mapping[nn.Module, bool], name: str) -> None:
    for module, flag in flags.items():
        set_flag(module, name, flag)
    for module in flags:
        if isinstance(module, ShardedModule):
            module.refresh_accessors()
