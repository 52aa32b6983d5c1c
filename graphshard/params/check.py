"""Check that a model can be sharded, and resolve the options of each parameter.

A check returns a fault as text instead of raising: other ranks may have none, and all ranks have to
raise together (``graphshard.params.agree``).
"""

from __future__ import annotations

import difflib
import gc
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._torch.nn import has_forward
from .._torch.tensors import is_traceable_wrapper_subclass
from ..ops.float8_math import device_fault, is_of_torchao
from ..options.float8_policy import check_fp8
from ..options.options import Options, matches
from .find import PlainParam, find_reduced_by_ddp, living
from .mesh_groups import MeshGroups
from .parametrization import fault_of_class, had_sharded, plain_class
from .sharded_param import FUNCTIONAL_CALL
from .shared_memory import fault_of_shared_memory

_OTHER_WRAPPERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, DataParallel)


def find_fault(
    root: nn.Module,
    plain_params: Sequence[PlainParam],
    mesh: DeviceMesh,
    options: Options,
    *,
    allow_meta: bool,
) -> str | None:
    """Return the first fault that keeps this rank from sharding ``root``, or None.

    Also sets ``options``, ``host_memory`` and ``float8`` of all ``plain_params``.
    """
    return (
        _fault_of_modules(root)
        or _fault_of_classes(root, plain_params)
        or _fault_of_parameters(plain_params, allow_meta)
        or fault_of_shared_memory(root, plain_params)
        or _fault_of_optimizers(plain_params)
        or _fault_of_ddp(plain_params)
        or _fault_of_overrides(root, plain_params, options)
        or _resolve_options(plain_params, mesh, options)
        or _fault_of_fp8(root, plain_params, mesh.device_type)
    )


def _fault_of_modules(root: nn.Module) -> str | None:
    for name, module in root.named_modules():
        wrapper = next((kind for kind in _OTHER_WRAPPERS if isinstance(module, kind)), None)
        if wrapper is not None:
            return (
                f"module {name or type(root).__name__!r} is already wrapped by "
                f"{wrapper.__name__}: give graphshard the plain module"
            )
    return None


def _fault_of_classes(root: nn.Module, plain_params: Sequence[PlainParam]) -> str | None:
    holders = [holder.module for plain in plain_params for holder in plain.holders]
    for cls in dict.fromkeys(map(plain_class, [root, *holders])):
        if fault := fault_of_class(cls):
            return (
                f"modules of class {cls.__name__} cannot be sharded, since that changes their "
                f"class: {fault}. Hold their parameters in another class, or list them in "
                "ignored_params"
            )
    return None


def _fault_of_parameters(plain_params: Sequence[PlainParam], allow_meta: bool) -> str | None:
    all_meta = allow_meta and all(plain.param.is_meta for plain in plain_params)
    for plain in plain_params:
        if any(had_sharded(*holder) for holder in plain.holders):
            fault: str | None = (
                "was replaced by a plain parameter after it was sharded: change it in place; "
                + FUNCTIONAL_CALL
            )
        else:
            fault = _fault_of_tensor(plain.param, all_meta)
        if fault is not None:
            return f"parameter {plain.fqn!r} {fault}"
    return None


def _fault_of_optimizers(plain_params: Sequence[PlainParam]) -> str | None:
    """Return a fault if an optimizer has loaded sharded state for a parameter, or None."""
    for optimizer in living(torch.optim.Optimizer):
        for plain in plain_params:
            state = optimizer.state.get(plain.param, {})
            if any(isinstance(value, DTensor) for value in state.values()):
                return (
                    f"{type(optimizer).__name__} has loaded a shard of the state of parameter "
                    f"{plain.fqn!r}, which is not sharded yet: call graphshard.shard(model, ...) "
                    "before its load_state_dict"
                )
    return None


def _fault_of_ddp(plain_params: Sequence[PlainParam]) -> str | None:
    """Return a fault if a living ``DistributedDataParallel`` reduces a parameter, or None."""
    if not any(plain.in_ddp for plain in plain_params):
        return None
    gc.collect()  # an unused wrapper may not have been collected yet
    reduced = find_reduced_by_ddp()
    plain = next((plain for plain in plain_params if plain.param in reduced), None)
    if plain is None:
        return None
    return (
        f"parameter {plain.fqn!r} is reduced by DistributedDataParallel around the model: leave "
        "that out, and call what torch.compile(model, backend=graphshard.backend(mesh)) returns; "
        'to replicate parameters as it does, give overrides={"*": {"shard": False}}'
    )


def _fault_of_tensor(param: nn.Parameter, all_meta: bool) -> str | None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        return "is lazy: run one forward, or give its shape, before sharding"
    if isinstance(param, DTensor):
        return f"is a DTensor of {param.placements} already: give graphshard the plain module"
    if is_traceable_wrapper_subclass(param.data):
        return (
            f"is a {type(param.data).__name__}: only plain tensors can be sharded"
            + _instead_of_subclass(param)
        )
    if param.is_meta and not all_meta:
        return (
            "is on the meta device: shard the whole model there by graphshard.shard, then call "
            "to_empty() and initialise it before the first step"
        )
    return None


def _instead_of_subclass(param: nn.Parameter) -> str:
    if is_of_torchao(param.data):
        return "; for fp8 on the wire give the plain module and fp8=graphshard.Float8Policy()"
    if param.requires_grad:
        return ""  # if ignored, its gradient would not be reduced
    return (
        ". It is frozen: to keep it whole on every rank, as the quantised base of QLoRA, give "
        "ignored_params=[p for p in model.parameters() if isinstance(p.data, "
        f"{type(param.data).__name__})]"
    )


def _fault_of_overrides(
    root: nn.Module, plain_params: Sequence[PlainParam], options: Options
) -> str | None:
    fqns = [fqn for plain in plain_params for fqn in plain.fqns]
    callable_modules = [name for name, module in root.named_modules() if has_forward(module)]
    for glob, arguments in options.overrides.items():
        policy = arguments.get("mp_policy")
        has_boundary = policy is not None and any(matches(glob, name) for name in callable_modules)
        if not has_boundary and not any(matches(glob, fqn) for fqn in fqns):
            return f"overrides[{glob!r}] matches no parameter: {_nearest(glob, fqns)}"
        if policy is not None and not has_boundary and (field := _field_of_modules(policy)):
            return (
                f"overrides[{glob!r}] has an mp_policy with {field}, but matches parameters alone, "
                "which have no inputs and outputs: name the module, which stands for all that is "
                "in it"
            )
    return None


def _nearest(glob: str, fqns: Sequence[str]) -> str:
    """Suggest parameters to a user whose glob matches none of ``fqns``."""
    if not fqns:
        return "there is none"
    nearest = difflib.get_close_matches(glob, fqns, n=3, cutoff=0.0)
    return f"of {len(fqns)} the nearest are {', '.join(map(repr, nearest))}"


def _field_of_modules(policy: MixedPrecisionPolicy) -> str | None:
    """Return a field of ``policy`` that only affects modules, as text, or None."""
    if policy.output_dtype is not None:
        return f"output_dtype={policy.output_dtype}"
    return None if policy.cast_forward_inputs else "cast_forward_inputs=False"


def _resolve_options(
    plain_params: Sequence[PlainParam], mesh: DeviceMesh, options: Options
) -> str | None:
    """Set the options of every parameter; return the first fault, or None."""
    num_shards = MeshGroups(mesh).num_shards
    for plain in plain_params:
        try:
            plain.options = options.for_parameter(plain.fqns)
            plain.options.num_backward_ranks(num_shards)  # raises if it does not divide num_shards
            plain.host_memory = plain.options.host_memory(mesh.device_type)
            if fault := _fault_of_device(plain, mesh):
                return f"parameter {plain.fqn!r} {fault}"
            plain.float8 = _float8_recipe(plain)
        except Exception as error:  # also from the user's fp8 filter: all ranks have to raise
            return f"parameter {plain.fqn!r}: {type(error).__name__}: {error}"
    return None


def _fault_of_device(plain: PlainParam, mesh: DeviceMesh) -> str | None:
    device = plain.param.device
    if device.type in ("meta", mesh.device_type):
        return None
    if plain.host_memory is not None and device.type == "cpu":
        return None
    return f"is on {device}, the mesh on {mesh.device_type}: move one of them"


def _float8_recipe(plain: PlainParam) -> str | None:
    """Return the fp8 recipe of a parameter's linears, or None if they do not compute in fp8.

    Raises:
        ValueError: the fp8 policy conflicts with ``mp_policy.param_dtype``.
    """
    policy = plain.options.fp8
    embeds = any(isinstance(module, nn.Embedding) for module, _ in plain.holders)
    if policy is None or not plain.options.shard or embeds:
        return None
    recipe = policy.recipe_for(plain.fqns, plain.param)
    if recipe is not None:
        check_fp8(policy, plain.options.mp_policy.param_dtype)
    return recipe


def _fault_of_fp8(
    root: nn.Module, plain_params: Sequence[PlainParam], device_type: str
) -> str | None:
    if all(plain.options.fp8 is None for plain in plain_params):
        return None
    for name, module in root.named_modules():
        if is_of_torchao(module):
            return (
                f"module {name!r} is torchao's {type(module).__name__} already: give graphshard "
                "the plain module, or leave fp8 out"
            )
    recipes = {plain.float8: plain for plain in plain_params if plain.float8 is not None}
    if not recipes and any(plain.param.dim() == 2 for plain in plain_params):
        return "fp8 chooses no parameter: check fp8.filter_fn, or leave fp8 out"
    for recipe, plain in recipes.items():
        if fault := device_fault(device_type, recipe):
            return (
                f"fp8: {device_type} does not compute {recipe} products in fp8, as of parameter "
                f"{plain.fqn!r}: {fault}"
            )
    return None
