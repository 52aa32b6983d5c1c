"""Activation checkpointing in Dynamo's graphs and in joint graphs.

Dynamo traces a checkpoint as a call of `CHECKPOINT`, whose first argument is the body. AOTAutograd
runs the body and gives its nodes a number in ``meta[REGION]``, a new one for each call
(torch/_higher_order_ops/wrap.py). The partitioner saves the values that a checkpoint passes to
another one with a larger number (``cleanup_recompute_tags`` in torch/_functorch/partitioners.py).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import fx

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
REGION = "ac_graph_id"
_EMPTY = object()  # contents of a cell without a value


def is_body(node: fx.Node) -> bool:
    """Return whether a node of Dynamo's graph is the body of checkpoints."""
    # Checkpoints may also take constant tensors, whose nodes are like those of bodies.
    return node.op == "get_attr" and all(
        user.target is CHECKPOINT and user.args[0] is node for user in node.users
    )


def body_of(checkpoint: fx.Node) -> fx.GraphModule:
    body: Any = checkpoint.args[0]
    owner: Any = checkpoint.graph.owning_module
    return owner.get_submodule(body.target)


def policy_of(checkpoint: fx.Node) -> Hashable:
    """Return a key for a checkpoint's save policy, equal for equal policies."""
    return _key(body_of(checkpoint).meta.get("_checkpoint_context_fn"))


def _key(value: Any, outer: tuple[object, ...] = ()) -> Hashable:
    # Each layer may define its policy as an inner function: compare code, defaults and closure.
    if isinstance(value, functools.partial):
        return _key([value.func, *value.args, *value.keywords.items()], outer)
    if isinstance(value, FunctionType) and value.__closure__ and value not in outer:
        parts = [value.__defaults__, value.__kwdefaults__, *map(_contents, value.__closure__)]
        return value.__code__, _key(parts, (*outer, value))
    if isinstance(value, (list, tuple)):
        return tuple(_key(part, outer) for part in value)
    if isinstance(value, set):
        return frozenset(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return cast(Hashable, value)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned
        return _EMPTY
