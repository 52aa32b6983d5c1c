"""Sharded parameters as inputs of ``torch.autograd.grad`` and of ``backward(inputs=)``.

Autograd knows the shard and the stand-ins of accumulators. For the DTensor, which users name, it
would return None.
"""

from __future__ import annotations

import torch

from ..errors import BackendError
from .sharded_param import sharded_param_of


def leaves_of(value: object, accumulates: bool) -> list[torch.Tensor] | None:
    """Return the leaves that get the gradient of a sharded parameter; None: it is not one.

    Args:
        accumulates: its gradient is accumulated; else it is returned.

    Raises:
        BackendError: it is to be returned, and gradients of microbatches accumulate.
    """
    sharded_param = sharded_param_of(value)
    if sharded_param is None:
        return None
    if accumulates:
        return [sharded_param.shard, *sharded_param.accumulation.stand_ins()]
    if sharded_param.model.accumulates:
        raise BackendError(
            f"torch.autograd.grad of parameter {sharded_param.fqn!r} while gradients accumulate "
            "unreduced (no_sync): call backward(), or grad once they are reduced"
        )
    return [sharded_param.shard]


def gradient_of(param: torch.Tensor, padded_grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient of a sharded parameter, made of that of its shard.

    Raises:
        BackendError: it is to be differentiated again.
    """
    sharded_param = sharded_param_of(param)
    assert sharded_param is not None
    sharded_param.model.raise_if_changed()
    if padded_grad is None:
        return None
    if padded_grad.requires_grad:
        raise BackendError(
            f"second-order gradients of parameter {sharded_param.fqn!r}: create_graph=True is not "
            "supported through sharded parameters"
        )
    return sharded_param.gradient(padded_grad)
