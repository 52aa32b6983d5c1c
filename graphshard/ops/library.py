"""The operator library ``graphshard``: functions to define, implement and differentiate operators.

Dynamo, AOTAutograd and Inductor see an operator as one opaque call, unless its implementation is
composite or it has a lowering of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from .._torch.tensors import OpOverload, base_name

_NAMESPACE = "graphshard"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_Function = TypeVar("_Function", bound=Callable[..., object])
_implementations: dict[OpOverload, Callable[..., object]] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in op schemas and JSON files, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype called ``name``, with or without a leading ``torch.``."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype), name
    return dtype


def define(schema: str) -> OpOverload:
    """Define an operator by its schema, such as "copy(Tensor x) -> Tensor", and return it."""
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return operator_named(schema.partition("(")[0])


@functools.cache
def operator_named(name: str) -> OpOverload:
    """Return the operator ``name``, which ``define`` created."""
    return getattr(torch.ops.graphshard, name).default


def implement(
    op: OpOverload, dispatch_key: str = "CompositeExplicitAutograd"
) -> Callable[[_Function], _Function]:
    """Register the decorated function as the kernel of ``op`` for a dispatch key.

    Under the default key, the function runs ``op`` on real tensors of any device.
    """
    decorate: Any = torch.library.impl(_library, base_name(op), dispatch_key)

    def register(function: _Function) -> _Function:
        if dispatch_key == "CompositeExplicitAutograd":
            _implementations[op] = function
        return cast(_Function, decorate(function))

    return register


def implementation_of(op: OpOverload) -> Callable[..., object]:
    """Return the function that ``implement`` registered for ``op`` under the default key."""
    return _implementations[op]


def fake(op: OpOverload) -> Callable[[_Function], _Function]:
    """Register the decorated function as the fake implementation of ``op``."""
    decorate: Any = torch.library.register_fake(f"{_NAMESPACE}::{base_name(op)}", lib=_library)
    return cast(Callable[[_Function], _Function], decorate)


def differentiate(
    op: OpOverload,
    setup_context: Callable[[Any, tuple[Any, ...], torch.Tensor], None],
    backward: Callable[[Any, torch.Tensor], tuple[torch.Tensor | None, ...]],
) -> None:
    """Register the backward of ``op``, and the function that saves tensors for it.

    ``backward`` returns a gradient, or None, for each argument in the schema.
    """

    def backward_of_call(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A call may omit its last arguments.
        return backward(ctx, grad)[: len(ctx.needs_input_grad)]

    name = f"{_NAMESPACE}::{base_name(op)}"
    torch.library.register_autograd(
        name, backward_of_call, setup_context=setup_context, lib=_library
    )
