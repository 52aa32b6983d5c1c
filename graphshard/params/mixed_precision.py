"""Mixed precision with the meaning of FSDP2's ``MixedPrecisionPolicy``: its check, and what is cast at
the border of a model.

    forward inputs ─► param_dtype ─► model ─► output_dtype

What is cast inside is part of the graphs: parameters before they are gathered, gradients before and
after they are reduced (``graphshard.ops.markers``). Parameters and their gradients keep their own dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._torch.dynamo import run_as_python
from .._torch.nn import apply_to_tensors


def _input_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """What floating-point inputs of a model are cast to, if they are."""
    return policy.param_dtype if policy.cast_forward_inputs else None


def cast_at_border(root: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast what goes into every forward of ``root``, and what comes out."""
    if _input_dtype(policy) is not None:
        hook = functools.partial(_before_forward, policy)
        # Behind the user's hooks: Dynamo of torch 2.11 cannot trace one that was prepended.
        root.register_forward_pre_hook(hook, with_kwargs=True)
    if policy.output_dtype is not None:
        root.register_forward_hook(functools.partial(_cast_output, policy.output_dtype))


def has_border(policy: MixedPrecisionPolicy) -> bool:
    """Whether anything is cast there."""
    return _input_dtype(policy) is not None or policy.output_dtype is not None


def crosses_border(inputs: Any, policy: MixedPrecisionPolicy) -> bool:
    """Whether a forward with these inputs would differ without what is cast there."""
    dtype, found = _input_dtype(policy), []

    def note(value: torch.Tensor) -> torch.Tensor:
        found.append(value.is_floating_point() and value.dtype != (dtype or value.dtype))
        return value

    apply_to_tensors(note, inputs)
    return any(found) or policy.output_dtype is not None


def _before_forward(policy: MixedPrecisionPolicy, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_inputs(policy, args, kwargs)


def cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> Any:
    dtype = _input_dtype(policy)
    return (args, kwargs) if dtype is None else _cast_floating((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast_floating(output, dtype)


def _cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Containers and dataclasses with their floating-point tensors cast."""
    if torch.compiler.is_compiling():
        return apply_to_tensors(functools.partial(_cast, dtype), values)
    return _cast_eagerly(values, dtype)


@torch.compiler.disable
def _cast_eagerly(values: Any, dtype: torch.dtype) -> Any:
    return apply_to_tensors(functools.partial(_cast, dtype), values)


def _cast(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


for _hook in (_before_forward, cast_inputs, _cast_output, _cast_floating):
    run_as_python(_hook)  # not a graph of its own where a module is called from Python
