"""FSDP2's functions and methods, implemented with graphshard.

`tests.fsdp2_suite` substitutes them for torch's when it runs FSDP2's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

import graphshard
from graphshard.params.grad_sync import ALL_REDUCES, SYNCS, module_flag
from graphshard.params.sharded_param import sharded_param_of

# Methods of FSDPModule that control when to unshard or reshard. Here the planner decides that, so
# calls are only noted.
WITHOUT_EFFECT = [
    "reshard",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "unshard",
]

sharded: set[nn.Module] = set()  # modules that the running test has passed to fully_shard
backends: list[graphshard.Backend] = []  # one for each call of fully_shard
notes: list[str] = []  # calls by the running test that had no effect


class NoCounterpartError(Exception):
    """Raised if a test uses a feature of FSDP2 that has no counterpart in graphshard."""


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[..., Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> object:
    """Shard and compile one or more modules; the signature is that of FSDP2's ``fully_shard``.

    Raises:
        NoCounterpartError: for parameters that tensor parallelism has sharded unevenly.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": True if reshard_after_forward is None else reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "compiler": "aot_eager",
        "sync_module_states": False,
    }
    for part in [module] if isinstance(module, nn.Module) else module:
        if any(_is_uneven(p) for p in part.parameters() if sharded_param_of(p) is None):
            raise NoCounterpartError("parameters that are sharded unevenly")
        if shard_placement_fn is not None:
            options["overrides"] = _overrides(part, shard_placement_fn, mesh)
        graphshard.shard(part, **options)
        sharded.add(part)
        backends.append(graphshard.backend(**options))
        _compile_in_place(part, backends[-1])
    return module


def _overrides(
    part: nn.Module, placement_fn: Callable[..., Any], mesh: DeviceMesh | None
) -> dict[str, dict[str, Any]]:
    overrides: dict[str, dict[str, Any]] = {}
    for name, param in part.named_parameters():
        if sharded_param_of(param) is None and (result := placement_fn(param)) is not None:
            placement = getattr(result, "placement", result)
            overrides[name] = {"dim": placement.dim % param.ndim}
            if placement is not result and result.mesh_info.mesh != mesh:
                overrides[name]["mesh"] = result.mesh_info.mesh
    return overrides


def _is_uneven(param: nn.Parameter) -> bool:
    if not isinstance(param, DTensor):
        return False
    axes = enumerate(param.placements)
    return any(
        isinstance(placement, Shard) and param.shape[placement.dim] % param.device_mesh.size(axis)
        for axis, placement in axes
    )


fully_shard.state = lambda module: Anything()  # type: ignore[attr-defined]


def _compile_in_place(module: nn.Module, backend: graphshard.Backend) -> None:
    """Compile a module like ``module.compile``, but also if it is a container of torch.nn."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, backend=backend)  # type: ignore[assignment]


class _IsSharded(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return instance in sharded


class FSDPModule(metaclass=_IsSharded):
    """Stand-in for FSDP2's class; ``isinstance`` is true for sharded modules."""


def _set_flag(
    setter: Callable[..., None], name: str, root: nn.Module, flag: bool, *, recurse: bool = True
) -> None:
    """Set a flag; without `recurse`, only for the parameters that FSDP2 would assign to `root`."""
    kept = {} if recurse else {part: module_flag(part, name) for part in root.modules()}
    setter(root, flag)
    for part, before in kept.items():
        if part in sharded and part is not root:
            setter(part, before)


def add_methods() -> None:
    def all_reduce(self: nn.Module, flag: bool, *, recurse: bool = True) -> None:
        _set_flag(graphshard.set_requires_all_reduce, ALL_REDUCES, self, flag, recurse=recurse)

    def sync(self: nn.Module, flag: bool, *, recurse: bool = True) -> None:
        _set_flag(graphshard.set_requires_gradient_sync, SYNCS, self, flag, recurse=recurse)

    setattr(nn.Module, "set_requires_all_reduce", all_reduce)  # noqa: B010 (mypy)
    setattr(nn.Module, "set_requires_gradient_sync", sync)  # noqa: B010
    for name in WITHOUT_EFFECT:
        setattr(nn.Module, name, lambda self, *_, _name=name, **__: notes.append(_name))


class Anything:
    """Object that equals everything; stands in for FSDP2's state and collective counts."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
