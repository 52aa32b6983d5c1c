"""`graphshard.set_gradient_divide_factor`: gradients match FSDP2's method of the same name."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import graphshard
from tests import ranks
from tests.models import MLP
from tests.numerics.compare import compile_sharded, named_mesh, relative_error, whole, world_mesh
from tests.ranks import on_ranks


def _against_fsdp2(shape: tuple[int, ...], factor: float) -> None:
    mesh = named_mesh(shape)
    torch.manual_seed(0)
    model = MLP()
    theirs: Any = fully_shard(copy.deepcopy(model), mesh=mesh)
    theirs.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    theirs.set_gradient_divide_factor(factor)
    graphshard.shard(model, mesh)
    compiled = compile_sharded(model)
    graphshard.set_gradient_divide_factor(compiled, factor)
    ours = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(dist.get_rank())
    batches = [MLP.batch(rng) for _ in range(2)]
    for called in (compiled, theirs):
        called(batches[0]).backward()
    for name, param in theirs.named_parameters():
        mine = whole(model.get_parameter(name).grad)
        assert relative_error(mine, whole(param.grad)) <= 1e-6, name
    model.zero_grad()
    with graphshard.no_sync(model):
        compiled(batches[0]).backward()
    compiled(batches[1]).backward()
    again = compile_sharded(ours)
    for batch in batches:
        again(batch).backward()
    for name, param in ours.named_parameters():
        assert relative_error(whole(model.get_parameter(name).grad), whole(param.grad)) <= 1e-6


@pytest.mark.parametrize(("shape", "factor"), [((2,), 5.0), ((2, 2), 1.0)])
def test_gradients_match_fsdp2(shape: tuple[int, ...], factor: float) -> None:
    ranks.run(math.prod(shape), _against_fsdp2, shape, factor)


@on_ranks(1)
def test_invalid_factors_are_refused() -> None:
    model = MLP()
    for unsharded in (model, torch.compile(model)):
        with pytest.raises(ValueError, match="MLP is not sharded yet"):
            graphshard.set_gradient_divide_factor(unsharded, 1.0)
    with pytest.raises(ValueError, match="model is a str: pass the nn"):
        graphshard.set_gradient_divide_factor("model", 1.0)  # type: ignore[arg-type]
    graphshard.shard(model, world_mesh())
    for factor in (0, -1.0, math.inf, math.nan, True, "1"):
        with pytest.raises(ValueError, match="must be a positive, finite number"):
            graphshard.set_gradient_divide_factor(model, factor)  # type: ignore[arg-type]


@on_ranks(2)
def test_gradient_of_tied_weights_is_scaled_once() -> None:
    model = MLP()
    model.tied = model.up
    graphshard.shard(model, world_mesh())
    graphshard.set_gradient_divide_factor(model, 1.0)
    compiled = compile_sharded(model)
    batch = MLP.batch(torch.Generator().manual_seed(0))
    (once,) = torch.autograd.grad(compiled(batch), [model.up.weight])
    twice = torch.autograd.grad(compiled(batch), [model.up.weight, model.tied.weight])
    for grad in twice:
        assert torch.equal(whole(grad), whole(once))
