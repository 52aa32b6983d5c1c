"""A sharded parameter: the DTensor that users see, linked with the plain shard that graphs take.

    module._parameters["weight"] ──► DTensor (Shard(0)) ──► local tensor
                                        ▲                      │ view of the first rows
                                  .grad │                      ▼
    module.<shard of weight> ───────► shard: this rank's rows, padded   (see [Note: padded shards])

Compiled graphs take the shard because flattening, wrapping and guarding a DTensor costs more than
FSDP2's hooks. Autograd accumulates into the shard; a post-accumulate hook hands the gradient to the
DTensor and runs the DTensor's own hooks. Calls that replace a parameter's storage (``to_empty``,
``.to``, ``p.data = x``, ``load_state_dict(assign=True)``, ``copy.deepcopy``) attach a new shard, as
FSDP2's ``reset_sharded_param`` does. If a DTensor is replaced by any other means, the next step
raises an error.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple, NoReturn, Protocol, SupportsIndex, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.autograd import gradient_hooks, post_accumulate_hooks
from .._torch.dtensor import dtensor_like, local_tensor, set_local_tensor
from .._torch.dynamo import run_with_callees_as_python
from .._torch.nn import parameters_of
from ..errors import BackendError
from ..ops.accumulators import ACCUMULATOR_NAMES, PARTIAL, UNSYNCED, Accumulator
from ..ops.host_copy import to_host_memory
from ..ops.markers import used_dtype
from .grad_accumulation import GradAccumulation
from .layout import Layout
from .no_pickle import refuse_pickling
from .sharded_model import ShardedModel, any_model_accumulates, reduce_leftovers_after_backward
from .unfilled import mark_uninitialised, num_uninitialised

SHARDED_PARAM = "_graphshard_sharded_param"
"""Attribute of a DTensor and of a shard that holds their ``ShardedParam``."""

FUNCTIONAL_CALL = (
    "torch.func.functional_call replaces it, too: give it a copy of the module that is not "
    "sharded, or name what it replaces in ignored_params"
)
"""Hint in errors about replaced parameters: a likely cause that user code does not show."""


def shard_attribute(name: str) -> str:
    """Return the module attribute that holds the shard of parameter ``name``."""
    return f"_graphshard_shard_of_{name}"


class _HasAccessors(Protocol):
    """Interface of ``graphshard.params.parametrization.ShardedModule``."""

    def _graphshard_refresh_accessors(self) -> None: ...


class _Owner(NamedTuple):
    """A module that holds a parameter, and the parameter's name in it."""

    module: weakref.ref[nn.Module]
    name: str


class Assigned(NamedTuple):
    """A parameter that replaced another one in ``load_state_dict(assign=True)``.

    Attributes:
        source: full tensor that it was made from.
    """

    source: weakref.ref[torch.Tensor]
    parameter: nn.Parameter


class ShardedParam:
    """Link between a DTensor parameter, its shard, and the modules that own it (several if tied).

    Attributes:
        fqn: first FQN at the time of sharding, for messages.
        dtensor: parameter that users see; set by ``attach``.
        shard: tensor that graphs take, of shape ``layout.padded_shape``; set by ``attach``.
        accumulation: microbatch gradients that are not reduced yet, or only within a replica.
        assigned: parameter that replaced it in one module; its other (tied) owners may get the
            same one.
    """

    dtensor: DTensor
    shard: nn.Parameter

    def __init__(self, layout: Layout, fqn: str, model: ShardedModel) -> None:
        self.layout = layout
        self.fqn = fqn
        self.model = model
        self.accumulation = GradAccumulation(self._on_accumulated)
        self.assigned: Assigned | None = None
        self._local: torch.Tensor | None = None
        self._unfilled = False
        self._owners: list[_Owner] = []
        model.sharded_params.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        # Copied modules attach and own the copy in their __setstate__.
        return ShardedParam(self.layout, self.fqn, copy.deepcopy(self.model, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"parameter {self.fqn!r}")

    def attach(self, dtensor: DTensor, *, empty: bool = False) -> None:
        """Make a shard for ``dtensor``, whose local tensor becomes a view of the shard.

        Args:
            empty: whether ``dtensor`` is uninitialised; the next forward raises if it still is.
        """
        local = local_tensor(dtensor).detach()
        if local.shape == self.layout.padded_shape and local.is_contiguous():
            padded = local
        else:
            padded = self.layout.padded(local)
        padded = to_host_memory(padded, self.layout.host_memory)
        self.shard = nn.Parameter(padded, requires_grad=dtensor.requires_grad)
        self._local = self.layout.local_view(self.shard.detach())
        self._unfilled = empty and mark_uninitialised(self._local)
        set_local_tensor(dtensor, self._local)
        self.dtensor = dtensor
        setattr(dtensor, SHARDED_PARAM, self)
        setattr(self.shard, SHARDED_PARAM, self)
        if self.shard.is_floating_point() or self.shard.is_complex():
            # Registering the hook needs requires_grad, which a frozen parameter may get later.
            self.shard.requires_grad_(True).register_post_accumulate_grad_hook(_on_shard_gradient)
            self.shard.requires_grad_(dtensor.requires_grad)
        for owner in self._owners:
            if (module := owner.module()) is not None:
                self._give_shard(module, owner.name)

    def is_attached(self) -> bool:
        """Return whether ``attach`` was called; False for a fresh copy."""
        return self._local is not None

    def is_attached_to(self, dtensor: DTensor) -> bool:
        """Return whether ``dtensor`` is attached and still has the storage it was attached with."""
        return (
            self.is_attached() and self.dtensor is dtensor and local_tensor(dtensor) is self._local
        )

    def add_owner(self, module: nn.Module, name: str) -> None:
        """Set DTensor and shard in ``module``, and record it as an owner under ``name``."""
        parameters_of(module)[name] = cast(nn.Parameter, self.dtensor)
        self._give_shard(module, name)
        if not any(self._is_owner(owner, module, name) for owner in self._owners):
            self._owners.append(_Owner(weakref.ref(module), name))

    def remove_owner(self, module: nn.Module, name: str) -> None:
        """Record that ``module`` no longer holds the parameter as ``name``."""
        self._owners = [o for o in self._owners if not self._is_owner(o, module, name)]

    def is_owned(self) -> bool:
        """Return whether any live module holds the parameter."""
        return any(owner.module() is not None for owner in self._owners)

    @staticmethod
    def _is_owner(owner: _Owner, module: nn.Module, name: str) -> bool:
        return owner.module() is module and owner.name == name

    def _give_shard(self, module: nn.Module, name: str) -> None:
        module.__dict__[shard_attribute(name)] = self.shard

    @property
    def grad_destination(self) -> str | None:
        """Name of the accumulator that gradients go to, one of ``ACCUMULATOR_NAMES``.

        None if gradients are reduced, or the parameter requires none.
        """
        if not self.dtensor.requires_grad:
            return None
        if not self.accumulation.syncs:
            return UNSYNCED
        holds_back = self.averages_over_replicas and not self.accumulation.all_reduces
        return PARTIAL if holds_back else None

    @property
    def averages_over_replicas(self) -> bool:
        """Whether reduced shards are averaged over replicas (HSDP)."""
        return self.layout.rows is not None and self.layout.groups.replicas is not None

    def marker_accumulators(self) -> dict[str, torch.Tensor]:
        """Return the stand-ins and keys to pass to the marker, by argument name."""
        destination = self.grad_destination
        if destination is not None:
            self.model.start_accumulating()
        if not self.dtensor.requires_grad:
            return {}
        pending = {}
        if destination != UNSYNCED:
            keys = {name: self.accumulation.key(name) for name in ACCUMULATOR_NAMES}
            pending = {name: key for name, key in keys.items() if key is not None}
        if destination is not None:
            pending[destination] = self.accumulator(destination).stand_in
        return pending

    def accumulator(self, name: str) -> Accumulator:
        """Return the accumulator ``name``, in the dtype that gradients are reduced in."""
        used = used_dtype(self.shard, self.layout.dtype)
        reduced = self.layout.reduce_dtype if used.is_floating_point else None
        return self.accumulation.accumulator(
            name,
            shape=self.layout.shape if name == UNSYNCED else self.layout.padded_shape,
            dtype=reduced or used,
            device=self.layout.groups.device,
        )

    def _on_accumulated(self) -> None:
        """Make the next forward take the accumulator's key, if gradients are reduced again."""
        if self.grad_destination is None:
            self.refresh_accessors()

    def refresh_accessors(self) -> None:
        """Update the owners' accessors to the current ``marker_accumulators``."""
        for owner in self._owners:
            if (module := owner.module()) is not None:
                cast(_HasAccessors, module)._graphshard_refresh_accessors()

    def reduce_accumulated(self, *, unsynced: bool) -> None:
        """Reduce gradients accumulated on any rank, when there is no new gradient to add them to.

        Args:
            unsynced: whether full gradients have accumulated, rather than shards that still have to
                be averaged over replicas.
        """
        layout, dtype = self.layout, self.shard.dtype
        accumulator = self.accumulator(UNSYNCED if unsynced else PARTIAL)
        total = accumulator.take()
        if total is None:
            stand_in = accumulator.stand_in
            total = torch.zeros_like(stand_in, memory_format=torch.contiguous_format)
        if unsynced:
            grad = layout.reduce(total, dtype, self.accumulation.key(PARTIAL))
        else:
            grad = layout.average_over_replicas(total, dtype)
        self.accumulate_grad(grad)
        self.accumulation.drop_taken()

    def is_replaced(self) -> bool:
        """Return whether an owner's parameter, or its storage, was replaced unnoticed."""
        if local_tensor(self.dtensor) is not self._local:
            return True
        for ref, name in self._owners:
            if (module := ref()) is None:
                continue
            held: object = parameters_of(module).get(name)
            if held is not self.dtensor:
                return True
        return False

    def sync(self) -> bool:
        """Copy the DTensor's ``requires_grad`` to the shard; return False if it differed.

        Raises:
            BackendError: the DTensor or its storage was replaced unnoticed, or is not fully
                initialised.
        """
        if self.is_replaced():
            raise BackendError(
                f"parameter {self.fqn!r} was replaced after it was sharded, so training would not "
                "reach it: change it in place (copy_, load_state_dict), or assign before sharding; "
                + FUNCTIONAL_CALL
            )
        if self._unfilled:
            self._check_filled()
        if self.dtensor.requires_grad == self.shard.requires_grad:
            return True
        self.shard.requires_grad_(self.dtensor.requires_grad)
        if self.model.accumulates:
            self.refresh_accessors()
        return False

    def _check_filled(self) -> None:
        """Raise BackendError if elements are still as ``to_empty`` left them."""
        num_elements = 0 if self._local is None else num_uninitialised(self._local)
        if num_elements:
            raise BackendError(
                f"{num_elements} elements of parameter {self.fqn!r} were not initialised after "
                "to_empty(). What is written to some rows (p.data[i] = x, p[1:3].fill_(x)) does "
                "not reach a DTensor: fill the whole parameter, by nn.init.normal_(p) or p.data = x"
            )
        self._unfilled = False

    def gradient(self, padded_grad: torch.Tensor) -> torch.Tensor:
        """Make the DTensor's gradient from this rank's padded gradient, and run its hooks on it."""
        param, factor = self.dtensor, self.model.gradient_divide_factor
        if factor is not None:  # padded_grad is an average over all ranks
            padded_grad.mul_(self.layout.mesh.size() / factor)
        grad: torch.Tensor = dtensor_like(self.layout.local_view(padded_grad), param)
        for hook in gradient_hooks(param):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    def accumulate_grad(self, padded_grad: torch.Tensor) -> None:
        """Accumulate this rank's padded gradient into the DTensor and run the DTensor's hooks."""
        param, grad = self.dtensor, self.gradient(padded_grad)
        if param.grad is None:
            param.grad = grad
        else:
            with torch.no_grad():
                param.grad.add_(grad)
        for hook_after in post_accumulate_hooks(param):
            hook_after(param)


def sharded_param_of(tensor: object) -> ShardedParam | None:
    """Return the sharded parameter of a shard or a sharded DTensor; None for other objects."""
    return getattr(tensor, SHARDED_PARAM, None)


def is_unattached(param: object) -> bool:
    """Return whether ``param`` is a DTensor without a shard, such as a user's own."""
    return isinstance(param, DTensor) and sharded_param_of(param) is None


def owned_by(module: nn.Module, name: str) -> ShardedParam | None:
    """Return the sharded parameter whose shard ``module`` holds for ``name``, or None."""
    return sharded_param_of(module.__dict__.get(shard_attribute(name)))


def in_sync(shard: torch.Tensor) -> bool:
    """Return whether a graph may take this shard: the guard on each shard of every compiled graph.

    False makes Dynamo try another graph, or call the backend for a new one. If ``requires_grad``
    was flipped since the last call, this copies it to the shard before Dynamo compares it with
    the value that the graph was compiled for, so flipping it back reuses the earlier graph.
    """
    sharded_param = sharded_param_of(shard)
    if sharded_param is None or sharded_param.is_replaced():
        return False
    sharded_param.sync()
    return True


@run_with_callees_as_python
def _on_shard_gradient(shard: torch.Tensor) -> None:
    """Move the gradient that autograd accumulated in the shard to the DTensor."""
    sharded_param, grad = sharded_param_of(shard), shard.grad
    assert sharded_param is not None
    if grad is None:  # autograd may run the hook without a gradient
        return
    shard.grad = None
    sharded_param.model.raise_if_changed()
    sharded_param.model.warn_of_breaks()
    sharded_param.accumulate_grad(grad)
    if any_model_accumulates():
        sharded_param.accumulation.drop_taken()
        reduce_leftovers_after_backward()
