"""A sharded parameter: the DTensor that users see, linked to the plain shard that graphs use.

    module._parameters["weight"] ──► DTensor (Shard(0)) ──► local tensor
                                        ▲                      │ view of the first rows
                                  .grad │                      ▼
    module.<shard of weight> ───────► shard: this rank's rows, padded   (see [Note: padded shards])

Graphs use the shard because flattening, wrapping and guarding a DTensor costs more than FSDP2's
hooks. Autograd accumulates into the shard; a hook moves the gradient to the DTensor and runs the
DTensor's own hooks. Calls that replace a parameter's storage (``to_empty``, ``.to``,
``p.data = x``, ``load_state_dict(assign=True)``, ``copy.deepcopy``) attach a new shard, as FSDP2's
``reset_sharded_param`` does. A DTensor of the same layout that the user assigns to a module gets a
shard in the next forward, which raises for any other replacement.

[Note: unreduced gradients] Gradients of microbatches that are not reduced, or not yet averaged over
replicas, add up in accumulators. A marker takes an accumulator's stand-in: a tensor that requires a
gradient and has the shape of the parameter (``unsynced``) or of its shard (``partial``), but no
memory. Autograd accumulates into its ``.grad``. The microbatch that reduces takes a key instead,
which its backward uses to look up the total:

    microbatch   unshard(shard, unsynced=stand-in)      stand-in.grad += gradient
    last one     unshard(shard, unsynced=key)           shard.grad = reduce(gradient + total of key)

A total is added once, by the first backward that takes it. It is put back if it never reaches the
parameter: ``torch.autograd.grad`` of an input also runs the whole compiled backward.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, SupportsIndex, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.autograd import (
    gradient_hooks,
    on_backward_success,
    post_accumulate_hooks,
    step_in_backward,
)
from .._torch.dtensor import attributes_of, dtensor_like, local_tensor, set_local_tensor
from .._torch.dynamo import graph_break_reasons, run_with_callees_as_python
from .._torch.nn import outside_inference_mode, parameters_of
from ..errors import BackendError
from ..ops.accumulators import ACCUMULATOR_NAMES, PARTIAL, UNSYNCED, Accumulator
from ..ops.host_copy import to_host_memory
from ..ops.marker_specs import used_dtype
from ..options.options import Options
from ..ranks.agree import max_over_ranks
from .mesh import eager_reduction
from .param_spec import ParamSpec
from .pickling import refuse_pickling
from .uninitialized import mark_uninitialized, num_uninitialized

# Attribute of a DTensor and of a shard that holds their ``ShardedParam``.
SHARDED_PARAM = "_graphshard_sharded_param"

# Hint for errors about replaced parameters: a likely cause that user code does not show.
FUNCTIONAL_CALL = (
    "torch.func.functional_call also replaces parameters: call it with an unsharded copy of the "
    "module, or list the parameters in ignored_params"
)

_MODEL = "_graphshard_model"
_WHY_NOT_COMPILED = (
    "call the model that torch.compile(model, backend=graphshard.backend(mesh)) returns; is "
    "compilation disabled (disable=True, TORCH_COMPILE_DISABLE=1, set_stance)?"
)

# Models with unreduced gradients, in the order in which they started to accumulate. A backward may
# reach only one of several models, and must also reduce the totals of the others, in the same order
# on all ranks.
_accumulating: weakref.WeakKeyDictionary[ShardedModel, None] = weakref.WeakKeyDictionary()

_numbers = itertools.count()


def shard_attribute(name: str) -> str:
    """Return the name of the module attribute that holds the shard of parameter ``name``."""
    return f"_graphshard_shard_of_{name}"


def changed_in_place(fqn: str) -> str:
    """Return the error message for a forward that changes a full parameter in place."""
    return (
        f"forward changes parameter {fqn!r} in place, but has only a gathered copy of it: change "
        "model.get_parameter(name) between steps under torch.no_grad(), or use an out-of-place "
        "operation"
    )


class Assigned(NamedTuple):
    """A parameter assigned by ``load_state_dict(assign=True)``, and its source."""

    source: weakref.ref[torch.Tensor]  # full tensor that the parameter was made from
    parameter: nn.Parameter


class ShardedParam:
    """Link between a DTensor parameter, its shard, and the modules that own it (several if tied).

    Attributes:
        dtensor: parameter that users see; set by ``attach``.
        shard: graph input, of shape ``spec.padded_shape``; set by ``attach``.
        syncs: whether gradients are reduced; if not, they accumulate on this rank.
        all_reduces: whether reduced shards are also averaged over replicas.
        assigned: replacement that one owner has loaded, reused by the other (tied) owners.
    """

    dtensor: DTensor
    shard: nn.Parameter

    def __init__(self, spec: ParamSpec, model: ShardedModel) -> None:
        self.spec = spec
        self.model = model
        self.syncs = self.all_reduces = True
        self.assigned: Assigned | None = None
        self._accumulators: dict[str, Accumulator] = {}
        self._local: torch.Tensor | None = None
        self._uninitialized = False
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []  # and parameter names
        self._number = next(_numbers)
        model.sharded_params.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        # Copied modules attach and own the copy in their __setstate__.
        return ShardedParam(self.spec, copy.deepcopy(self.model, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"parameter {self.fqn!r}")

    @property
    def fqn(self) -> str:
        return self.spec.fqn

    # --- DTensor, shard and owners ---

    @outside_inference_mode()
    def attach(self, dtensor: DTensor, *, empty: bool = False) -> None:
        """Set ``shard`` for ``dtensor``, whose local tensor becomes a view of the shard.

        The shard shares the local tensor's memory on all ranks if it can (``shared_shard``), need
        not be moved to (pinned) host memory, and was not created in inference mode; otherwise, it
        is a copy. With ``empty``, the memory is uninitialized and must be filled before the next
        forward.
        """
        local = local_tensor(dtensor).detach()
        padded = None if local.is_inference() else self.spec.shared_shard(local)
        if padded is None:
            padded = self.spec.padded(local)
        padded = to_host_memory(padded, self.spec.host_memory)
        self.shard = nn.Parameter(padded, requires_grad=dtensor.requires_grad)
        self._local = self.spec.local_view(self.shard.detach())
        # The next forward raises unless empty memory has been filled.
        self._uninitialized = empty and mark_uninitialized(self.spec.rows_first(self._local))
        set_local_tensor(dtensor, self._local)
        self.dtensor = dtensor
        setattr(dtensor, SHARDED_PARAM, self)
        setattr(self.shard, SHARDED_PARAM, self)
        if self.shard.is_floating_point() or self.shard.is_complex():
            # Registering the hook needs requires_grad, which a frozen parameter may get later.
            self.shard.requires_grad_(True).register_post_accumulate_grad_hook(_on_shard_gradient)
            self.shard.requires_grad_(dtensor.requires_grad)
        for module, name in self._live_owners():
            self._give_shard(module, name)

    def is_attached(self) -> bool:
        return self._local is not None  # None in a fresh copy

    def is_attached_to(self, dtensor: DTensor) -> bool:
        """Return whether ``dtensor`` is attached and still has the storage it was attached with."""
        return local_tensor(dtensor) is self._local and self.dtensor is dtensor

    def add_owner(self, module: nn.Module, name: str) -> None:
        """Make ``module`` an owner: give it the DTensor as parameter ``name``, and the shard."""
        parameters_of(module)[name] = cast(nn.Parameter, self.dtensor)
        self._give_shard(module, name)
        if not any(
            owner is module and attribute == name for owner, attribute in self._live_owners()
        ):
            self._owners.append((weakref.ref(module), name))

    def remove_owner(self, module: nn.Module, name: str) -> None:
        self._owners = [o for o in self._owners if o[0]() is not module or o[1] != name]

    def is_owned(self) -> bool:
        return bool(self._live_owners())

    def _live_owners(self) -> list[tuple[nn.Module, str]]:
        owners = ((ref(), name) for ref, name in self._owners)
        return [(module, name) for module, name in owners if module is not None]

    def _give_shard(self, module: nn.Module, name: str) -> None:
        module.__dict__[shard_attribute(name)] = self.shard

    def refresh_accessors(self) -> None:
        for module, _ in self._live_owners():
            refresh_accessors(module)

    def is_replaced(self) -> bool:
        """Return whether an owner's parameter or its storage was replaced without a new shard."""
        return self.removed() is None

    def removed(self) -> int | None:
        """Return which owners have removed the parameter, as bits, or None if ``is_replaced``.

        For example, by ``module.bias = None``. Such an owner may get the parameter back.
        """
        if local_tensor(self.dtensor) is not self._local:
            return None
        removed = 0
        # A plain loop: this is part of a guard that every compiled call runs for each parameter.
        for i, (ref, name) in enumerate(self._owners):
            if (module := ref()) is None:
                continue
            held: object = parameters_of(module).get(name)
            if held is not self.dtensor:
                if held is not None:
                    return None
                removed |= 1 << i
        return removed

    def sync(self) -> bool:
        """Copy the DTensor's ``requires_grad`` to the shard; return False if it differed.

        Raises:
            BackendError: the DTensor or its storage was replaced, or is not fully initialized.
        """
        if self.is_replaced():
            raise BackendError(
                f"parameter {self.fqn!r} was replaced after sharding, so training would not update "
                "it: load full values with load_state_dict, copy_ a DTensor into it, or replace it "
                "before sharding. " + FUNCTIONAL_CALL
            )
        return self.sync_unreplaced()

    def sync_unreplaced(self) -> bool:
        """Do as ``sync``, but without checking that neither DTensor nor storage was replaced."""
        if self._uninitialized:
            self._check_initialized()
        return self.sync_requires_grad()

    def sync_requires_grad(self) -> bool:
        """Copy the DTensor's ``requires_grad`` to the shard and the stand-ins of accumulators.

        Return False if the shard's differed.
        """
        required = self.dtensor.requires_grad
        if required == self.shard.requires_grad:
            return True
        for leaf in (self.shard, *self.stand_ins()):
            leaf.requires_grad_(required)
        if self.model.accumulates:
            self.refresh_accessors()
        return False

    def _check_initialized(self) -> None:
        assert self._local is not None, "it was marked"
        num_elements = num_uninitialized(self.spec.rows_first(self._local))
        if num_elements:
            raise BackendError(
                f"{num_elements} elements of parameter {self.fqn!r} were not initialized after "
                "to_empty(). Writes to some rows of a DTensor (p.data[i] = x, p[1:3].fill_(x)) "
                "are lost: fill the whole parameter, as in nn.init.normal_(p) or p.data = x"
            )
        self._uninitialized = False

    # --- gradients ---

    def gradient(self, padded_grad: torch.Tensor) -> torch.Tensor:
        """Return the DTensor's gradient, made from this rank's padded one and passed to its hooks.

        ``padded_grad`` is scaled in place if the divisor is not the size of the parameter's mesh.
        """
        param, num_ranks = self.dtensor, self.spec.groups.mesh.size()
        # By default, the number of ranks with different batches.
        factor = self.model.gradient_divide_factor or self.spec.groups.of_model.mesh.size()
        if factor != num_ranks:  # padded_grad is an average over the parameter's mesh
            padded_grad.mul_(num_ranks / factor)
        grad: torch.Tensor = dtensor_like(self.spec.local_view(padded_grad), param)
        for hook in gradient_hooks(param):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    def accumulate_grad(self, padded_grad: torch.Tensor) -> None:
        """Accumulate this rank's padded gradient into the DTensor, and run the DTensor's hooks.

        Totals taken in this backward are part of the gradient, so they are dropped.
        """
        param, grad = self.dtensor, self.gradient(padded_grad)
        if param.grad is None:
            param.grad = grad
        else:
            with torch.no_grad():
                param.grad.add_(grad)
        self.drop_taken()  # the hooks below may raise, but the parameter has the totals
        for hook_after in post_accumulate_hooks(param):
            hook_after(param)
        step_in_backward(param)

    # --- unreduced gradients of microbatches: see [Note: unreduced gradients] ---

    @property
    def grad_destination(self) -> str | None:
        """Name of the accumulator for gradients, or None if they are reduced or not required."""
        if not self.dtensor.requires_grad:
            return None
        if not self.syncs:
            return UNSYNCED
        has_replicas = self.spec.rows is not None and self.spec.groups.replicas is not None
        return PARTIAL if has_replicas and not self.all_reduces else None

    def marker_accumulators(self) -> dict[str, torch.Tensor]:
        """Return the stand-ins and keys for the marker, keyed by argument name.

        Marks the model as accumulating if gradients are not reduced or not averaged over replicas.
        """
        destination = self.grad_destination
        if destination is not None:
            _accumulating.setdefault(self.model)
        if not self.dtensor.requires_grad:
            return {}
        pending = {}
        if destination != UNSYNCED:
            keys = {name: self.accumulator_key(name) for name in ACCUMULATOR_NAMES}
            pending = {name: key for name, key in keys.items() if key is not None}
        if destination is not None:
            stand_in = pending[destination] = self.accumulator(destination).stand_in
            if not stand_in.requires_grad:  # the shard is not in sync yet
                stand_in.requires_grad_()
        return pending

    def accumulator(self, name: str) -> Accumulator:
        """Return the accumulator ``name``, created if needed, in the dtype of reductions."""
        used = used_dtype(self.shard, self.spec.dtype)
        reduced = self.spec.reduce_dtype if used.is_floating_point else None
        dtype, device = reduced or used, self.spec.groups.device
        known = self._accumulators.get(name)
        if known is not None and (known.stand_in.dtype, known.stand_in.device) == (dtype, device):
            return known
        shape = self.spec.unsharded_shape if name == UNSYNCED else self.spec.padded_shape
        accumulator = self._accumulators[name] = Accumulator(shape, dtype, device)
        # Weak, because Python's garbage collector cannot see references from hooks of tensors.
        on_accumulated = weakref.WeakMethod(self._on_accumulated)
        accumulator.stand_in.register_post_accumulate_grad_hook(
            functools.partial(_call_if_alive, on_accumulated, name)
        )
        if known is not None and known.total is not None:  # the dtype or the device has changed
            accumulator.add(known.total)
        return accumulator

    def accumulate(self, name: str, grad: torch.Tensor | None) -> None:
        """Add a gradient that eager code has computed, if any, to accumulator ``name``."""
        if grad is None:
            _accumulating.setdefault(self.model)  # other ranks may have one: all must reduce it
            return
        self.accumulator(name).add(grad)
        self._on_accumulated(name, grad)

    @run_with_callees_as_python
    def _on_accumulated(self, name: str, _: torch.Tensor) -> None:
        # Since the forward, another backward may have reduced all totals.
        _accumulating.setdefault(self.model)
        if name == PARTIAL and UNSYNCED in self._accumulators:
            # The full gradients that were reduced to this shard may include the unsynced total.
            self._accumulators[UNSYNCED].drop_taken()
        if self.grad_destination is None:  # gradients are reduced again: pass the key from now on
            self.refresh_accessors()

    def accumulator_key(self, name: str) -> torch.Tensor | None:
        """Return the key of accumulator ``name``, or None if it has no total to reduce."""
        accumulator = self._accumulators.get(name)
        return None if accumulator is None or accumulator.total is None else accumulator.key

    def stand_ins(self) -> list[torch.Tensor]:
        """Return the leaves that may get gradients instead of the shard."""
        return [accumulator.stand_in for accumulator in self._accumulators.values()]

    def unreduced_totals(self) -> list[torch.Tensor]:
        totals = [accumulator.total for accumulator in self._accumulators.values()]
        return [total for total in totals if total is not None]

    def drop_taken(self) -> None:
        for accumulator in self._accumulators.values():
            accumulator.drop_taken()

    def reduce_accumulated(self, *, unsynced: bool) -> None:
        """Reduce accumulated gradients of a parameter that got none in the last backward.

        All ranks must call this; a rank without a total contributes zeros.

        Args:
            unsynced: whether to reduce the unsynced total, and any partial total with it, instead
                of averaging only the partial total over replicas.
        """
        spec, dtype = self.spec, self.shard.dtype
        accumulator = self.accumulator(UNSYNCED if unsynced else PARTIAL)
        total = accumulator.take()
        if total is None:  # only other ranks have one
            stand_in = accumulator.stand_in
            total = torch.zeros_like(stand_in, memory_format=torch.contiguous_format)
        if unsynced:  # full gradients
            grad = spec.reduce(total, dtype, self.accumulator_key(PARTIAL))
        else:
            grad = spec.average_over_replicas(total, dtype)
        self.accumulate_grad(grad)


def sharded_param_of(tensor: object) -> ShardedParam | None:
    """Return the sharded parameter of a shard or a sharded DTensor, or None for other objects."""
    return getattr(tensor, SHARDED_PARAM, None)


def user_attributes(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on a parameter."""
    return {name: v for name, v in attributes_of(param).items() if name != SHARDED_PARAM}


def is_offloaded(param: object) -> bool:
    """Return whether the shard of ``param`` is kept in host memory."""
    sharded_param = sharded_param_of(param)
    return sharded_param is not None and sharded_param.spec.host_memory is not None


def owned_by(module: nn.Module, name: str) -> ShardedParam | None:
    """Return the sharded parameter whose shard ``module`` holds for ``name``, or None."""
    return sharded_param_of(module.__dict__.get(shard_attribute(name)))


def has_replacement(module: nn.Module, name: str) -> bool:
    """Return whether parameter ``name`` is a DTensor whose shard ``module`` does not hold yet.

    The user may have made the DTensor, or put back the one that another had replaced.
    """
    param, owned = parameters_of(module).get(name), owned_by(module, name)
    is_dtensor = isinstance(param, DTensor)
    return is_dtensor and owned is not None and sharded_param_of(param) is not owned


def refresh_accessors(module: nn.Module) -> None:
    """Rebuild ``module``'s accessors, if any, for its current sync flags and accumulators."""
    refresh = getattr(type(module), "_graphshard_refresh_accessors", None)
    if refresh is not None:
        refresh(module)


def in_sync(removed: int | None, shard: torch.Tensor) -> bool:
    """Sync ``shard`` with its DTensor; return False if the DTensor or its storage was replaced.

    Also return False unless just the owners in ``removed`` have removed the parameter. A guard on
    every shard: Dynamo calls this to decide whether a compiled graph may be used.
    """
    sharded_param = sharded_param_of(shard)
    if sharded_param is None or (now := sharded_param.removed()) is None or now != removed:
        return False  # Dynamo tries another graph, or calls the backend
    # Dynamo compares the shard's requires_grad only after this guard: if the user flipped the
    # DTensor's back and forth, the shard now agrees, and the earlier graph is used again.
    sharded_param.sync_unreplaced()
    return True


@run_with_callees_as_python
def _on_shard_gradient(shard: torch.Tensor) -> None:
    sharded_param, grad = sharded_param_of(shard), shard.grad
    assert sharded_param is not None
    if grad is None:  # autograd may run the hook without a gradient
        return
    shard.grad = None  # users see the DTensor's gradient
    sharded_param.model.raise_if_changed()
    sharded_param.model.warn_of_breaks()
    sharded_param.accumulate_grad(grad)
    if _accumulating:
        on_backward_success(_ReduceLeftovers(sharded_param.spec.groups.ranks_of_model))


@run_with_callees_as_python
def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    alive = method()
    if alive is not None:
        alive(*args)


@dataclass(frozen=True)
class _ReduceLeftovers:
    """Callback for the end of a backward of a model that ``ranks`` train."""

    ranks: frozenset[int]

    def __call__(self) -> None:
        reduce_all_leftovers(self.ranks)


def reduce_all_leftovers(ranks: frozenset[int] | None = None) -> None:
    """Reduce accumulated gradients of all models, except where they are to accumulate further.

    Args:
        ranks: global ranks that call this, or None if all do. Models that other ranks train, too,
            are skipped.
    """
    for model in list(_accumulating):
        if ranks is not None and model.ranks() - ranks:
            continue
        model.reduce_leftovers()
        del _accumulating[model]
        for sharded_param in model.sharded_params:
            sharded_param.refresh_accessors()  # adds the model again if gradients still accumulate


def find_unreduced(params: Iterable[torch.Tensor]) -> str | None:
    """Return the FQN of a parameter with a total that was to be reduced, but was not, or None.

    Totals of parameters whose gradients are to accumulate further do not count.
    """
    if not _accumulating:  # the usual case: keep optimizer steps fast
        return None
    for sharded_param in filter(None, map(sharded_param_of, params)):
        is_due = sharded_param.dtensor.requires_grad and sharded_param.grad_destination is None
        if is_due and sharded_param.unreduced_totals():
            return sharded_param.fqn
    return None


def forget_abandoned_models() -> None:
    """Drop the accumulated gradients of models to which only reference cycles refer."""
    # Otherwise, the next backward reduces them only on ranks whose garbage collector has not run.
    if _accumulating:
        gc.collect()


# --- the model of a parameter --------------------------------------------------------------------


@dataclass(eq=False)
class ShardedModel:
    """State shared by all modules and sharded parameters of one model.

    Attributes:
        name: class name of the root module.
        options: options passed when sharding.
        warned_of_options: whether the user was warned that a backend's options are ignored.
        breaks: graph breaks, as ``file:line: reason``, without the line if it is unknown.
        eager_classes: ordered names of module classes whose forward ran outside a graph while
            parts of the model were compiled.
        warned: whether ``warn_of_breaks`` has warned the user.
        compiled: whether a graph was compiled for this model, rather than for an identical one.
        reads_eagerly: whether any parameter was read outside of graphs.
        trains_eagerly: whether any gradient was computed outside of graphs.
        gathered_bytes: largest planned size of the unsharded parameters that are alive at once, in
            bytes, over all graphs that have run for this model.
        padding: description of notable padding with a remedy, or "".
        changed_in_place: FQN of a parameter whose full copy an eager forward changed, or None.
        gradient_divide_factor: divisor of summed gradients, or None for the number of ranks with
            different batches.
    """

    name: str
    options: Options
    warned_of_options: bool = False
    breaks: list[str] = field(default_factory=list)
    eager_classes: dict[str, None] = field(default_factory=dict)
    warned: bool = False
    sharded_params: weakref.WeakSet[ShardedParam] = field(default_factory=weakref.WeakSet)
    compiled: bool = False
    reads_eagerly: bool = False
    trains_eagerly: bool = False
    gathered_bytes: int = 0
    padding: str = ""
    changed_in_place: str | None = None
    gradient_divide_factor: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        # Copied parameters register themselves.
        divide_factor = self.gradient_divide_factor
        return ShardedModel(self.name, self.options, gradient_divide_factor=divide_factor)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"a module of {self.name}")

    def raise_if_changed(self) -> None:
        fqn, self.changed_in_place = self.changed_in_place, None
        if fqn is not None:
            raise BackendError(changed_in_place(fqn))

    @property
    def accumulates(self) -> bool:
        """Whether gradients accumulate, or accumulated ones may be left to reduce."""
        return self in _accumulating

    def ranks(self) -> frozenset[int]:
        """Return the global ranks that train this model."""
        of_any = next(iter(self.sharded_params), None)
        return frozenset() if of_any is None else of_any.spec.groups.ranks_of_model

    def reduce_leftovers(self) -> None:
        """Reduce accumulated gradients of parameters without a gradient in the last backward."""
        reducible = [p for p in self.sharded_params if p.is_owned() and p.grad_destination is None]
        # Untied weights share an FQN.
        reducible.sort(key=lambda sharded_param: (sharded_param.fqn, sharded_param._number))
        if not reducible:
            return
        with eager_reduction(reducible[0].spec.groups, reducible[0].fqn):
            for sharded_param, pending in zip(reducible, self._pending_on_any_rank(reducible)):
                if any(pending):
                    sharded_param.reduce_accumulated(unsynced=bool(pending[0]))

    def _pending_on_any_rank(self, sharded_params: list[ShardedParam]) -> list[tuple[int, int]]:
        """Return, per parameter, whether each of its two accumulators must be reduced."""
        pending: list[int] = [
            sharded_param.accumulator_key(name) is not None
            for sharded_param in sharded_params
            for name in ACCUMULATOR_NAMES
        ]
        if self.reads_eagerly:
            # Eager code may compute gradients of different parameters on each rank.
            pending = max_over_ranks(pending, sharded_params[0].spec.groups.all_ranks)
        return list(zip(pending[::2], pending[1::2]))

    def warn_of_other_options(self, options: Options) -> None:
        ignored = options.differences_from(self.options)
        if ignored and not self.warned_of_options:
            self.warned_of_options = True
            warnings.warn(
                f"graphshard: the backend ignores its {', '.join(ignored)}: {self.name} was "
                "already sharded with different arguments. Pass the same arguments to "
                "graphshard.shard and graphshard.backend",
                stacklevel=2,
            )

    def warn_of_breaks(self) -> None:
        # Called in backward, when forward has reached all its graph breaks.
        broken = bool(self.breaks or self.eager_classes)
        if self.warned or not (broken or (self.trains_eagerly and not self.compiled)):
            return
        self.warned = True
        what, after = "is not compiled", f"\n  {_WHY_NOT_COMPILED}"
        if broken:
            lines = self.breaks or [
                f"forward of {', '.join(self.eager_classes)} runs outside of a graph",
                *graph_break_reasons(),
            ]
            what = "does not compile to one graph"
            after = "\n  " + "\n  ".join(lines) + "\nTORCH_LOGS=graph_breaks shows details."
        warnings.warn(
            f"graphshard: {self.name} {what}:{after}\nTraining is correct, but eager parts gather "
            "their parameters without overlap or fp8, and keep them until backward.",
            stacklevel=2,
        )


def join_model(module: nn.Module, model: ShardedModel) -> None:
    """Record which sharded model ``module`` is part of, even if it owns no parameters."""
    module.__dict__[_MODEL] = model


def sharded_model_of(module: nn.Module) -> ShardedModel | None:
    """Return the sharded model that ``module`` is part of, or None."""
    return module.__dict__.get(_MODEL)
