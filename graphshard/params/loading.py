"""Makes shards of tensors that ``load_state_dict`` is given; nothing is communicated.

    a full tensor              this rank's rows of it
    a DTensor of this layout   itself; where it was unpickled, it gets this model's mesh
    another rank's shard       an error: see [Note: whose shard]

What fits in no way is left as it is: torch's own errors name it, with whatever else is wrong.

[Note: whose shard] A DTensor pickles with its mesh, and the mesh with the coordinates of the rank
that pickled it. So a file that one rank saved (``if rank == 0: torch.save(model.state_dict(), f)``)
tells in every process whose rows it has. Without a look at the coordinates all ranks would load
those rows, without an error wherever ranks have equally many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .._torch.dtensor import local_tensor
from .._torch.tensors import is_traceable_wrapper_subclass
from ..errors import BackendError
from .layout import Layout
from .sharded_param import Assigned, ShardedParam, sharded_param_of

REMEDY = (
    "save graphshard.full_state_dict(model), which has all rows and loads everywhere, or use "
    "torch.distributed.checkpoint, or save and load a file of its own on every rank"
)
_REMEDY_OF_OPTIMIZERS = (
    "save graphshard.full_state_dict(model, optim) and load it by load_full_state_dict, or use "
    "torch.distributed.checkpoint, or save and load a file of its own on every rank"
)


class Incoming(torch.Tensor):
    """A tensor that this rank does not have yet: shape and dtype, on the meta device.

    Attributes:
        receive: returns it, split by a layout of its shape; a collective.
    """

    receive: Callable[[Layout], DTensor]

    @staticmethod
    def of(like: torch.Tensor, receive: Callable[[Layout], DTensor]) -> Incoming:
        """Return one with the shape and dtype of ``like``, a tensor on the meta device."""
        incoming = like.as_subclass(Incoming)
        incoming.receive = receive
        return incoming


def to_load(value: object, sharded_param: ShardedParam, name: str, assigns: bool) -> object:
    """Return what a sharded parameter can be loaded from.

    Args:
        value: what a state dict has for it.
        name: its key there, for messages.
        assigns: it takes the parameter's place, and is not copied into it.

    Raises:
        BackendError: ``value`` is the shard of another rank, or of other ranks.
    """
    layout = sharded_param.layout
    if isinstance(value, Incoming):
        return value.receive(layout) if value.shape == layout.shape else value
    if isinstance(value, DTensor):
        value = _own_shard(value, layout, name)
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return value
    if value.shape == (1,) and layout.shape == ():  # as old versions of torch saved it
        value = value[0]
    if value.shape != layout.shape:
        return value
    return _assigned(value, sharded_param) if assigns else _shard_of(value, layout)


def _assigned(full: torch.Tensor, sharded_param: ShardedParam) -> nn.Parameter:
    """Return a parameter made of ``full``, the same where a tied one takes the same tensor."""
    known = sharded_param.assigned
    if known is not None and (source := known.source()) is not None and _is_same(source, full):
        return known.parameter
    requires_grad = sharded_param.dtensor.requires_grad
    parameter = nn.Parameter(_shard_of(full, sharded_param.layout), requires_grad)
    sharded_param.assigned = Assigned(weakref.ref(full), parameter)
    return parameter


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory, as tied weights in a state dict are."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() == other.storage_offset()
        and (one.stride(), one.dtype) == (other.stride(), other.dtype)
    )


def _shard_of(full: torch.Tensor, layout: Layout) -> DTensor:
    """Return ``full`` as a DTensor that holds this rank's rows, on the device that keeps them."""
    if layout.rows is None or layout.host_memory is not None or full.is_meta:
        return layout.dtensor(layout.padded_shard(full))
    return layout.dtensor(layout.padded(full[layout.own_rows].to(layout.groups.device)))


def _own_shard(value: DTensor, layout: Layout, name: str) -> torch.Tensor:
    """Return ``value`` with this model's mesh; the full tensor where every rank has all of it."""
    mesh = value.device_mesh
    if all(isinstance(placement, Replicate) for placement in value.placements):
        return local_tensor(value)
    _check_whose(mesh, layout.mesh, name, REMEDY)
    if mesh is layout.mesh or value.placements != layout.placements or value.shape != layout.shape:
        return value
    return layout.dtensor(layout.padded(local_tensor(value)))


def check_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """
    Raises:
        BackendError: the state of a sharded parameter is the shard of another rank.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for param, number in zip(params, numbers):  # torch raises if there are more of the one
        sharded_param, state = sharded_param_of(param), state_dict["state"].get(number, {})
        if sharded_param is None:
            continue
        for name, value in state.items():
            if isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements):
                what, mesh = f"{name} of {sharded_param.fqn}", sharded_param.layout.mesh
                _check_whose(value.device_mesh, mesh, what, _REMEDY_OF_OPTIMIZERS)


def _check_whose(saved: DeviceMesh, own: DeviceMesh, name: str, remedy: str) -> None:
    """
    Raises:
        BackendError: a shard over the mesh ``saved`` is not this rank's over ``own``.
    """
    their_ranks, ranks = saved.mesh.tolist(), own.mesh.tolist()
    if their_ranks != ranks:
        raise BackendError(
            f"{name!r} is a shard of a model over the ranks {their_ranks}, and this one is sharded "
            f"over {ranks}: {remedy}"
        )
    theirs, ours = saved.get_coordinate(), own.get_coordinate()
    if theirs is not None and ours is not None and theirs[-1] != ours[-1]:
        raise BackendError(
            f"{name!r} has the rows of the rank at {list(theirs)} of the mesh, and this one is at "
            f"{list(ours)}: the file was saved by that rank alone. Instead {remedy}"
        )
