"""The arithmetic of Muon. Relies on torch/optim/_muon.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return a bfloat16 matrix with singular values moved towards one by Newton-Schulz steps.

    Raises:
        ValueError: there are not three coefficients, or more than 99 steps.
    """
    # Cloned: torch's function divides a bfloat16 argument in place.
    return _zeropower_via_newtonschulz(matrix.clone(), coefficients, steps, eps)


def adjusted_lr(lr: Any, adjust_lr_fn: str | None, shape: torch.Size) -> Any:
    """Return Muon's learning rate for a matrix of ``shape``."""
    return _adjust_lr(lr, adjust_lr_fn, shape)
