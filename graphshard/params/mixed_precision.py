"""Cast the inputs and outputs of a model and its parts, following ``MixedPrecisionPolicy``.

    forward inputs ─► param_dtype ─► module ─► output_dtype

A cast boundary is a module at which a policy begins: the model itself, and each outermost module
to which a glob of ``overrides`` assigns a policy (in FSDP2, a separately wrapped one). Parameters
and gradients are cast in graphs (``graphshard.ops.markers``); users see them in their own dtype.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._torch.dynamo import run_as_python
from .._torch.frames import call_arguments
from .._torch.nn import apply_to_tensors, has_forward
from ..errors import BackendError
from ..options.options import Options
from .sharded_param import sharded_model_of

_T = TypeVar("_T")


def find_cast_boundaries(
    root: nn.Module, options: Options
) -> list[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Return the cast boundaries of ``root`` and their policies, starting with ``root`` itself."""
    globs = {"": options.policy_glob("")}
    boundaries = [(root, options.policy_of(globs[""]))]
    for fqn, module in list(root.named_modules())[1:]:
        if not has_forward(module):  # a container such as nn.ModuleList is never called
            continue
        parts = fqn.split(".")
        around = (".".join(parts[:depth]) for depth in reversed(range(len(parts))))
        globs[fqn] = options.policy_glob(fqn)
        # A policy begins here if the nearest enclosing callable module matches a different glob.
        if globs[fqn] != next(globs[outer] for outer in around if outer in globs):
            boundaries.append((module, options.policy_of(globs[fqn])))
    return boundaries


def _input_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    return policy.param_dtype if policy.cast_forward_inputs else None


def cast_at_boundary(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Register hooks that cast the inputs and outputs of the module's forward."""
    if _input_dtype(policy) is not None:
        # Runs after the user's hooks: Dynamo in torch 2.11 cannot trace a prepended hook.
        module.register_forward_pre_hook(functools.partial(cast_inputs, policy), with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(functools.partial(_after_forward, policy.output_dtype))


def check_cast_boundaries(
    root: nn.Module, options: Options, in_use: bool, will_cast: bool = False
) -> None:
    """Raise BackendError if the forward of a cast boundary has begun without its casts.

    Args:
        in_use: whether a forward of ``root`` may be running.
        will_cast: whether to skip ``root`` itself, because its inputs are cast later.
    """
    for module, policy in find_cast_boundaries(root, options)[will_cast:]:  # root's is first
        if sharded_model_of(module) is not None:
            continue  # its casts, or those of its earlier policy, have been registered
        begun, runs = call_arguments(module), in_use and module is root
        dtype = _input_dtype(policy)
        casts_inputs = _needs_cast(begun, dtype) if begun else dtype is not None
        if (begun or runs) and (casts_inputs or policy.output_dtype is not None):
            raise BackendError(
                f"mp_policy={policy}: the first forward of {type(module).__name__} began before "
                "graphshard could cast its inputs and outputs: compile the module itself, with "
                "torch.compile(model, backend=graphshard.backend(...)), or call "
                "graphshard.shard(model, ...) first"
            )


def _needs_cast(inputs: object, dtype: torch.dtype | None) -> bool:
    if dtype is None:
        return False
    dtypes = []

    def note(value: torch.Tensor) -> torch.Tensor:
        dtypes.append(value.dtype)
        return value

    apply_to_tensors(note, inputs)
    return any(other.is_floating_point and other != dtype for other in dtypes)


def cast_inputs(
    policy: MixedPrecisionPolicy, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the floating-point tensors in a forward's arguments, if ``policy`` casts inputs."""
    dtype = _input_dtype(policy)
    return (args, kwargs) if dtype is None else _cast_floating((args, kwargs), dtype)


def _after_forward(dtype: torch.dtype, module: nn.Module, args: object, output: _T) -> _T:
    return _cast_floating(output, dtype)


def _cast_floating(values: _T, dtype: torch.dtype) -> _T:
    apply = apply_to_tensors if torch.compiler.is_compiling() else _apply_eagerly
    return apply(functools.partial(_cast, dtype), values)


_apply_eagerly = torch.compiler.disable(apply_to_tensors)


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


for _traced in (cast_inputs, _after_forward, _cast_floating):
    run_as_python(_traced)  # inlined into traces, never compiled on its own
