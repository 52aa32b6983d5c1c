"""Convert tensors passed to ``load_state_dict`` to shards.

    a full tensor              becomes this rank's rows of it; so does a replicated DTensor
    a DTensor of this spec     is kept; if it was unpickled, it gets this model's mesh
    a parameter of this spec   is assigned itself, even if it is replicated
    another rank's shard       raises an error: see [Note: shards of other ranks]
    an ``Incoming`` tensor     is received from the first rank, the only case that communicates

Anything else is passed through: torch reports it together with its other errors.

[Note: shards of other ranks] A DTensor pickles with its mesh, and the mesh with the coordinates of
the rank that pickled it. A file that only one rank saved (``if rank == 0:
torch.save(model.state_dict(), f)``) therefore shows whose rows it has. If coordinates were not
compared, all ranks would load those rows, silently if their shards have the same shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .._torch.dtensor import dtensor_of, local_tensor, set_mesh
from .._torch.nn import outside_inference_mode
from .._torch.tensors import is_traceable_wrapper_subclass, tree_map
from ..errors import BackendError
from .param_spec import ParamSpec
from .sharded_param import Assigned, ShardedParam, sharded_param_of

_REMEDY = "{}, or use torch.distributed.checkpoint"
_SAVE_MODEL = "save graphshard.full_state_dict(model), which has all rows and loads everywhere"
_SAVE_OPTIMIZER = (
    "save graphshard.full_state_dict(model, optim) and load it with load_full_state_dict"
)


class Incoming(torch.Tensor):
    """A meta tensor with the shape and dtype of a tensor that this rank has yet to receive."""

    # A collective that returns the tensor, split by a spec, or in full without one.
    receive: Callable[[ParamSpec | None], torch.Tensor]

    @staticmethod
    def create(like: torch.Tensor, receive: Callable[[ParamSpec | None], torch.Tensor]) -> Incoming:
        incoming = like.as_subclass(Incoming)
        incoming.receive = receive
        return incoming

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on the full tensor, received now: a load hook may compute with it.

        Reading a property, such as the shape, receives nothing.
        """
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = tree_map(
            lambda value: value.receive(None) if isinstance(value, Incoming) else value,
            (args, kwargs or {}),
        )
        return func(*args, **kwargs)


@outside_inference_mode()
def prepare_loaded(value: object, sharded_param: ShardedParam, name: str, assigns: bool) -> object:
    """Convert a state dict's value to one that a sharded parameter can load.

    Values of the wrong type or shape are returned unchanged: torch reports them.

    Args:
        assigns: whether the value replaces the parameter (``assign=True``) or is copied into it.

    Raises:
        BackendError: ``value`` is a shard of another rank, or of a model over different ranks.
    """
    spec = sharded_param.spec
    if isinstance(value, Incoming):
        return value.receive(spec) if value.shape == spec.shape else value
    if isinstance(value, DTensor):
        value = _own_shard(value, spec, name, assigns)
        if assigns and isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            # Otherwise torch makes the parameter, but possibly in inference mode.
            return nn.Parameter(value, sharded_param.dtensor.requires_grad)
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return value
    if value.shape == (1,) and spec.shape == ():  # how old versions of torch saved scalars
        value = value[0]
    if value.shape != spec.shape:
        return value
    if assigns:
        return _assigned(value, sharded_param)
    return spec.dtensor(spec.padded_shard(value))


def _assigned(full: torch.Tensor, sharded_param: ShardedParam) -> nn.Parameter:
    """Return a parameter made from ``full``, the same one for tied modules that load ``full``."""
    known = sharded_param.assigned
    if known is not None and (source := known.source()) is not None and _is_same(source, full):
        return known.parameter
    spec, requires_grad = sharded_param.spec, sharded_param.dtensor.requires_grad
    parameter = nn.Parameter(spec.dtensor(spec.padded_shard(full)), requires_grad)
    sharded_param.assigned = Assigned(weakref.ref(full), parameter)
    return parameter


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory, as tied weights are."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() == other.storage_offset()
        and (one.stride(), one.dtype) == (other.stride(), other.dtype)
    )


def _own_shard(value: DTensor, spec: ParamSpec, name: str, assigns: bool) -> torch.Tensor:
    mesh = value.device_mesh
    fits = value.placements == spec.placements and value.shape == spec.shape
    is_full = all(isinstance(placement, Replicate) for placement in value.placements)
    if not is_full:
        _check_origin(mesh, spec, name, _SAVE_MODEL)
    if assigns and fits and mesh == spec.mesh and isinstance(value, nn.Parameter):
        # Keep the object, as torch does: an optimizer may hold it.
        if mesh is not spec.mesh:
            set_mesh(value, spec.mesh)
        return value
    if is_full:
        return local_tensor(value)  # this rank takes its rows from it
    if mesh is spec.mesh or not fits:
        return value
    # An unpickled DTensor: its mesh has the same ranks, but is a different object.
    if assigns:  # as in torch, the parameter shares its memory
        return dtensor_of(local_tensor(value), spec.mesh, spec.placements, spec.shape)
    return spec.dtensor(spec.padded(local_tensor(value)))


# --- optimizer state -----------------------------------------------------------------------------

# State of torch's optimizers that is a plain scalar, even if the parameter is a sharded scalar.
_SCALAR_STATE = ("step", "mu_product", "eta", "mu")


def shard_state(state: Mapping[str, Any], spec: ParamSpec) -> dict[str, Any]:
    """Split the full tensors of a parameter's optimizer state like the parameter."""

    def split(name: str, value: Any) -> Any:
        is_full = isinstance(value, torch.Tensor) and value.shape == spec.shape
        if name in _SCALAR_STATE or not is_full:
            return value
        return spec.dtensor(spec.padded_shard(value))

    return {name: split(name, value) for name, value in state.items()}


@outside_inference_mode()
def prepare_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return a copy of the state to load, with full state of sharded parameters split like them.

    Raises:
        BackendError: the state has shards of another rank or of another mesh.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(sharded_param_of(param) is None for param in params):
        return state_dict
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = dict(state_dict["state"])
    for param, number in zip(params, numbers):  # torch itself checks the lengths
        sharded_param = sharded_param_of(param)
        if sharded_param is None or number not in states:
            continue
        state = states[number]
        for name, value in state.items():
            if isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements):
                what = f"{name} of {sharded_param.fqn}"
                _check_origin(value.device_mesh, sharded_param.spec, what, _SAVE_OPTIMIZER)
        plain = {name: v for name, v in state.items() if not is_traceable_wrapper_subclass(v)}
        states[number] = {**state, **shard_state(plain, sharded_param.spec)}
    return {**state_dict, "state": states}


def _check_origin(saved: DeviceMesh, spec: ParamSpec, name: str, advice: str) -> None:
    own, remedy = spec.mesh, _REMEDY.format(advice)
    their_ranks, ranks = saved.mesh.tolist(), own.mesh.tolist()
    if their_ranks != ranks:
        raise BackendError(
            f"{name!r} is a shard of a model over the ranks {their_ranks}, but this model is "
            f"sharded over {ranks}: {remedy}"
        )
    theirs, ours = saved.get_coordinate(), own.get_coordinate()
    if theirs is None or ours is None:
        return
    num_replica_axes = spec.groups.mesh.ndim - 1  # replicas have equal rows
    if theirs[num_replica_axes:] != ours[num_replica_axes:]:
        raise BackendError(
            f"{name!r} has the rows of the rank at {list(theirs)} of the mesh, but this rank is at "
            f"{list(ours)}: either only one rank saved the file, or this rank is loading another "
            f"rank's file. Load the file that this rank saved; if there is none, {remedy}"
        )
