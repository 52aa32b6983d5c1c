"""Raises in the backward of a forward whose parameters have changed since.

Backward gathers a parameter again from the shard that forward has saved. Autograd compares the
versions of saved tensors, but an operator that changes a DTensor in place increments the version of
the DTensor alone, not that of its local tensor, with which the shard shares its version. So each
run of a graph notes the versions of the DTensors whose shards it saves. Parameters that stay
gathered between forward and backward keep their values, and are not checked. A foreach operator on
DTensors increments no version at all, so each step of an optimizer is counted by a hook.
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
    saves_as_is,
    version_of,
)
from .._torch.tensors import storage_of
from ..errors import BackendError
from .sharded_param import ShardedParam, sharded_param_of

R = TypeVar("R")

_VERSIONS = "graphshard_versions"
"""The attribute of a run's autograd node with the parameters that it has saved, and versions."""


class _Saved(NamedTuple):
    """What every run of a graph saves.

    Attributes:
        node_type: the class of its autograd nodes.
        shards: positions of the shards among its inputs.
    """

    node_type: type
    shards: list[int]


_hook: list[RemovableHandle] = []
"""The hook of all optimizers, once a graph has saved a shard."""


def refusing_stale_forwards(compiled: Callable[..., R]) -> Callable[..., R]:
    """Wrap a compiled graph so that its backward raises if a parameter that it gathers again was
    changed in place since the forward."""
    saved: _Saved | None = None

    def run(*args: object) -> R:
        nonlocal saved
        outputs = compiled(*args)
        # What hooks have packed is a copy, or is computed again with the parameters of then.
        if not isinstance(outputs, Sequence) or not saves_as_is():
            return outputs
        saved = saved or _find_saved(outputs, args)
        if saved is not None and saved.shards:
            _note_versions(outputs, args, saved)
        return outputs

    return run


def _find_saved(outputs: Sequence[object], args: Sequence[object]) -> _Saved | None:
    """Return what a graph saves, as its first run for training shows, or None."""
    # A graph may return its inputs: these have the nodes of other graphs.
    nodes = set(compiled_nodes(outputs)).difference(compiled_nodes(args))
    if not nodes:
        return None
    node = nodes.pop()
    before_backward(node, _raise_if_stale)
    # By memory: what a single rank gathers is a view of its shard.
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
    """
    Raises:
        BackendError: a parameter was changed in place since the forward of ``node``.
    """
    noted: list[tuple[ShardedParam, int]] = getattr(node, _VERSIONS, [])
    for sharded_param, version in noted:
        # Another DTensor that has taken its place begins at 0, and has memory of its own.
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
