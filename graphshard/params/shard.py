"""Shard a module's parameters in place.

Before any parameter is sharded, one reduction compares the modules and options of all ranks, and
checks whether any rank has an error. Then, one parameter at a time, values are broadcast and split,
and the full copy is freed: peak memory is the full model plus one parameter. A full copy that a
forward may have used stays alive until its backward.

    find_plain_params ─► PlainParam of each parameter       plain_params.py
    find_error        ─► its ParamSpec, or an error         checks.py, param_spec.py
    full parameter    ─► ParamSpec.padded_shard ─► ShardedParam.attach: the shard that graphs use,
                         and a DTensor whose local tensor is a view of it       sharded_param.py
    install           ─► the class that reads it by a marker op                 module_class.py
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch.autograd import (
    drop_hooks,
    extend_backward_inputs,
    has_live_graph,
    is_held_by_torch,
    share_hooks,
    take_gradient,
)
from .._torch.distributed import process_group
from .._torch.dtensor import (
    fix_deepcopy,
    local_tensor,
    on_data_assigned,
    set_local_tensor,
    values_on_rank,
)
from .._torch.dynamo import run_with_callees_as_python
from .._torch.nn import (
    after_unscaling,
    before_loading_optimizers,
    outside_inference_mode,
    parameters_of,
)
from ..errors import BackendError
from ..ops.float8_math import is_of_torchao
from ..options.options import Options
from ..ranks.agree import first_text, raise_if_different
from .broadcast import broadcast_from_first_rank
from .checks import find_error, find_groups
from .full_tensor import as_bytes
from .loading import prepare_optimizer_state, shard_state
from .mesh import MeshGroups, call_log_of_mesh, eager_reduction
from .mixed_precision import cast_at_boundary, find_cast_boundaries
from .module_class import ShardedModule, adopt, install
from .padding import padding_advice
from .pickling import require_collective_save
from .plain_params import (
    REPLACED,
    PlainParam,
    find_plain_params,
    live_optimizers,
    note_ignored,
)
from .save_pretrained import has_save_pretrained
from .sharded_param import (
    ShardedModel,
    ShardedParam,
    forget_abandoned_models,
    has_replacement,
    join_model,
    sharded_model_of,
    sharded_param_of,
)
from .stale import (
    WHY_INTERRUPTED,
    InterruptedDTensor,
    InterruptedParameter,
    StaleDTensor,
    StaleParameter,
    unusable_if_interrupted,
)
from .torch_calls import (
    assign_data,
    gradient_of,
    leaves_of,
    refuse_split_backward,
    share_found_infs,
)
from .trained_module import is_first_rank

_ARGUMENTS = "arguments of graphshard"

# Parts of a tensor's description, in this order, and advice if only some ranks have the part.
_ADVICE = {
    " on meta": (
        "Create the model on the meta device on all ranks, or on none; to load weights that only "
        "one rank has, use load_full_state_dict after materialize or to_empty"
    ),
    " requires_grad": (
        "Freeze the same parameters on all ranks: does only one rank load or freeze them?"
    ),
    " with a gradient": (
        "Call zero_grad() on all ranks first, or on none: did only one run a backward?"
    ),
}


def shard_module(
    root: nn.Module,
    mesh: DeviceMesh,
    options: Options,
    ignored: Set[nn.Parameter],
    *,
    in_use: bool,
    allow_meta: bool,
) -> None:
    """Shard the parameters of ``root`` in place, except ignored and already sharded ones.

    Args:
        in_use: whether a running forward may already hold full parameters. If so, they stay alive
            until the backward of that forward, and their gradients go to the shards.
        allow_meta: whether to accept a module on the meta device, which is sharded there.

    Raises:
        BackendError: on every rank, if one cannot shard its module; if modules or options differ;
            or if values that a forward may have used differ; on this rank, if an earlier call was
            interrupted.
    """
    if any(type(p) in (InterruptedParameter, InterruptedDTensor) for p in root.parameters()):
        raise BackendError(f"{type(root).__name__} cannot be sharded: {WHY_INTERRUPTED}")
    has_replacements = take_replacements(root)
    plain_params = find_plain_params(root, ignored)
    if has_replacements and not plain_params:
        note_ignored(root, ignored)
        return
    forget_abandoned_models()
    groups = find_groups(root, plain_params, mesh, options)
    error = find_error(root, plain_params, groups, options, allow_meta=allow_meta)
    _check_same_shards(root, plain_params, groups, options, error=error)
    note_ignored(root, ignored)
    # Sorted by name: ranks may have registered parameters in different orders.
    by_name = sorted(plain_params, key=lambda plain: plain.fqn)
    for own in dict.fromkeys([groups, *(plain.spec.groups for plain in by_name)]):
        call_log_of_mesh(own)  # starts the log's watcher thread before any compile
        require_collective_save(own)
    _warn_of_torchao(root)
    model = ShardedModel(type(root).__name__, options)
    for earlier in filter(None, map(sharded_param_of, root.parameters())):
        model.gradient_divide_factor = earlier.model.gradient_divide_factor
    with torch.no_grad(), outside_inference_mode():
        on_meta = any(plain.param.is_meta for plain in plain_params)
        syncs = options.sync_module_states and not on_meta
        # Like a running forward, an autograd graph may have saved the full parameter.
        used = {p.param for p in plain_params if in_use or has_live_graph(p.param)}
        if syncs and first_text("used" if used else None, groups.all_ranks):
            _raise_if_used_unequal(root, plain_params, groups)
        if any(plain.spec.host_memory is not None for plain in plain_params):
            move_buffers(root, groups.device)
        if syncs:
            for _, buffer in sorted(_new_buffers(root).items()):
                broadcast_from_first_rank(buffer, groups)
        sharded_params: dict[nn.Parameter, ShardedParam] = {}
        with unusable_if_interrupted(sharded_params):
            _shard_parameters(by_name, model, used, sharded_params, syncs=syncs)
            _install(root, plain_params, sharded_params, model)
            _repoint_optimizers(sharded_params)
        on_data_assigned(assign_data)
        before_loading_optimizers(prepare_optimizer_state)
        extend_backward_inputs(leaves_of, gradient_of, refuse_split_backward)
        after_unscaling(share_found_infs)
        fix_deepcopy()
        for param in sharded_params:
            if in_use:
                vars(param)[REPLACED] = True
            else:
                stale: Any = StaleDTensor if isinstance(param, DTensor) else StaleParameter
                param.__class__ = stale
    model.padding = padding_advice(
        {p.spec: p.shard.element_size() for p in sharded_params.values()}
    )
    if model.padding and is_first_rank(groups):
        warnings.warn(f"graphshard: {model.padding}", stacklevel=2)


def _check_same_shards(
    root: nn.Module,
    plain_params: Sequence[PlainParam],
    groups: MeshGroups,
    options: Options,
    *,
    error: str | None,
) -> None:
    """Raise on all ranks if one has an ``error``, or if modules or options differ between ranks."""
    descriptions = {_ARGUMENTS: options.fingerprint()}
    if error is None:
        descriptions |= {
            p.fqn: _describe(p.param) + (p.spec.float8_recipe or "") for p in plain_params
        }
        descriptions |= {name: _describe(buffer) for name, buffer in root.named_buffers()}
    raise_if_different(descriptions, groups.all_ranks, _advice, error=error)  # one reduction


def _advice(name: str, ours: str, theirs: str) -> str:
    if name == _ARGUMENTS:
        return "Pass the same values on all ranks: does one depend on the rank or a local file?"
    for part, advice in _ADVICE.items():
        if ours.replace(part, "") == theirs.replace(part, ""):
            return advice
    return "Build the same model on all ranks: does its code or config depend on the rank?"


def _describe(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if isinstance(tensor, DTensor):
        text += f" {tensor.placements}"
    holds = (tensor.is_meta, tensor.requires_grad, tensor.grad is not None)
    return text + "".join(part for part, is_true in zip(_ADVICE, holds, strict=True) if is_true)


def _raise_if_used_unequal(
    root: nn.Module, plain_params: Sequence[PlainParam], groups: MeshGroups
) -> None:
    # A running forward may have used the values, so making them equal now would be too late.
    tensors = {plain.fqn: plain.param for plain in plain_params} | _new_buffers(root)
    own = {plain.fqn: plain.spec.groups for plain in plain_params}
    unequal = [n for n in sorted(tensors) if _is_unequal(tensors[n], own.get(n, groups))]
    rank = dist.get_rank(process_group(groups.all_ranks))
    what = f"{unequal[0]!r} of rank {rank} of the mesh" if unequal else None
    if (what := first_text(what, groups.all_ranks)) is not None:
        raise BackendError(
            f"{what} differs from the first rank's, and the first forward of "
            f"{type(root).__name__} may have used it before sync_module_states could make it "
            "equal: call graphshard.shard(model, ...) before the first step, or use the same seed "
            "on all ranks"
        )


def _new_buffers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of modules that are not sharded yet, keyed by name.

    Buffers of sharded modules may differ between ranks, because each rank updates its own.
    """
    sharded = (module for module in root.modules() if sharded_model_of(module) is not None)
    old = {id(buffer) for module in sharded for buffer in module.buffers(recurse=False)}
    return {name: buffer for name, buffer in root.named_buffers() if id(buffer) not in old}


def _is_unequal(tensor: torch.Tensor, groups: MeshGroups) -> bool:
    own = values_on_rank(tensor).detach()
    first = tensor.detach().clone(memory_format=torch.contiguous_format)
    broadcast_from_first_rank(first, groups)
    equal = torch.equal(as_bytes(own.contiguous()), as_bytes(values_on_rank(first)))
    return not equal  # bytes are compared, because NaNs are unequal


def _warn_of_torchao(root: nn.Module) -> None:
    names = [name for name, module in root.named_modules() if is_of_torchao(module)]
    if names:
        others = f" and {len(names) - 1} more" if names[1:] else ""
        warnings.warn(
            f"graphshard: torchao has converted {names[0]!r}{others}: such modules compute in fp8, "
            "but their weights are gathered in a wider dtype. For fp8 all-gathers, pass the plain "
            "module and fp8=graphshard.Float8Policy()",
            stacklevel=2,
        )


def take_replacements(root: nn.Module) -> bool:
    """Attach shards to DTensors that users assigned to modules; return whether there were any."""
    replaced = [
        module
        for module in root.modules()
        if isinstance(module, ShardedModule)
        and any(has_replacement(module, name) for name in parameters_of(module))
    ]
    for module in replaced:
        module._graphshard_on_replacement()
    added = [
        adopt(module, name)
        for module in root.modules()
        for name, param in list(parameters_of(module).items())
        if sharded_param_of(param) is not None
    ]
    return bool(replaced) or any(added)


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move buffers to ``device``, as FSDP2 does: an offloaded model may be on the host."""
    for buffer in root.buffers():
        if not buffer.is_meta and not isinstance(buffer, DTensor):  # a DTensor is there already
            buffer.data = buffer.to(device)


def _shard_parameters(
    plain_params: Sequence[PlainParam],
    model: ShardedModel,
    used: Collection[nn.Parameter],
    sharded_params: dict[nn.Parameter, ShardedParam],
    *,
    syncs: bool,
) -> None:
    """Shard all parameters, and add each to ``sharded_params`` before its full value is freed."""
    for plain in plain_params:
        _ = plain.spec.regather_group  # may create a process group
        if syncs:
            broadcast_from_first_rank(plain.param, plain.spec.groups)
        sharded_param = sharded_params[plain.param] = _shard_parameter(plain, model)
        if plain.param in used:
            _hand_over_grads(plain.param, sharded_param)
        elif not is_held_by_torch(plain.param):
            # ``has_live_graph`` misses graphs that have saved a frozen parameter.
            _free(plain.param)


def _free(param: nn.Parameter) -> None:
    # Free the memory now, because a running trace may still refer to the parameter.
    if isinstance(param, DTensor):
        set_local_tensor(param, local_tensor(param).detach().new_empty(0))
    else:
        # Torch refuses normal data for a parameter that was created in inference mode.
        with torch.inference_mode(param.is_inference()):
            param.data = param.data.new_empty(0)


def _shard_parameter(plain: PlainParam, model: ShardedModel) -> ShardedParam:
    old, spec = plain.param, plain.spec
    new = nn.Parameter(spec.dtensor(spec.padded_shard(old)), requires_grad=old.requires_grad)
    assert isinstance(new, DTensor)
    new.__dict__.update(old.__dict__)  # attributes that users set
    sharded_param = ShardedParam(spec, model)
    sharded_param.attach(new)
    if old.grad is not None:
        _accumulate_full_grad(sharded_param, old.grad)
        old.grad = None
    share_hooks(old, new)  # last: the hooks have already run on an existing gradient
    return sharded_param


def _hand_over_grads(old: nn.Parameter, sharded_param: ShardedParam) -> None:
    drop_hooks(old)  # they run on the shard's gradients instead
    if not old.requires_grad:
        return

    @run_with_callees_as_python
    def hand_over(full: torch.Tensor) -> None:
        grad = take_gradient(full)
        assert grad is not None
        with eager_reduction(sharded_param.spec.groups, sharded_param.fqn):
            _accumulate_full_grad(sharded_param, grad)

    # Autograd graphs that still hold the full parameter accumulate into it.
    old.register_post_accumulate_grad_hook(hand_over)


def _accumulate_full_grad(sharded_param: ShardedParam, grad: torch.Tensor) -> None:
    """Average a full gradient over the parameter's mesh, and accumulate this rank's part."""
    spec = sharded_param.spec
    group = process_group(spec.groups.data_ranks)
    own = spec.unsharded(grad.to_dense() if grad.is_sparse else grad)
    mean = own.to(spec.groups.device).contiguous() / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    sharded_param.accumulate_grad(spec.padded_shard_of(mean))


def _install(
    root: nn.Module,
    plain_params: Sequence[PlainParam],
    sharded_params: Mapping[nn.Parameter, ShardedParam],
    model: ShardedModel,
) -> None:
    by_module: dict[nn.Module, dict[str, ShardedParam]] = {root: {}}
    # Modules with save_pretrained need it wrapped, even if only their submodules own parameters.
    by_module |= {m: {} for m in root.modules() if has_save_pretrained(type(m))}
    for plain in plain_params:
        for module, name in plain.holders:
            by_module.setdefault(module, {})[name] = sharded_params[plain.param]
    # Modules that were sharded earlier keep their policy.
    boundaries = [
        (module, policy)
        for module, policy in find_cast_boundaries(root, model.options)
        if sharded_model_of(module) is None
    ]
    for module in root.modules():
        join_model(module, model)
    # An attribute of plain modules, but a property of sharded ones.
    ddp_flag = root.__dict__.pop("require_backward_grad_sync", None)
    for module, by_name in by_module.items():
        install(module, by_name, model)
    if ddp_flag is not None:
        root.require_backward_grad_sync = ddp_flag
    for module, policy in boundaries:
        cast_at_boundary(module, policy)


def repoint_param_groups(new: Mapping[nn.Parameter, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Replace parameters in the param groups of all live optimizers; return the optimizers."""
    optimizers = list(live_optimizers())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(param, param) for param in group["params"]]
    return optimizers


def _repoint_optimizers(sharded_params: Mapping[nn.Parameter, ShardedParam]) -> None:
    dtensors = {old: sharded_param.dtensor for old, sharded_param in sharded_params.items()}
    for optimizer in repoint_param_groups(dtensors):
        for old, sharded_param in sharded_params.items():
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[sharded_param.dtensor] = shard_state(state, sharded_param.spec)
