"""The casts of FSDP2's ``MixedPrecisionPolicy`` at the borders of a model and of its parts.

    forward inputs ─► param_dtype ─► module ─► output_dtype

A border is where a policy begins: around the model, and around each outermost module that a glob of
``overrides`` gives a policy (a module that FSDP2 wraps by itself). Parameters are cast by the
graphs, before they are gathered, and gradients before and after they are reduced
(``graphshard.ops.markers``). Parameters and their gradients keep their own dtype.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._torch.dynamo import run_as_python
from .._torch.frames import call_arguments
from .._torch.nn import apply_to_tensors, has_forward
from ..errors import BackendError
from ..options.options import Options

_T = TypeVar("_T")


class Border(NamedTuple):
    """A module whose inputs and outputs are cast, and the policy that says to what."""

    module: nn.Module
    policy: MixedPrecisionPolicy


def find_borders(root: nn.Module, options: Options) -> list[Border]:
    """Return the borders of ``root``, its own first.

    Inside of a module, those whose policy is of another glob than that of the module around them.
    """
    globs = {"": options.policy_glob("")}
    borders = [Border(root, options.policy_of(globs[""]))]
    for fqn, module in list(root.named_modules())[1:]:
        if not has_forward(module):  # nn.ModuleList: nobody calls it
            continue
        parts = fqn.split(".")
        around = (".".join(parts[:depth]) for depth in reversed(range(len(parts))))
        globs[fqn] = options.policy_glob(fqn)
        if globs[fqn] != next(globs[outer] for outer in around if outer in globs):
            borders.append(Border(module, options.policy_of(globs[fqn])))
    return borders


def _input_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """Return the dtype that floating-point inputs are cast to; None: they are not."""
    return policy.param_dtype if policy.cast_forward_inputs else None


def cast_at_border(border: Border) -> None:
    """Cast the inputs of every forward of the module, and its outputs, by hooks."""
    module, policy = border
    if _input_dtype(policy) is not None:
        # Behind the user's hooks: Dynamo of torch 2.11 cannot trace one that was prepended.
        module.register_forward_pre_hook(
            functools.partial(_before_forward, policy), with_kwargs=True
        )
    if policy.output_dtype is not None:
        module.register_forward_hook(functools.partial(_after_forward, policy.output_dtype))


def check_borders(root: nn.Module, options: Options, in_use: bool, will_cast: bool = False) -> None:
    """Check that hooks which cast at a border do not come too late for a forward that has begun.

    Args:
        in_use: the forward of ``root`` runs already.
        will_cast: the inputs of ``root`` will still be cast.

    Raises:
        BackendError: they do.
    """
    for module, policy in find_borders(root, options)[will_cast:]:  # that of root is first
        begun, runs = call_arguments(module), in_use and module is root
        if crosses_border(begun, policy) if begun else runs and has_border(policy):
            raise BackendError(
                f"mp_policy={policy}: the first forward of {type(module).__name__} has begun "
                "before its inputs were cast: compile the module itself, by "
                "torch.compile(model, backend=graphshard.backend(...)), or call "
                "graphshard.shard(model, ...) before"
            )


def has_border(policy: MixedPrecisionPolicy) -> bool:
    """Return whether inputs or outputs are cast."""
    return _input_dtype(policy) is not None or policy.output_dtype is not None


def crosses_border(inputs: object, policy: MixedPrecisionPolicy) -> bool:
    """Return whether a forward with these inputs differs from one without the casts."""
    return policy.output_dtype is not None or _is_cast(inputs, _input_dtype(policy))


def _is_cast(inputs: object, dtype: torch.dtype | None) -> bool:
    """Return whether any tensor in ``inputs`` would change if it was cast to ``dtype``."""
    if dtype is None:
        return False
    dtypes = []

    def note(value: torch.Tensor) -> torch.Tensor:
        dtypes.append(value.dtype)
        return value

    apply_to_tensors(note, inputs)
    return any(other.is_floating_point and other != dtype for other in dtypes)


def _before_forward(
    policy: MixedPrecisionPolicy, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cast_inputs(policy, args, kwargs)


def cast_inputs(
    policy: MixedPrecisionPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward with their floating-point tensors cast."""
    dtype = _input_dtype(policy)
    return (args, kwargs) if dtype is None else _cast_floating((args, kwargs), dtype)


def _after_forward(dtype: torch.dtype, module: nn.Module, args: object, output: _T) -> _T:
    return _cast_floating(output, dtype)


def _cast_floating(values: _T, dtype: torch.dtype) -> _T:
    """Return containers and dataclasses with their floating-point tensors cast."""
    if torch.compiler.is_compiling():
        return apply_to_tensors(functools.partial(_cast, dtype), values)
    return _cast_eagerly(values, dtype)


@torch.compiler.disable
def _cast_eagerly(values: _T, dtype: torch.dtype) -> _T:
    return apply_to_tensors(functools.partial(_cast, dtype), values)


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


for _hook in (_before_forward, cast_inputs, _after_forward, _cast_floating):
    run_as_python(_hook)  # not a graph of its own where a module is called from Python
