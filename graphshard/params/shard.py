"""Turns a module's parameters into shards, in place: check, agree, broadcast, split, re-point.

Nothing is changed before all ranks have said, in one exchange, what they are about to shard and
that they found no fault with it. Then one parameter after the other is made equal on all ranks,
split, and its full copy freed, so that the peak is the full model plus one parameter.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._torch.autograd import share_hooks
from .._torch.distributed import process_group
from .._torch.nn import parameters_of
from .._torch.tensors import is_traceable_wrapper_subclass
from ..errors import BackendError
from ..ops.float8_math import device_fault, is_of_torchao
from ..options.float8_policy import check_fp8
from ..options.options import Options, ParamOptions, few_ranks
from .layout import Layout
from .mesh_groups import MeshGroups
from .mixed_precision import cast_at_border
from .parametrization import install, is_replaced
from .sharded_param import ShardedModel, ShardedParam, adopt, sharded_param_of

_FOREIGN = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, DataParallel)


class StaleParameter(nn.Parameter):
    """What a parameter's object becomes once sharded: whoever still holds it is told so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "this parameter was sharded by graphshard and is held by a list made before the first "
            "step: take model.parameters() again"
        )


def shard_module(
    root: nn.Module, mesh: DeviceMesh, options: Options, *, in_use: bool, allow_meta: bool
) -> None:
    """Shard every parameter of ``root`` in place.

    Args:
        in_use: an eager part of the running forward may hold full parameters already; they are
            then kept for its backward, and their gradients delivered to the shards.
        allow_meta: a module on the meta device is fine; it is sharded there.

    Raises:
        BackendError: on every rank, if any rank's module cannot be sharded or ranks differ.
    """
    groups, owners = MeshGroups(mesh), _owners(root, options.ignored_params)
    on_meta = any(owner.param.is_meta for owner in owners)
    fault = _fault(root, owners, allow_meta) or _unmatched(owners, options)
    fault = fault or _resolve(root, owners, mesh, options)
    _agree(root, owners, fault, groups, options)
    _warn_of_torchao(root)
    model = ShardedModel(type(root).__name__)
    with torch.no_grad(), torch.inference_mode(False):
        if any(owner.host for owner in owners):
            _move_buffers(root, groups.device)
        if options.sync_module_states and not on_meta:
            for _, buffer in sorted(root.named_buffers()):
                _broadcast(buffer, groups)
        replaced = {}
        # By name: ranks may have registered them in another order.
        for owner in sorted(owners, key=lambda owner: owner.fqn):
            if options.sync_module_states and not on_meta:
                _broadcast(owner.param, groups)
            replaced[owner.param] = _shard_parameter(owner, groups, model)
            _retire(owner.param, replaced[owner.param], in_use)
        _install(root, owners, replaced, model)
        cast_at_border(root, options.mp_policy)
        _repoint_optimizers(replaced)
        if not in_use:
            for param in replaced:
                param.__class__ = StaleParameter


@dataclass(eq=False)
class _Owned:
    """One parameter, its FQNs (several where it is tied), and every (module, name) that holds it.

    Attributes:
        options: what holds for it; ``float8`` the recipe of fp8, "" for none; ``host`` the memory of the
            host that keeps its shards, "" for none. Of ``_resolve``.
    """

    param: nn.Parameter
    names: list[str]
    at: list[tuple[nn.Module, str]]
    options: ParamOptions = field(default_factory=ParamOptions)
    float8: str = ""
    host: str = ""

    @property
    def fqn(self) -> str:
        return self.names[0]


def _owners(root: nn.Module, ignored: frozenset[nn.Parameter]) -> list[_Owned]:
    found: dict[nn.Parameter, _Owned] = {}
    for prefix, module in root.named_modules():
        for name, param in parameters_of(module).items():
            if param is None or param in ignored or sharded_param_of(param) is not None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            owned = found.setdefault(param, _Owned(param, [], []))
            owned.names.append(fqn)
            owned.at.append((module, name))
    inside = set(root.modules())
    for module in _live(nn.Module):
        if module not in inside:  # tied to this model from outside, such as a loss's weight
            for name, param in module.__dict__.get("_parameters", {}).items():
                if param in found:
                    found[param].at.append((module, name))
    return list(found.values())


def _live(kind: type[Any]) -> Iterator[Any]:
    """All living objects of ``kind``; by type, since ``isinstance`` asks proxies for their class."""
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


def _fault(root: nn.Module, owners: list[_Owned], allow_meta: bool) -> str | None:
    """What keeps this rank from sharding, or None."""
    for name, module in root.named_modules():
        wrapper = next((kind for kind in _FOREIGN if isinstance(module, kind)), None)
        if wrapper is not None:
            return (
                f"module {name or type(root).__name__!r} is already wrapped by "
                f"{wrapper.__name__}: give graphshard the plain module"
            )
    all_meta = allow_meta and all(owner.param.is_meta for owner in owners)
    for owner in owners:
        fault = _parameter_fault(owner.param, all_meta)
        if any(is_replaced(module, name) for module, name in owner.at):
            fault = "was replaced by a plain parameter after it was sharded: change it in place"
        if fault is not None:
            return f"parameter {owner.fqn!r} {fault}"
    return None


def _unmatched(owners: list[_Owned], options: Options) -> str | None:
    names = [name for owner in owners for name in owner.names]
    globs = options.unmatched(names)
    if not globs:
        return None
    return f"overrides[{globs[0]!r}] matches no parameter: there are {', '.join(names)}"


def _resolve(
    root: nn.Module, owners: list[_Owned], mesh: DeviceMesh, options: Options
) -> str | None:
    """Decide what holds for every parameter; what is wrong with that, or None."""
    try:
        for owner in owners:
            owner.options = options.of_param(owner.names)
            few_ranks(owner.options.reshard_after_forward, MeshGroups(mesh).num_shards)
            owner.host = owner.options.host(mesh.device_type) if owner.options.shard else ""
            if fault := _device_fault(owner, mesh):
                return f"parameter {owner.fqn!r} {fault}"
            embeds = any(isinstance(module, nn.Embedding) for module, _ in owner.at)
            if owner.options.fp8 is not None and owner.options.shard and not embeds:
                owner.float8 = owner.options.fp8.recipe_of(owner.names, owner.param)
            if owner.float8:
                check_fp8("fp8", owner.options.fp8, owner.options.mp_policy.param_dtype)
    except Exception as error:  # of the user's filter, too: no rank may be alone with it
        return f"parameter {owner.fqn!r}: {type(error).__name__}: {error}"
    wanted = any(owner.options.fp8 for owner in owners)
    return _float8_fault(root, owners, mesh.device_type) if wanted else None


def _float8_fault(root: nn.Module, owners: list[_Owned], device_type: str) -> str | None:
    for name, module in root.named_modules():
        if is_of_torchao(module):
            return (
                f"module {name!r} is torchao's {type(module).__name__} already: give graphshard the "
                "plain module, or leave fp8 out"
            )
    recipes = {owner.float8: owner for owner in owners if owner.float8}
    if not recipes and any(owner.param.dim() == 2 for owner in owners):
        return "fp8 chooses no parameter: check fp8.filter_fn, or leave fp8 out"
    for recipe, owner in recipes.items():
        if why := device_fault(device_type, recipe):
            return (
                f"fp8: {device_type} does not compute {recipe} products in fp8, as of parameter "
                f"{owner.fqn!r}: {why}"
            )
    return None


def _parameter_fault(param: nn.Parameter, all_meta: bool) -> str | None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        return "is lazy: run one forward, or give its shape, before sharding"
    if isinstance(param, DTensor):
        return f"is a DTensor of {param.placements} already: give graphshard the plain module"
    if is_traceable_wrapper_subclass(param.data):
        return (
            f"is a {type(param.data).__name__}: only plain tensors can be sharded{_instead(param)}"
        )
    if param.is_meta and not all_meta:
        return (
            "is on the meta device: shard the whole model there by graphshard.shard, then call "
            "to_empty() and initialise it before the first step"
        )
    return None


def _device_fault(owner: _Owned, mesh: DeviceMesh) -> str | None:
    device = owner.param.device
    if device.type in ("meta", mesh.device_type) or (owner.host and device.type == "cpu"):
        return None
    return f"is on {device}, the mesh on {mesh.device_type}: move one of them"


def _instead(param: nn.Parameter) -> str:
    if not is_of_torchao(param.data):
        return ""
    return "; for fp8 on the wire give the plain module and fp8=graphshard.Float8Policy()"


def _agree(
    root: nn.Module, owners: list[_Owned], fault: str | None, groups: MeshGroups, options: Options
) -> None:
    """Exchange what every rank is about to shard; raise on all ranks if one cannot, or differs."""
    mine = {"arguments of graphshard": options.fingerprint()}
    if fault is None:
        mine |= {owner.fqn: _describe(owner.param) + owner.float8 for owner in owners}
        mine |= {name: _describe(buffer) for name, buffer in root.named_buffers()}
    every: list[Any] = [None] * groups.mesh.size()
    dist.all_gather_object(every, (fault, mine), group=process_group(groups.all))
    for rank, (theirs, _) in enumerate(every):
        if theirs is not None:
            raise BackendError(f"rank {rank} of the mesh: {theirs}")
    first = every[0][1]
    for rank, (_, other) in enumerate(every):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise BackendError(
                    f"{name!r} differs between ranks: {first.get(name, 'missing')} on rank 0 of "
                    f"the mesh, {other.get(name, 'missing')} on rank {rank}"
                )


def _describe(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.requires_grad:
        text += " requires_grad"
    return text + " with a gradient" if tensor.grad is not None else text


def _move_buffers(root: nn.Module, device: torch.device) -> None:
    """As FSDP2 does: a model whose shards the host keeps may be there altogether."""
    for buffer in root.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.to(device)


def _broadcast(tensor: torch.Tensor, groups: MeshGroups) -> None:
    """Make ``tensor`` equal to the first rank's, in place; as bytes, which every backend takes."""
    if tensor.numel() == 0:
        return
    # Of an expanded dim, whose elements share memory, one is enough.
    tensor = tensor[tuple(slice(None) if stride else 0 for stride in tensor.stride())]
    group = process_group(groups.all)
    whole = tensor.detach().to(groups.device).contiguous()
    source = dist.get_global_rank(group, 0)
    dist.broadcast(whole.view(-1).view(torch.uint8), src=source, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(whole)


def _shard_parameter(owner: _Owned, groups: MeshGroups, model: ShardedModel) -> ShardedParam:
    old, options = owner.param, owner.options
    few = few_ranks(options.reshard_after_forward, groups.num_shards)
    regather = "" if few is None else groups.few(few) if few < groups.num_shards else groups.shards
    dtypes = options.mp_policy.param_dtype, options.mp_policy.reduce_dtype
    kept = options.shard, owner.host
    layout = Layout(old.shape, groups, regather, *dtypes, owner.float8, *kept)
    new = nn.Parameter(layout.dtensor(layout.padded_shard(old)), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    share_hooks(old, new)
    link = ShardedParam(layout, owner.fqn, model)
    link.attach(new)  # type: ignore[arg-type]
    if old.grad is not None:
        _deliver_full(link, old.grad)
        old.grad = None
    return link


def _retire(old: nn.Parameter, link: ShardedParam, in_use: bool) -> None:
    """Free the full copy now, though a trace that is under way still refers to the object."""
    if not in_use:
        old.data = old.data.new_empty(0)
    elif old.requires_grad:
        old.register_post_accumulate_grad_hook(lambda full: _deliver_late(link, full))


def _deliver_full(link: ShardedParam, grad: torch.Tensor) -> None:
    """A full gradient that no graph of ours made: average it over the ranks and keep our part."""
    group = process_group(link.layout.groups.all)
    mean = grad.detach().to(link.layout.groups.device).contiguous() / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    link.deliver(link.layout.padded_shard(mean))


def _deliver_late(link: ShardedParam, full: nn.Parameter) -> None:
    assert full.grad is not None
    _deliver_full(link, full.grad)
    full.grad = None


def _warn_of_torchao(root: nn.Module) -> None:
    names = [name for name, module in root.named_modules() if is_of_torchao(module)]
    if names:
        warnings.warn(
            f"graphshard: {names[0]!r} and {len(names) - 1} more modules are torchao's: they compute in "
            "fp8, but their weights are gathered in their own dtype. For fp8 on the wire give the plain "
            "module and fp8=graphshard.Float8Policy()",
            stacklevel=2,
        )


def _install(
    root: nn.Module,
    owners: list[_Owned],
    links: dict[nn.Parameter, ShardedParam],
    model: ShardedModel,
) -> None:
    by_module: dict[nn.Module, dict[str, ShardedParam]] = {}
    for owner in owners:
        for module, name in owner.at:
            by_module.setdefault(module, {})[name] = links[owner.param]
    for module in root.modules():
        adopt(module, model)
    for module, of_module in by_module.items():
        install(module, of_module, model)


def _repoint_optimizers(links: dict[nn.Parameter, ShardedParam]) -> None:
    """Live optimizers that hold a sharded parameter get its DTensor, in groups and in state."""
    for optimizer in _live(torch.optim.Optimizer):
        for group in optimizer.param_groups:
            params = group["params"]
            params[:] = [links[p].dtensor if p in links else p for p in params]
        for old in [p for p in optimizer.state if p in links]:
            link = links[old]
            state = optimizer.state.pop(old)
            optimizer.state[link.dtensor] = {k: _shard_state(v, link) for k, v in state.items()}


def _shard_state(value: Any, link: ShardedParam) -> Any:
    """Optimizer state of the parameter's shape is split like it; the rest (step) is kept."""
    layout = link.layout
    if isinstance(value, torch.Tensor) and value.shape == layout.shape and layout.rows is not None:
        return layout.dtensor(layout.padded_shard(value))
    return value
