"""Full parameters for the parts of a forward that run outside of any graph.

An eager part reads parameters one by one, as its code comes to them. How often, and which of them,
may depend on a rank's data (the experts of a mixture, a loop over ``index.unique()``); ranks that
gather at each read would issue different collectives. So the unit is the module, as it is of
FSDP2's ``fully_shard(module)``: the first read of any of its parameters gathers all of them, later
reads in the same call get the same tensors, and one backward reduces all their gradients:

    call of the module    leaves ──► _Unshard ──► full parameters ──► read, read, ...
    backward              their gradients ◄── _Unshard ◄── sums over the reads, None if not read

What ranks still have to agree on is which modules run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch.distributed import process_group
from .._torch.dynamo import RESUMED
from .._torch.frames import frames, is_dynamo_entry, is_recomputation, module_of_method
from ..ops.accumulators import PARTIAL, UNSYNCED
from ..ops.bucket_copy import add_accumulated
from ..ops.markers import used_dtype
from .sharded_param import ShardedModel, ShardedParam, leaf_of, sharded_model_of, sharded_param_of

_CALL = "_wrapped_call_impl"
_FORWARD = ("forward", "_call_impl", _CALL)
_GATHERED = "graphshard: gathered in this call"


def full_parameters(module: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
    """The full parameters of ``module``, differentiable, or None outside of any forward.

    Raises:
        BackendError: a parameter was replaced after it was sharded.
    """
    call = _call_under_way(sharded_model_of(module))
    if call is None:
        return None
    leaves = {name: leaf_of(module, name) for name in names}
    links = [sharded_param_of(leaf) for leaf in leaves.values()]
    for link in links:
        link.sync()
        link.model.reads_eagerly = True
    state = (torch.is_grad_enabled(), *(leaf._version for leaf in leaves.values()))
    gathered = call.setdefault(_GATHERED, {})
    if (module, state) not in gathered:
        full = _Unshard.apply(links, *leaves.values())
        gathered[module, state] = dict(zip(leaves, full))
    return gathered[module, state]


def _call_under_way(model: ShardedModel | None) -> dict[str, Any] | None:
    """The keyword arguments of the innermost call of ``model``, of a part of it, or of what was
    compiled: a place for what is to live as long as the call. None outside of any forward.

    Nothing can be set on entry to a forward and reset on its exit: Dynamo would trace that too,
    and a graph break in between would leave it set. So the stack is read. The dictionary is that
    of ``_wrapped_call_impl`` or of Dynamo's entry, which hand copies of it on and do not look at
    it again.
    """
    inside = False
    for frame in frames():
        entry, part = is_dynamo_entry(frame), _is_of(frame, model)
        if entry or (part and frame.f_code.co_name == _CALL):
            return frame.f_locals["kwargs"]
        inside = inside or part or is_recomputation(frame)
    return {} if inside else None


def _is_of(frame: Any, model: ShardedModel | None) -> bool:
    """Whether ``frame`` is a forward of ``model`` or of a part of it."""
    name = frame.f_code.co_name
    if name not in _FORWARD and not name.startswith(RESUMED):
        return False
    owner = module_of_method(frame)
    return owner is not None and sharded_model_of(owner) is model


class _Unshard(torch.autograd.Function):
    """``leaves -> full parameters`` of one module."""

    @staticmethod
    def forward(ctx: Any, links: Sequence[ShardedParam], *leaves: torch.Tensor) -> Any:
        ctx.links, ctx.asked = links, [link.asked for link in links]
        ctx.set_materialize_grads(False)
        full = [link.layout.unshard(leaf) for link, leaf in zip(links, leaves)]
        ctx.mark_non_differentiable(*(f for f, leaf in zip(full, leaves) if not leaf.requires_grad))
        return tuple(full)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        trained = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        reduced = []
        for i in trained:
            if ctx.asked[i] != UNSYNCED:
                reduced.append(i)
            elif (grad := grads[i]) is not None:
                ctx.links[i].sum_of(UNSYNCED).add(grad)
        used = _used_on_any_rank([ctx.links[i] for i in reduced], [grads[i] for i in reduced])
        result: list[torch.Tensor | None] = [None] * len(grads)
        for i, is_used in zip(reduced, used):
            if is_used:
                result[i] = _reduced(ctx.links[i], grads[i], ctx.asked[i])
        return None, *result


def _reduced(link: ShardedParam, grad: torch.Tensor | None, asked: str) -> torch.Tensor | None:
    """With what has added up before; None where it adds up further."""
    if grad is None:
        dtype = used_dtype(link.leaf, link.layout.dtype)
        grad = torch.zeros(link.layout.shape, dtype=dtype, device=link.layout.groups.device)
    if (key := link.sums.key(UNSYNCED)) is not None:
        grad = add_accumulated(grad, [key], [0], link.sum_of(UNSYNCED).stand_in.dtype)
    if asked == PARTIAL:
        link.sum_of(PARTIAL).add(link.layout.reduce_to_partial(grad))
        link.sums.delivered()
        return None
    return link.layout.reduce(grad, link.leaf.dtype, link.sums.key(PARTIAL))


def _used_on_any_rank(
    links: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]
) -> list[bool]:
    """Which parameters have a gradient on any rank; the device is waited for only if one has none
    here, and nothing is asked about a single one: without its gradient backward would not come."""
    here = [grad is not None for grad in grads]
    if len(links) <= 1:
        return here
    groups = links[0].layout.groups
    flags = torch.ones(len(links), dtype=torch.int32, device=groups.device)
    for i, used in enumerate(here):
        if not used:
            flags[i] = 0
    dist.all_reduce(flags, group=process_group(groups.all))
    return here if all(here) else [flag > 0 for flag in flags.tolist()]
