"""Raise in backward if a parameter has changed since the forward.

Backward gathers a parameter again from the shard that forward saved. Autograd checks the versions
of saved tensors, but an in-place op on a DTensor increments only the version of the DTensor, not
the version that its local tensor shares with the shard. So each run of a graph records the versions
of the DTensors whose shards it saves. Parameters that are kept unsharded between forward and
backward keep their values, and are not checked. Foreach ops on DTensors increment no version at
all, so a hook on all optimizers does so after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .._torch.autograd import (
    before_backward,
    compiled_nodes,
    saved_tensors,
    saves_unpacked,
    version_of,
)
from .._torch.tensors import storage_of
from ..errors import BackendError
from .sharded_param import ShardedParam, sharded_param_of

R = TypeVar("R")

_VERSIONS = "graphshard_versions"
"""Attribute of a run's autograd node: the parameters whose shards it saved, with versions."""


class _Saved(NamedTuple):
    """Shards that every run of a graph saves for backward.

    Attributes:
        node_type: class of the graph's autograd nodes.
        shards: positions of the saved shards among the graph's inputs.
    """

    node_type: type
    shards: list[int]


_hook: list[RemovableHandle] = []
"""Hook on all optimizers; empty until a graph saves a shard."""


def refusing_stale_forwards(compiled: Callable[..., R]) -> Callable[..., R]:
    """Wrap a compiled graph so that backward raises if a parameter it regathers has changed."""
    saved: _Saved | None = None

    def run(*args: object) -> R:
        nonlocal saved
        outputs = compiled(*args)
        # Saved-tensor hooks pack a copy, or recompute with the parameters as they are in backward.
        if not isinstance(outputs, Sequence) or not saves_unpacked():
            return outputs
        saved = saved or _find_saved(outputs, args)
        if saved is not None and saved.shards:
            _note_versions(outputs, args, saved)
        return outputs

    return run


def _find_saved(outputs: Sequence[object], args: Sequence[object]) -> _Saved | None:
    """Return what a graph saves, read from its first training run; None for any other run."""
    # A graph may return its inputs, whose nodes belong to other graphs.
    nodes = set(compiled_nodes(outputs)).difference(compiled_nodes(args))
    if not nodes:
        return None
    node = nodes.pop()
    before_backward(node, _raise_if_stale)
    # Compared by storage: on a single rank, the gathered parameter is a view of its shard.
    kept = {storage_of(tensor) for tensor in saved_tensors(node)}
    shards = [
        i
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and sharded_param_of(arg) and storage_of(arg) in kept
    ]
    if shards and not _hook:
        _hook.append(register_optimizer_step_post_hook(_count_step))
    return _Saved(type(node), shards)


def _note_versions(outputs: Sequence[object], args: Sequence[object], saved: _Saved) -> None:
    for node in compiled_nodes(outputs):
        if type(node) is saved.node_type and not hasattr(node, _VERSIONS):
            params = [sharded_param_of(args[i]) for i in saved.shards]
            setattr(node, _VERSIONS, [(p, version_of(p.dtensor)) for p in params if p is not None])


def _raise_if_stale(node: Any) -> None:
    """Raise BackendError if a parameter was changed in place since the forward of ``node``."""
    noted: list[tuple[ShardedParam, int]] = getattr(node, _VERSIONS, [])
    for sharded_param, version in noted:
        # Not so if a new DTensor replaced it: its version starts at 0, and it has its own memory.
        if version_of(sharded_param.dtensor) > version:
            raise BackendError(
                f"parameter {sharded_param.fqn!r} was modified by an inplace operation, such as "
                "optimizer.step(), after the forward, and backward gathers it again: its gradients "
                "would be those of neither. Call backward before the change, or forward again "
                "after it; reshard_after_forward=False keeps what forward has gathered"
            )


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    increment_version([p for p in params if isinstance(p, DTensor) and p.grad is not None])
