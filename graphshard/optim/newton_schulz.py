"""Orthogonalises matrices of one shape together, by the arithmetic of ``torch.optim.Muon``.

Read in torch/optim/_muon.py (``_zeropower_via_newtonschulz``, the same in torch 2.11 and 2.13).
"""

from __future__ import annotations

import torch

Coefficients = tuple[float, float, float]
WIRE_DTYPE = torch.bfloat16
"""The dtype of all steps; matrices are cast to it first, so nothing is lost by sending it."""
MAX_STEPS = 99


def orthogonalize(
    matrices: torch.Tensor, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """Return the matrices with singular values moved towards one, by Newton-Schulz steps.

    Args:
        matrices: ``[batch, rows, columns]`` in ``WIRE_DTYPE``.
        coefficients: of the quintic polynomial that each step applies to the singular values.
        eps: the least norm that a matrix is divided by.

    Returns:
        The same shape and dtype.

    Raises:
        ValueError: there are not three coefficients, or there are 100 steps or more.
    """
    if steps > MAX_STEPS:
        raise ValueError(f"ns_steps={steps}: must be at most {MAX_STEPS}")
    if len(coefficients) != 3:
        raise ValueError(f"ns_coefficients={coefficients}: must be three numbers")
    a, b, c = coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if is_tall else x
