"""Sharded parameters as inputs of ``torch.autograd.grad`` and ``backward(inputs=)``.

Users pass the DTensor, but the autograd graph has only the shard and the accumulators' stand-ins as
leaves, so autograd would return None.
"""

from __future__ import annotations

import torch

from ..errors import BackendError
from .sharded_param import sharded_param_of


def leaves_of(value: object, accumulates: bool) -> list[torch.Tensor] | None:
    """Return the leaves that get a sharded parameter's gradient, or None for any other value.

    Args:
        accumulates: True if the gradient is accumulated (``backward``), False if it is returned
            (``grad``).

    Raises:
        BackendError: the gradient is to be returned while microbatch gradients accumulate.
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
    """Convert the padded gradient of a shard to the gradient of its sharded parameter.

    Raises:
        BackendError: the gradient is to be differentiated again (``create_graph=True``), or a
            forward has changed a parameter in place.
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
