"""`graphshard.sync_buffers`: running statistics bitwise equal to DDP's, and other buffers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphshard
from tests import ranks
from tests.models import ConvNet
from tests.multirank.test_call_log import assert_same, message
from tests.numerics.compare import compile_sharded, draw, named_mesh, sgd, world_mesh
from tests.ranks import on_ranks

ACCUMULATED = 2
"""Number of microbatches per step."""


def _train(model: Any, optimizer: torch.optim.Optimizer, syncs: bool) -> list[torch.Tensor]:
    """Train with two microbatches per step, the first under ``no_sync``; return the buffers."""
    is_ddp = isinstance(model, DistributedDataParallel)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(ACCUMULATED):
            no_sync = model.no_sync if is_ddp else lambda: graphshard.no_sync(model)
            is_last = part == ACCUMULATED - 1
            with nullcontext() if is_last else no_sync():
                if syncs and part == 0:
                    graphshard.sync_buffers(model)
                batch = draw(ConvNet.batch, step * ACCUMULATED + part)[dist.get_rank()]
                model(batch).backward()
        optimizer.step()
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("syncs", [True, False])
@on_ranks(2)
def test_running_statistics_match_ddp(syncs: bool) -> None:
    # If `syncs`, DDP broadcasts buffers, and ``sync_buffers`` is called at the same points.
    model = ConvNet()
    reference: Any = copy.deepcopy(model)
    ddp = DistributedDataParallel(reference, broadcast_buffers=syncs)
    theirs = _train(ddp, sgd(reference), syncs=False)
    ours = _train(compile_sharded(model), sgd(model), syncs)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs))
    graphshard.sync_buffers(model)
    for (name, ours_now), before in zip(model.named_buffers(), ours):
        copies = [torch.empty_like(before) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, before)
        assert torch.equal(ours_now, copies[0]), name
        if "running" in name:
            assert not torch.equal(copies[0], copies[1]), name


class _Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        value = dist.get_rank() + 1
        self.register_buffer("flag", torch.tensor(value == 1))
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("bf16", torch.full((3,), value, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.full((2,), value * 1j), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).mul(value).view(2, 3).t())
        self.register_buffer("wide", torch.full((1, 2), float(value)).expand(4, 2))
        self.register_buffer("empty", torch.empty(0))


@on_ranks(4)
def test_sync_buffers_copies_buffers_of_every_kind() -> None:
    mesh = named_mesh((2, 2))
    model = graphshard.shard(_Kinds(), mesh, sync_module_states=False)
    graphshard.sync_buffers(torch.compile(model))
    assert model.flag and model.count == 1 and model.bf16.tolist() == [1.0] * 3
    assert model.phase.tolist() == [1j] * 2
    assert torch.equal(model.turned, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(model.wide, torch.ones(4, 2))


def _sync_alone() -> str:
    model = ConvNet()
    graphshard.sync_buffers(model)  # no effect: the model is not sharded yet
    graphshard.shard(model, world_mesh())
    if dist.get_rank() == 1:
        model.norm1.register_buffer("other", torch.ones(3))
    return message(graphshard.sync_buffers, model)


def test_buffers_that_differ_between_ranks_raise_on_all() -> None:
    assert_same(ranks.run_fresh(2, _sync_alone), "a broadcast of buffers", "norm1.other")


def test_sync_buffers_refuses_non_module() -> None:
    with pytest.raises(ValueError, match="model is a list: pass the nn"):
        graphshard.sync_buffers([])  # type: ignore[arg-type]


@on_ranks(2)
def test_second_sharding_keeps_statistics_of_each_rank() -> None:
    model, rank = graphshard.shard(ConvNet(), world_mesh()), dist.get_rank()
    model.later = nn.BatchNorm2d(5)
    for norm in (model.norm1, model.later):
        norm.running_mean.fill_(rank)
    graphshard.shard(model, world_mesh())
    assert bool((model.norm1.running_mean == rank).all())
    assert bool((model.later.running_mean == 0).all())
