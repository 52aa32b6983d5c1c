"""`torch.func` transforms of a sharded model's forward match those of the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from tests.ranks import on_ranks

Forward = Callable[[Tensor], Tensor]


def _jvp(forward: Forward, x: Tensor) -> Tensor:
    return torch.func.jvp(forward, (x,), (torch.ones_like(x),))[1]


def _grad(forward: Forward, x: Tensor) -> Tensor:
    return torch.func.grad(lambda value: forward(value).square().sum())(x)


def _per_sample(forward: Forward, x: Tensor) -> Tensor:
    return torch.func.vmap(forward)(x)


def _forward_mode_jacobian(forward: Forward, x: Tensor) -> Tensor:
    return torch.func.jacfwd(forward)(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", [_jvp, _grad, _per_sample, _forward_mode_jacobian])
@on_ranks(2)
def test_transform_of_sharded_model_matches_unsharded_model(
    transform: Callable[[Forward, Tensor], Tensor], compiled: bool
) -> None:
    # Dynamo does not trace a forward inside of jvp, vmap and similar transforms.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    graphshard.shard(model, compiler="aot_eager")
    backend = graphshard.backend(compiler="aot_eager")
    forward = torch.compile(model, backend=backend) if compiled else model
    x = torch.randn(4, 7)
    expected, actual = transform(reference, x), transform(forward, x)
    torch.testing.assert_close(actual, expected)
    if expected.requires_grad:
        expected.sum().backward()
        actual.sum().backward()
    for param, full in zip(model.parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (full.grad is None)
        if full.grad is not None:
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), full.grad)
