"""Batched orthogonalisation of matrices of one shape, by the arithmetic of ``torch.optim.Muon``.

Follows ``_zeropower_via_newtonschulz`` in torch/optim/_muon.py, the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch

Coefficients = tuple[float, float, float]
WIRE_DTYPE = torch.bfloat16
"""Dtype of all steps. Matrices are cast to it first, so sending them in it loses nothing."""
MAX_STEPS = 99


def orthogonalize(
    matrices: torch.Tensor, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """Return the matrices with singular values moved towards one by Newton-Schulz steps.

    Args:
        matrices: tensor ``[batch, rows, columns]`` in ``WIRE_DTYPE``.
        coefficients: coefficients of the quintic polynomial that each step applies to the singular
            values.
        steps: number of steps.
        eps: lower bound for the norm that a matrix is divided by.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ValueError: there are not three coefficients, or more than 99 steps.
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
