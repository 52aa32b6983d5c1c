"""Validate the parameters to shard, and resolve their options.

``find_error`` returns an error message instead of raising it: all ranks must raise together, even
if only one has an error (``shard._check_same_shards``).
"""

from __future__ import annotations

import difflib
import gc
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._torch.dtensor import has_root_of, slice_equal_to
from .._torch.nn import has_forward
from .._torch.tensors import is_traceable_wrapper_subclass
from ..ops.float8_math import is_of_torchao
from ..ops.float8_ops import float8_error
from ..options.float8_policy import check_fp8
from ..options.options import Options, ParamOptions, matches
from .mesh import MeshGroups
from .module_class import class_error, had_sharded, plain_class
from .param_spec import ParamSpec
from .plain_params import PlainParam, find_reduced_by_ddp, live_optimizers
from .sharded_param import FUNCTIONAL_CALL, sharded_param_of
from .shared_memory import shared_memory_error

_OTHER_WRAPPERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, DataParallel)


def find_groups(
    root: nn.Module, plain_params: Sequence[PlainParam], mesh: DeviceMesh, options: Options
) -> MeshGroups:
    """Return the groups of ``mesh`` and, if the model has DTensors, of their tensor-parallel mesh.

    DTensors whose mesh cannot be combined with ``mesh`` are skipped, and :func:`find_error`
    reports them. Parameters with their own mesh in ``overrides`` are skipped, too.
    """
    sharded = filter(None, map(sharded_param_of, root.parameters()))
    tp_meshes = [known.spec.groups.of_model.tp_mesh for known in sharded]
    tp_meshes += [
        plain.param.device_mesh
        for plain in plain_params
        if isinstance(plain.param, DTensor) and options.for_parameter(plain.fqns).mesh is None
    ]
    tp_meshes += [b.device_mesh for b in root.buffers() if isinstance(b, DTensor)]
    for tp_mesh in filter(None, tp_meshes):
        if _tp_mesh_error(tp_mesh, mesh) is None:
            return MeshGroups(mesh, slice_equal_to(tp_mesh, mesh))
    return MeshGroups(mesh)


def _groups_of_params(
    plain_params: Sequence[PlainParam], groups: MeshGroups, options: Options
) -> dict[PlainParam, MeshGroups]:
    """Return the groups of each parameter; parameters on the same meshes share one object."""
    shared: dict[MeshGroups, MeshGroups] = {}
    result = {}
    for plain in plain_params:
        mesh, own = options.for_parameter(plain.fqns).mesh, groups
        if mesh is not None:
            tp_mesh = plain.param.device_mesh if isinstance(plain.param, DTensor) else None
            own = MeshGroups(mesh, tp_mesh, groups)
        result[plain] = shared.setdefault(own, own)
    return result


# --- checks --------------------------------------------------------------------------------------


def find_error(
    root: nn.Module,
    plain_params: Sequence[PlainParam],
    groups: MeshGroups,
    options: Options,
    *,
    allow_meta: bool,
) -> str | None:
    """Return the first error that prevents this rank from sharding ``root``, or None.

    If there is no error, this sets the ``spec`` of every parameter.
    """
    own_groups = _groups_of_params(plain_params, groups, options)
    return (
        _module_error(root)
        or _buffer_error(root, groups)
        or _holder_class_error(root, plain_params)
        or _parameter_error(own_groups, allow_meta)
        or _reading_error(plain_params)
        or shared_memory_error(root, plain_params)
        or _optimizer_error(plain_params)
        or _ddp_error(plain_params)
        or _override_error(root, plain_params, options)
        or _resolve_specs(own_groups, options)  # sets all specs
        or _fp8_error(root, plain_params, options, groups.mesh.device_type)
    )


def _module_error(root: nn.Module) -> str | None:
    for name, module in root.named_modules():
        wrapper = next((kind for kind in _OTHER_WRAPPERS if isinstance(module, kind)), None)
        if wrapper is not None:
            return (
                f"module {name or type(root).__name__!r} is already wrapped by "
                f"{wrapper.__name__}: pass graphshard the plain module"
            )
    return None


def _buffer_error(root: nn.Module, groups: MeshGroups) -> str | None:
    for name, buffer in root.named_buffers():
        if isinstance(buffer, DTensor) and (error := _dtensor_error(buffer, groups)) is not None:
            return f"buffer {name!r} {error}"
    return None


def _holder_class_error(root: nn.Module, plain_params: Sequence[PlainParam]) -> str | None:
    for plain in plain_params:
        if any(isinstance(holder.module, torch.jit.ScriptModule) for holder in plain.holders):
            return (
                f"parameter {plain.fqn!r} is held by a TorchScript module (torch.jit.script or "
                "torch.jit.trace), which can only read full parameters: use the Python module that "
                "it was made from, and delete the TorchScript module; or, if the parameter is "
                "frozen, list it in ignored_params"
            )
    holders = [holder.module for plain in plain_params for holder in plain.holders]
    for cls in dict.fromkeys(map(plain_class, [root, *holders])):
        if error := class_error(cls):
            return (
                f"modules of class {cls.__name__} cannot be sharded, because sharding replaces "
                f"their class: {error}. Move their parameters to a module of a different class, or "
                "list them in ignored_params"
            )
    return None


def _parameter_error(groups: Mapping[PlainParam, MeshGroups], allow_meta: bool) -> str | None:
    all_meta = allow_meta and all(plain.param.is_meta for plain in groups)
    for plain, own in groups.items():
        if any(had_sharded(*holder) for holder in plain.holders):
            error: str | None = (
                "was replaced by a plain parameter after sharding: keep the sharded parameter, and "
                "load full values with load_state_dict or copy_ a DTensor into the parameter. "
                + FUNCTIONAL_CALL
            )
        else:
            error = _own_mesh_error(own) or _tensor_error(plain.param, own, all_meta)
        if error is not None:
            return f"parameter {plain.fqn!r} {error}"
    return None


def _reading_error(plain_params: Sequence[PlainParam]) -> str | None:
    """Return an error if a module returns something else than its parameter, or None.

    The accessors of a sharded module would replace the property or ``__getattr__`` that does so.
    """
    for plain in plain_params:
        for module, name in plain.holders:
            try:
                read = getattr(module, name)
            except Exception as error:  # from the user's code: all ranks must raise
                returns = f"raises {type(error).__name__}: {error}"
            else:
                if read is plain.param:
                    continue
                returns = "returns something else, as by a property or __getattr__"
            return (
                f"parameter {plain.fqn!r} cannot be sharded, because reading {name!r} from its "
                f"{type(module).__name__} {returns}: register the parameter under a different name "
                f"and compute {name!r} from that, or use "
                "torch.nn.utils.parametrize.register_parametrization"
            )
    return None


def _optimizer_error(plain_params: Sequence[PlainParam]) -> str | None:
    for optimizer in live_optimizers():
        for plain in plain_params:
            state = optimizer.state.get(plain.param, {})
            meshes = {v.device_mesh for v in state.values() if isinstance(v, DTensor)}
            own = {plain.param.device_mesh} if isinstance(plain.param, DTensor) else set()
            if meshes - own:
                return (
                    f"{type(optimizer).__name__} has loaded sharded state for parameter "
                    f"{plain.fqn!r}, which is not sharded yet: call graphshard.shard(model, ...) "
                    "before optimizer.load_state_dict"
                )
    return None


def _ddp_error(plain_params: Sequence[PlainParam]) -> str | None:
    if not any(plain.in_ddp for plain in plain_params):
        return None
    gc.collect()  # an unused wrapper may not have been collected yet
    reduced = find_reduced_by_ddp()
    plain = next((plain for plain in plain_params if plain.param in reduced), None)
    if plain is None:
        return None
    return (
        f"DistributedDataParallel reduces the gradient of parameter {plain.fqn!r}: remove the "
        "wrapper, and call the model that torch.compile(model, backend=graphshard.backend(mesh)) "
        'returns. To replicate parameters as DDP does, set overrides={"*": {"shard": False}}'
    )


def _own_mesh_error(groups: MeshGroups) -> str | None:
    mesh, default = groups.mesh, groups.default
    if default is None:
        return None
    slices = f'slices of one mesh, as in {_DP_MESH} and {{"mesh": mesh["efsdp"]}}'
    if not has_root_of(mesh, default.mesh):
        return (
            f"has mesh={mesh} in overrides, whose root mesh is not that of the model's mesh, "
            f"{default.mesh}: pass {slices}"
        )
    ranks = set(default.whole_mesh.mesh.flatten().tolist())
    for own in filter(None, (mesh, groups.tp_mesh)):
        if not set(own.mesh.flatten().tolist()) <= ranks:
            return (
                f"is on {own}, but the model is trained only by the ranks of {default.whole_mesh}: "
                f"pass {slices}, where dp has all ranks with different data"
            )
    return None


def _tensor_error(param: nn.Parameter, groups: MeshGroups, all_meta: bool) -> str | None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        return "is lazy: run one forward before sharding, or use a module that is not lazy"
    if isinstance(param, DTensor):
        if (error := _dtensor_error(param, groups)) is not None:
            return error
    elif is_traceable_wrapper_subclass(param.data):
        return (
            f"is a {type(param.data).__name__}: only plain tensors and DTensors can be sharded"
            + _instead_of_subclass(param)
        )
    if param.grad_dtype != param.dtype:
        return (
            f"has grad_dtype={param.grad_dtype}, but gradients of sharded parameters have the "
            f"parameter's dtype, {param.dtype}: remove the assignment to grad_dtype, and set "
            "reduce_dtype in the mp_policy to average gradients in a different dtype"
        )
    if param.is_meta and not all_meta:
        return (
            "is on the meta device: call graphshard.shard while the whole model is on meta, then "
            "call to_empty() and initialize the model before its first step"
        )
    return None


def _dtensor_error(tensor: DTensor, groups: MeshGroups) -> str | None:
    error = _layout_error(tensor, groups)
    start = f"is a DTensor of {tensor.placements} on {tensor.device_mesh}, "
    return None if error is None else start + error


def _layout_error(param: DTensor, groups: MeshGroups) -> str | None:
    mesh = param.device_mesh
    if (error := _tp_mesh_error(mesh, groups.mesh)) is not None:
        return error
    if mesh != groups.tp_mesh:
        return f"but other tensors are on {groups.tp_mesh}: parallelize the model on one mesh"
    for placement in param.placements:
        if type(placement) not in (Shard, Replicate):
            return "but all its placements must be Shard or Replicate: redistribute it"
        if isinstance(placement, Shard) and param.shape[placement.dim] % mesh.size():
            return (
                f"but its size {param.shape[placement.dim]} in dim {placement.dim} is not a "
                f"multiple of the {mesh.size()} ranks: pad it, or do not split it"
            )
    return None


def _tp_mesh_error(tp_mesh: DeviceMesh, mesh: DeviceMesh) -> str | None:
    slices = f'slices of one mesh, as in parallelize_module(model, mesh["tp"], plan) and {_DP_MESH}'
    if tp_mesh == mesh and mesh.size() > 1:
        return (
            "the mesh to shard over: if it was made from a sharded parameter, as by weight_norm, "
            f"make it before sharding; if tensor parallelism has split it, pass different {slices}"
        )
    if slice_equal_to(tp_mesh, mesh) is None:
        return f"and cannot be sharded over {mesh}: both meshes must be {slices}"
    if tp_mesh.ndim != 1:
        return (
            "but tensor parallelism over several axes is not supported: pass parallelize_module a "
            'mesh with one axis, as in mesh["tp"]'
        )
    if set(tp_mesh.mesh.tolist()) & set(mesh.mesh.flatten().tolist()) != {dist.get_rank()}:
        return (
            f"which overlaps {mesh}: pass different {slices}; experts need their own mesh, as in "
            'overrides={glob: {"mesh": mesh["efsdp"]}}'
        )
    return None


_DP_MESH = 'graphshard.backend(mesh["dp"])'


def _instead_of_subclass(param: nn.Parameter) -> str:
    if is_of_torchao(param.data):
        return "; for fp8 all-gathers, pass the plain module and fp8=graphshard.Float8Policy()"
    if param.requires_grad:
        # Not ignored_params: its gradient would not be reduced.
        return ". Make it a plain parameter before sharding"
    return (
        ". To keep this frozen parameter unsharded, like the quantized base of QLoRA, set "
        "ignored_params=[p for p in model.parameters() if isinstance(p.data, "
        f"{type(param.data).__name__})]"
    )


def _override_error(
    root: nn.Module, plain_params: Sequence[PlainParam], options: Options
) -> str | None:
    new = {plain.param for plain in plain_params}
    # With the parameters of an earlier sharding: options are for the whole model.
    fqns = [
        name
        for name, param in root.named_parameters(remove_duplicate=False)
        if param in new or sharded_param_of(param) is not None
    ]
    callable_modules = [name for name, module in root.named_modules() if has_forward(module)]
    for glob, arguments in options.overrides.items():
        policy = arguments.get("mp_policy")
        # A module without parameters may still cast its inputs and outputs.
        has_boundary = policy is not None and any(matches(glob, name) for name in callable_modules)
        if not has_boundary and not any(matches(glob, fqn) for fqn in fqns):
            return f"overrides[{glob!r}] matches no parameter: {_nearest(glob, fqns)}"
        if policy is not None and not has_boundary and (field := _field_of_modules(policy)):
            return (
                f"overrides[{glob!r}] has an mp_policy with {field}, but matches only parameters, "
                "which have no inputs and outputs: match their module instead; its policy also "
                "applies to its parameters"
            )
    return None


def _nearest(glob: str, fqns: Sequence[str]) -> str:
    if not fqns:
        return "the model has none to shard"
    nearest = difflib.get_close_matches(glob, fqns, n=3, cutoff=0.0)
    return f"the closest of {len(fqns)} parameter names are {', '.join(map(repr, nearest))}"


def _field_of_modules(policy: MixedPrecisionPolicy) -> str | None:
    """Return a non-default setting of ``policy`` that only affects inputs or outputs, or None.

    It is formatted for an error message, as in ``"cast_forward_inputs=False"``.
    """
    if policy.output_dtype is not None:
        return f"output_dtype={policy.output_dtype}"
    return None if policy.cast_forward_inputs else "cast_forward_inputs=False"


def _resolve_specs(groups: Mapping[PlainParam, MeshGroups], options: Options) -> str | None:
    for plain, own in groups.items():
        try:
            param_options = options.for_parameter(plain.fqns)
            if problem := _device_error(plain.param.device, own.mesh, param_options):
                return f"parameter {plain.fqn!r} {problem}"
            overrides_reshard = options.overrides_reshard(plain.fqns)
            plain.spec = _spec_of(plain, own, param_options, overrides_reshard)
        except Exception as error:  # also from the user's fp8 filter: all ranks must raise
            return f"parameter {plain.fqn!r}: {type(error).__name__}: {error}"
    return None


def _spec_of(
    plain: PlainParam, groups: MeshGroups, options: ParamOptions, overrides_reshard: bool
) -> ParamSpec:
    return ParamSpec(
        plain.param.shape,
        groups,
        plain.fqn,
        num_backward_ranks=options.num_backward_ranks(groups.num_shards),
        overrides_reshard=overrides_reshard,
        dtype=options.mp_policy.param_dtype,
        reduce_dtype=options.mp_policy.reduce_dtype,
        float8_recipe=_float8_recipe(plain, options),
        shard=options.shard,
        host_memory=options.host_memory(groups.mesh.device_type),
        tp_placements=plain.param.placements if isinstance(plain.param, DTensor) else None,
        dim=_dim(plain.param, options),
    )


def _dim(param: nn.Parameter, options: ParamOptions) -> int:
    """Return the dimension to split as a nonnegative index; raise ValueError if out of range."""
    dim, ndim = options.dim, max(param.ndim, 1)
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"dim={dim} is out of range for the shape {tuple(param.shape)}: use a glob in "
            "overrides that matches only parameters with this dimension"
        )
    return dim % ndim


def _device_error(device: torch.device, mesh: DeviceMesh, options: ParamOptions) -> str | None:
    is_offloaded = device.type == "cpu" and isinstance(options.offload_policy, CPUOffloadPolicy)
    if is_offloaded or device.type in ("meta", mesh.device_type):
        return None
    return (
        f"is on {device}, but the mesh is on {mesh.device_type}: move the model to "
        f"{mesh.device_type}, or pass a mesh on {device.type}"
    )


def _float8_recipe(plain: PlainParam, options: ParamOptions) -> str | None:
    policy = options.fp8
    embeds = any(isinstance(module, nn.Embedding) for module, _ in plain.holders)
    if policy is None or not options.shard or embeds:  # an embedding is a lookup, not a matmul
        return None
    recipe = policy.recipe_for(plain.fqns, plain.param)
    if recipe is None:
        return None
    if isinstance(plain.param, DTensor):
        raise ValueError(
            f"fp8 is not supported for DTensors such as this parameter (placements "
            f"{plain.param.placements}): exclude it with "
            'overrides={glob: {"fp8": None}} or fp8.filter_fn'
        )
    if _dim(plain.param, options):
        raise ValueError(
            f"fp8 is not supported for a parameter that is split along dim={options.dim}: exclude "
            'it with overrides={glob: {"fp8": None}} or fp8.filter_fn'
        )
    check_fp8(policy, options.mp_policy.param_dtype)
    return recipe


def _fp8_error(
    root: nn.Module, plain_params: Sequence[PlainParam], options: Options, device_type: str
) -> str | None:
    if all(options.for_parameter(plain.fqns).fp8 is None for plain in plain_params):
        return None
    for name, module in root.named_modules():
        if is_of_torchao(module):
            return (
                f"module {name!r} is already torchao's {type(module).__name__}: pass graphshard "
                "the plain module, or omit fp8"
            )
    recipes = {
        plain.spec.float8_recipe: plain for plain in plain_params if plain.spec.float8_recipe
    }
    earlier = filter(None, map(sharded_param_of, root.parameters()))
    has_fp8 = bool(recipes) or any(param.spec.float8_recipe for param in earlier)
    if not has_fp8 and any(plain.param.dim() == 2 for plain in plain_params):
        return (
            "fp8 selects no parameter: each matrix is excluded by overrides, belongs to an "
            "nn.Embedding, or is rejected by fp8.filter_fn, which by default rejects output heads "
            "and sizes that are not multiples of 16. Pass a different filter_fn, or omit fp8"
        )
    for recipe, plain in recipes.items():
        if error := float8_error(device_type, recipe):
            return (
                f"fp8: {device_type} cannot compute the {recipe} fp8 matmuls of parameter "
                f"{plain.fqn!r}: {error}. Omit fp8, or use a different recipe or device"
            )
    return None
