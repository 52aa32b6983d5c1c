"""Full parameters for the parts of a forward that run outside of any graph.

Eager code may read different parameters on each rank, depending on its data (mixture-of-experts
routing, a loop over ``index.unique()``), so parameters cannot be gathered one by one. The unit is
the module, as in FSDP2's ``fully_shard(module)``: the first read gathers all of its parameters,
later reads in the same call get the same tensors, and one backward reduces all their gradients:

    call of the module    shards ──► _Unshard ──► full parameters ──► read, read, ...
    backward              their gradients ◄── _Unshard ◄── sum over all reads, None if not read

Ranks must still run the same modules. Full parameters are stored in the call's scope: see
[Note: call scope] in ``graphshard._torch.frames``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from .._torch.as_parameter import HOOK_METHODS, GatheredParameter
from .._torch.autograd import address_of, version_of
from .._torch.distributed import process_group
from .._torch.dynamo import run_with_callees_as_python
from .._torch.frames import call_scope
from .._torch.nn import NoticesReplacement
from .._torch.tensors import FakeTensor, without_torch_function
from ..errors import BackendError
from ..ops.accumulators import PARTIAL, UNSYNCED
from ..ops.bucket_copy import add_accumulated
from ..ops.marker_specs import used_dtype
from .mesh import eager_gather, eager_reduction
from .param_spec import reader
from .sharded_param import (
    ShardedParam,
    has_replacement,
    owned_by,
    sharded_model_of,
    sharded_param_of,
    user_attributes,
)

_R = TypeVar("_R")


class _Read(NamedTuple):
    """Key of a full parameter in a call's scope."""

    param: ShardedParam
    in_inference_mode: bool
    version: int  # version of the shard: after a change, it is gathered again


def full_parameters(module: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
    """Return a module's full parameters by name, or None outside of forwards and compiled calls.

    Outside of inference mode, they are differentiable unless frozen. This is a collective if the
    call in progress has not gathered all of them yet.

    Raises:
        BackendError: a full parameter was changed in place, or a shard was lost, replaced or not
            initialized.
    """
    model = sharded_model_of(module)

    def is_of_model(called: nn.Module) -> bool:
        other = sharded_model_of(called)
        # Models may share a module, or hold a copy of another's.
        return other is model or (
            other is not None and any(part is module for part in called.modules())
        )

    scope = call_scope(is_of_model)
    if scope is None:
        return None
    if any(has_replacement(module, name) for name in names):
        cast(NoticesReplacement, module)._graphshard_on_replacement()
    reads: dict[str, _Read] = {}
    for name in names:
        param = _sharded(module, name)
        param.sync()
        param.model.reads_eagerly = True
        reads[name] = _Read(param, torch.is_inference_mode_enabled(), version_of(param.dtensor))
    # A tied parameter may have been gathered for another module already.
    missing = [read.param for read in dict.fromkeys(reads.values()) if read not in scope]
    if missing:
        gathered = _gather(missing)
        scope.update((read, gathered) for read in reads.values() if read.param in gathered.full)
    for group in {value for value in scope.values() if isinstance(value, _Gathered)}:
        group.note_changes()
    for read in reads.values():
        read.param.model.raise_if_changed()
    return {name: scope[read].full[read.param] for name, read in reads.items()}


def with_parameters_returned(
    compiled: Callable[..., _R], returned: Mapping[int, int]
) -> Callable[..., _R]:
    """Wrap a compiled graph so that the parameters it returns look like those read eagerly.

    A graph returns a parameter if code after a graph break uses it. Eager code in the same call
    still gathers the parameter again: ranks that read other parameters must do the same.

    Args:
        returned: position of each output that is a full parameter, and of the input that is its
            shard.
    """
    if not returned:
        return compiled

    def run(*args: object) -> _R:
        outputs: Any = compiled(*args)
        full: dict[ShardedParam, torch.Tensor] = {}
        for i, shard in returned.items():
            param = sharded_param_of(args[shard])
            # In a forecast, outputs are fake.
            if param is not None and not isinstance(outputs[i], FakeTensor):
                full[param] = _with_attributes(param, outputs[i])
        models = {param.model for param in full}
        scope = call_scope(lambda called: sharded_model_of(called) in models) if full else None
        if scope is not None:
            gathered = _Gathered(full, list(full.values()))
            scope[gathered] = gathered  # notices changes until the call ends
        return cast(_R, outputs)

    return run


def _gather(sharded_params: Sequence[ShardedParam]) -> _Gathered:
    shards = [param.shard for param in sharded_params]
    # A tensor read under no_grad may be used outside of it. A user's function mode must not
    # change it.
    with torch.enable_grad(), without_torch_function():
        tensors = _Unshard.apply(sharded_params, *shards)
        full = {p: _as_read(p, tensor) for p, tensor in zip(sharded_params, tensors)}
    return _Gathered(full, tensors)


class _Gathered:
    """Parameters gathered together in one call; changing one in place is an error."""

    def __init__(
        self, full: Mapping[ShardedParam, torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        self.full, self._tensors = full, tensors
        self._states = self._read_states()

    # In-place ops on ``tensor.data`` go undetected: they do not change the version of ``tensor``.
    def _read_states(self) -> list[tuple[int, int]]:
        # An in-place change of a DTensor increments its own version, not its local tensor's.
        pairs = zip(self.full.values(), self._tensors)
        return [(version_of(full), address_of(tensor)) for full, tensor in pairs]

    def note_changes(self) -> None:
        now = self._read_states()
        for sharded_param, before, after in zip(self.full, self._states, now):
            if before != after:
                sharded_param.model.changed_in_place = sharded_param.fqn

    @torch.compiler.disable  # may run while Dynamo traces user code
    def __del__(self) -> None:
        self.note_changes()  # the call is over; the next read or backward raises the error


def _as_read(sharded_param: ShardedParam, rows: torch.Tensor) -> torch.Tensor:
    spec = sharded_param.spec
    return _with_attributes(sharded_param, reader(spec.dim, spec.tensor_parallel)(rows))


def _with_attributes(sharded_param: ShardedParam, value: torch.Tensor) -> torch.Tensor:
    """Make ``value`` look like the parameter whose full values it holds, and return it."""
    if sharded_param.spec.tensor_parallel is None:
        value.__class__ = GatheredParameter
    dtensor = sharded_param.dtensor
    # A hook on the copy would get the gradient of one read on this rank, if any.
    hooks = {name: getattr(dtensor, name) for name in HOOK_METHODS}
    vars(value).update(user_attributes(dtensor), **hooks)
    return value


def _sharded(module: nn.Module, name: str) -> ShardedParam:
    sharded_param = owned_by(module, name)
    if sharded_param is None:
        raise BackendError(
            f"parameter {name!r} of a {type(module).__name__} has no shard, because the module "
            "was copied without copy.deepcopy: use copy.deepcopy"
        )
    return sharded_param


class _Unshard(torch.autograd.Function):
    """Autograd function that gathers a module's full parameters from their shards."""

    @staticmethod
    def forward(
        sharded_params: Sequence[ShardedParam], *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        groups, fqns = sharded_params[0].spec.groups, [param.fqn for param in sharded_params]
        with eager_gather(groups, fqns):
            return tuple(param.spec.unshard(shard) for param, shard in zip(sharded_params, shards))

    # Dynamo does not compile the inside of torch.func.jvp and similar transforms. They call this
    # function, and need a separate setup_context and a vmap rule.
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        sharded_params, *shards = inputs
        ctx.sharded_params = sharded_params
        # The accumulator that each gradient goes to, or None if it is reduced.
        ctx.destinations = [param.grad_destination for param in sharded_params]
        ctx.versions = [version_of(param.dtensor) for param in sharded_params]
        ctx.has_run = False  # whether a backward has run
        ctx.set_materialize_grads(False)
        frozen = [full for full, shard in zip(output, shards) if not shard.requires_grad]
        ctx.mark_non_differentiable(*frozen)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, sharded_params: Sequence[ShardedParam], *shards: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[None, ...]]:
        # Shards have no batch dim: gather once for the whole batch.
        return _Unshard.apply(sharded_params, *shards), (None,) * len(shards)

    @staticmethod
    @run_with_callees_as_python
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _refuse_kept(ctx, grads)
        first = ctx.sharded_params[0]
        first.model.trains_eagerly = True
        for sharded_param in ctx.sharded_params:
            sharded_param.sync_requires_grad()
        with eager_reduction(first.spec.groups, first.fqn):
            # The gradient of nn.Embedding(sparse=True) is sparse.
            dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
            return None, *_gradients_of_shards(ctx, dense)


def _refuse_kept(ctx: Any, grads: Sequence[torch.Tensor | None]) -> None:
    """Raise if a second backward reaches parameters that changed after they were gathered."""
    for sharded_param, version, grad in zip(ctx.sharded_params, ctx.versions, grads):
        # If the DTensor was replaced, the new one starts at version 0.
        has_changed = version_of(sharded_param.dtensor) > version
        if ctx.has_run and has_changed and grad is not None:
            raise BackendError(
                f"a second backward uses parameter {sharded_param.fqn!r} as an earlier forward "
                "read it, but it has changed since: read parameters in each forward, and keep "
                "none of them"
            )
    ctx.has_run = True


def _gradients_of_shards(
    ctx: Any, grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Reduce or accumulate full gradients; return None for shards that get no gradient now."""
    to_reduce = []
    for i, (sharded_param, grad) in enumerate(zip(ctx.sharded_params, grads)):
        if not (ctx.needs_input_grad[i + 1] and sharded_param.dtensor.requires_grad):
            continue
        if ctx.destinations[i] != UNSYNCED:
            to_reduce.append(i)
        else:
            sharded_param.accumulate(UNSYNCED, grad)
    used = _used_on_any_rank(
        [ctx.sharded_params[i] for i in to_reduce], [grads[i] for i in to_reduce]
    )
    result: list[torch.Tensor | None] = [None] * len(grads)
    for i, is_used in zip(to_reduce, used):
        if is_used:
            result[i] = _reduce(ctx.sharded_params[i], grads[i], ctx.destinations[i])
    return result


def _reduce(
    sharded_param: ShardedParam, grad: torch.Tensor | None, destination: str | None
) -> torch.Tensor | None:
    """Reduce a full gradient plus accumulated totals; return None if the result accumulates."""
    spec = sharded_param.spec
    if grad is None:  # only other ranks have a gradient
        dtype = used_dtype(sharded_param.shard, spec.dtype)
        grad = torch.zeros(spec.unsharded_shape, dtype=dtype, device=spec.groups.device)
    if (key := sharded_param.accumulator_key(UNSYNCED)) is not None:
        dtype = sharded_param.accumulator(UNSYNCED).stand_in.dtype
        grad = add_accumulated(grad, [key], [0], dtype)
    if destination == PARTIAL:
        sharded_param.accumulate(PARTIAL, spec.reduce_to_partial(grad))
        return None
    return spec.reduce(grad, sharded_param.shard.dtype, sharded_param.accumulator_key(PARTIAL))


def _used_on_any_rank(
    sharded_params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]
) -> list[bool]:
    """Return whether any rank has a gradient, for each parameter.

    This is a collective if there are two or more parameters.
    """
    used_here = [grad is not None for grad in grads]
    if len(sharded_params) <= 1:  # backward only runs if a gradient exists
        return used_here
    groups = sharded_params[0].spec.groups
    flags = torch.ones(len(sharded_params), dtype=torch.int32, device=groups.device)
    for i, used in enumerate(used_here):
        if not used:
            flags[i] = 0
    dist.all_reduce(flags, group=process_group(groups.all_ranks))
    # Only a rank that lacks a gradient waits for the device.
    return used_here if all(used_here) else [flag > 0 for flag in flags.tolist()]
