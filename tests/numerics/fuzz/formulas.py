"""Formulas of `x` `[rows, length, dim]` and parameters, computed by leaves of a fuzzed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Formula:
    """Function of `x` and some parameters.

    Attributes:
        compute: the function; its result has the shape of `x`.
        shapes: function from dim to the shapes of the parameters.
        jumps: whether a rounding error in `x` can change the result substantially.
    """

    compute: Callable[..., Tensor]
    shapes: Callable[[int], Shapes]
    jumps: bool = False


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return grads[0] * gain**3, (grads[0] * x * 3 * gain**2).sum((0, 1))


def _vector(dim: int) -> Shapes:
    return ((dim,),)


def _square(dim: int) -> Shapes:
    return ((dim, dim),)


def _two_vectors(dim: int) -> Shapes:
    return ((dim,), (dim,))


def _in_place(x: Tensor, gain: Tensor, row: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(gain)
    y[:, 0] += row
    y[..., -1:].sub_(0.5)
    return y.clamp_(-2, 2)


def _in_place_on_a_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).add_(1).relu_()


def _filled(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = (x @ weight).sum(1)
    return x + y


def _chunks(x: Tensor, weight: Tensor) -> Tensor:
    first, second = weight.chunk(2)
    return x @ first + second.mean(0)


def _slices(x: Tensor, weight: Tensor) -> Tensor:
    flat = weight.view(-1)
    dim = x.shape[-1]
    return x * flat[:dim] + flat[dim:]


def _scale_without_grad(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = weight.abs().max() + 1
    return x @ (weight / scale)


def _sorted(x: Tensor, gain: Tensor) -> Tensor:
    values, order = x.sort(-1)
    return values * gain + x.gather(-1, order.flip(-1))


def _scattered(x: Tensor, weight: Tensor) -> Tensor:
    rows = torch.arange(x.shape[-1], device=x.device) // 2
    return x + torch.zeros_like(weight).index_add(0, rows, weight)[0]


def _attended(x: Tensor, queries: Tensor) -> Tensor:
    scores = torch.einsum("qd,btd->bqt", queries, x).softmax(-1)
    return x + (scores @ x).sum(1, keepdim=True)


def _top(x: Tensor, gain: Tensor) -> Tensor:
    values, where = x.topk(2, dim=-1)
    return x + values.sum(-1, keepdim=True) * gain[where].sum(-1, keepdim=True)


def _complex(x: Tensor, real: Tensor, imag: Tensor) -> Tensor:
    turned = torch.complex(real.float(), imag.float()) * x.float()
    return (turned * turned.conj()).real.to(x.dtype)


FORMULAS: dict[str, Formula] = {
    "gain": Formula(lambda x, g: x * g, _vector),
    "scalar": Formula(lambda x, s: x * s, lambda dim: ((),)),
    "row": Formula(lambda x, r: x + r, lambda dim: ((1, dim),)),
    "empty": Formula(lambda x, e: x + e.sum(), lambda dim: ((0, dim),)),
    "no_columns": Formula(lambda x, e: x + e.sum(), lambda dim: ((dim, 0),)),
    "turned": Formula(lambda x, w: x @ w.t(), _square),
    "both_ways": Formula(lambda x, w: F.linear(x @ w, w), _square),
    "slices": Formula(_slices, lambda dim: ((2, dim),)),
    "chunks": Formula(_chunks, lambda dim: ((2 * dim, dim),)),
    "expanded": Formula(lambda x, w: x + w.expand(x.shape[0], -1, -1), lambda dim: ((1, 1, dim),)),
    "permuted": Formula(
        lambda x, w: x * w.permute(2, 0, 1).reshape(-1), lambda dim: ((1, dim, 1),)
    ),
    "stacked": Formula(lambda x, a, b: x * torch.stack([a, b, a]).sum(0), _two_vectors),
    "joined": Formula(lambda x, a, b: x + torch.cat([b, a])[: a.numel()], _two_vectors),
    "normalized": Formula(lambda x, w: x @ (w / w.norm(dim=1, keepdim=True)), _square),
    "whole_norm": Formula(lambda x, w: x @ w / (w.norm() + 1), _square),
    "penalty": Formula(lambda x, w: x * w.square().mean().sqrt(), lambda dim: ((3, dim),)),
    "outer": Formula(lambda x, a, b: x @ (a.unsqueeze(1) * b), _two_vectors),
    "einsum": Formula(lambda x, w: torch.einsum("btd,ed->bte", x, w), _square),
    "cubed": Formula(_Cubed.apply, _vector),
    "softmax": Formula(lambda x, g: (x * g).softmax(-1), _vector),
    "logsumexp": Formula(lambda x, g: x - (x * g).logsumexp(-1, keepdim=True), _vector),
    "cumsum": Formula(lambda x, g: (x * g).cumsum(1) / x.shape[1], _vector),
    "norms": Formula(lambda x, g: x / (x.norm(dim=-1, keepdim=True) + 1) + g, _vector),
    "variance": Formula(lambda x, g: x * g / (x.var(dim=-1, keepdim=True) + 1).sqrt(), _vector),
    "over_rows": Formula(lambda x, g: x - (x * g).mean((0, 1)), _vector),
    "attended": Formula(_attended, lambda dim: ((3, dim),)),
    "in_place": Formula(_in_place, _two_vectors),
    "in_place_product": Formula(_in_place_on_a_product, _square, jumps=True),
    "filled": Formula(_filled, _square),
    "scattered": Formula(_scattered, _square),
    "no_grad_scale": Formula(_scale_without_grad, _square),
    "detached": Formula(lambda x, g: x.detach() * g + x * g.detach(), _vector),
    "argmax": Formula(lambda x, w: x + w[x.argmax(-1)], _square, jumps=True),
    "looked_up": Formula(lambda x, w: x + F.embedding(x.argmin(-1), w), _square, jumps=True),
    "largest": Formula(lambda x, g: x + (x * g).amax(1, keepdim=True), _vector, jumps=True),
    "sorted": Formula(_sorted, _vector, jumps=True),
    "top": Formula(_top, _vector, jumps=True),
    "where": Formula(lambda x, a, b: torch.where(x > a, x, b), _two_vectors, jumps=True),
    "complex": Formula(_complex, _two_vectors),
    "fourier": Formula(lambda x, g: torch.fft.ifft(torch.fft.fft(x.double())).real.to(x) * g,
                       _vector),
}  # fmt: skip


class Computed(nn.Module):
    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.formula = FORMULAS[name]
        self.names = [f"p{i}" for i, _ in enumerate(self.formula.shapes(dim))]
        for key, shape in zip(self.names, self.formula.shapes(dim)):
            self.register_parameter(key, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula.compute(x, *[getattr(self, name) for name in self.names])
