"""Control when and how gradients are reduced; the functions are named as in FSDP2 and DDP."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn

from ..options.checks import check_bool, is_number
from .sharded_param import (
    reduce_all_leftovers,
    refresh_accessors,
    sharded_model_of,
    sharded_param_of,
)
from .trained_module import uncompiled_module

# Flags of a module: whether to reduce its gradients; whether to average them over replicas.
SYNCS, ALL_REDUCES = "syncs", "all_reduces"

# Modules whose flag is False. Not an attribute, which a copy made in ``no_sync`` would keep.
_turned_off: dict[str, WeakSet[nn.Module]] = {SYNCS: WeakSet(), ALL_REDUCES: WeakSet()}


def module_flag(module: nn.Module, name: str) -> bool:
    """Return the flag ``SYNCS`` or ``ALL_REDUCES`` of ``module``, True by default."""
    return module not in _turned_off[name]


def set_flags(flags: Mapping[nn.Module, bool], name: str) -> None:
    """Set the flag ``SYNCS`` or ``ALL_REDUCES`` of modules, and refresh their accessors."""
    for module, flag in flags.items():
        if flag:
            _turned_off[name].discard(module)
        else:
            _turned_off[name].add(module)
    for module in flags:
        refresh_accessors(module)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Skip the gradient reduction of microbatches whose forward runs in this context.

    Full gradients accumulate on each rank instead, in ``reduce_dtype`` if that is set. The backward
    of the next forward outside of the context adds them to its own gradients, once, and reduces the
    total. Until then every rank holds full gradients.

    Args:
        model: module that graphshard has sharded or will shard, or one of its submodules; may be
            compiled.

    Raises:
        ValueError: ``model`` is not a module.
    """
    with _syncs_set(model, False):
        yield


def sync_accumulated(model: nn.Module) -> None:
    """Reduce the gradients that ``model`` has accumulated so far; all ranks must call this.

    Also reduces those of other models, as any backward does, unless they are in ``no_sync``.
    """
    with _syncs_set(model, True), torch.no_grad():  # as in backward: hooks may change parameters
        reduce_all_leftovers()


@contextmanager
def _syncs_set(model: nn.Module, flag: bool) -> Iterator[None]:
    modules = uncompiled_module(model).modules()
    before = {module: module_flag(module, SYNCS) for module in modules}
    try:
        set_flags(dict.fromkeys(before, flag), SYNCS)
        yield
    finally:
        set_flags(before, SYNCS)


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Set whether gradients of later forwards are reduced.

    FSDP2's method of this name applies to later backwards instead. See :func:`no_sync`.

    Raises:
        ValueError: ``model`` is not a module, or ``requires_gradient_sync`` is not a bool.
    """
    modules = uncompiled_module(model).modules()
    check_bool("requires_gradient_sync", requires_gradient_sync)
    set_flags(dict.fromkeys(modules, requires_gradient_sync), SYNCS)


def set_requires_all_reduce(model: nn.Module, requires_all_reduce: bool) -> None:
    """Set whether gradients of later forwards are averaged over replicas.

    This is for a mesh with replicas (HSDP). Without the all-reduce, shards that were reduced within
    each replica accumulate, and the next backward that averages over replicas averages the total
    once. Unlike :func:`no_sync`, this keeps no full gradients. FSDP2's method of this name applies
    to later backwards instead.

    Raises:
        ValueError: ``model`` is not a module, or ``requires_all_reduce`` is not a bool.
    """
    modules = uncompiled_module(model).modules()
    check_bool("requires_all_reduce", requires_all_reduce)
    set_flags(dict.fromkeys(modules, requires_all_reduce), ALL_REDUCES)


def set_gradient_divide_factor(model: nn.Module, factor: float) -> None:
    """Divide gradient sums by ``factor`` instead of by the number of ranks with different data.

    Use 1.0 if the loss is already divided by a total over all ranks, such as the number of tokens.
    All ranks must set the same factor. Unlike FSDP2's method of this name, this also affects
    parameters outside of ``model`` that the same call of :func:`graphshard.shard` has sharded.

    Args:
        model: module that graphshard has sharded, or one of its submodules; may be compiled.

    Raises:
        ValueError: ``model`` is not sharded, or ``factor`` is not a positive, finite number.
    """
    module = uncompiled_module(model)
    sharded = sharded_model_of(module)
    if sharded is None:
        raise ValueError(
            f"{type(module).__name__} is not sharded yet: call graphshard.shard(model, mesh) "
            "first, even if the first compiled call would shard the model"
        )
    if not is_number(factor) or not 0 < factor < math.inf:
        raise ValueError(f"factor={factor!r}: must be a positive, finite number")
    # Parameters that an earlier call of ``shard`` sharded belong to another ``ShardedModel``.
    params = filter(None, map(sharded_param_of, module.parameters()))
    for model_or_part in {sharded, *(param.model for param in params)}:
        model_or_part.gradient_divide_factor = float(factor)
