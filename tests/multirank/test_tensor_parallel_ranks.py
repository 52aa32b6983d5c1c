"""Differences along the tensor parallel axis: all ranks of the 2D mesh raise the same error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.ranks.call_log import call_log_of
from tests import ranks
from tests.multirank.test_call_log import assert_same, message
from tests.numerics.parallel import MLP, batches, mesh_2d, split, under_graphshard

pytestmark = pytest.mark.alone


def _freeze(model: nn.Module) -> None:
    model.get_parameter("up.weight").requires_grad_(False)


def _break(model: nn.Module) -> None:
    split_already = model.get_parameter("up.bias").detach()
    model.register_buffer("count", split_already.clone())


def _shard(change: Callable[[nn.Module], None], changed: list[int]) -> str:
    mesh = mesh_2d()
    model = split(MLP, mesh)
    if dist.get_rank() in changed:
        change(model)
    text = message(graphshard.shard, model, mesh["dp"])
    assert not any(hasattr(p, "_graphshard_sharded_param") for p in model.parameters())
    return text


@pytest.mark.parametrize("changed", [[3], [1, 3]])
def test_parameter_frozen_on_some_ranks_raises_on_all(changed: list[int]) -> None:
    messages = ranks.run_fresh(4, _shard, _freeze, changed)
    assert_same(messages, "'up.weight' differs between ranks", f"on rank {changed[0]}")


def test_buffer_on_one_rank_raises_on_all() -> None:
    messages = ranks.run_fresh(4, _shard, _break, [3])
    assert_same(messages, "'count' differs between ranks: missing on rank 0", "on rank 3")


def _step_alone(alone: int) -> str:
    mesh = mesh_2d()
    _, compiled = under_graphshard(MLP, mesh)
    data = batches(MLP, mesh, 3)
    compiled(data[0]).backward()
    dist.barrier()  # otherwise the error may reach a rank that is still in the first step

    def go_on() -> None:
        if dist.get_rank() == alone:
            with torch.no_grad():
                compiled(data[1])
        for batch in data:
            compiled(batch).backward()

    return message(go_on).splitlines()[0]


def test_evaluation_on_one_rank_raises_on_all() -> None:
    messages = ranks.run_fresh(4, _step_alone, 3)
    assert_same(messages, "calls a graph for inference", "calls graphs for training")


def _leave(alone: int) -> str:
    """Post an error on one rank while its peers wait for it in collectives over both axes."""
    mesh = mesh_2d()
    _, compiled = under_graphshard(MLP, mesh)
    data = batches(MLP, mesh, 2)
    compiled(data[0]).backward()
    dist.barrier()  # otherwise the error may reach a rank that is still in the first step
    if dist.get_rank() != alone:
        return message(lambda: [compiled(batch).backward() for batch in data]).splitlines()[0]
    assert dist.group.WORLD is not None
    call_log = call_log_of(dist.group.WORLD)
    call_log.post_error("something went wrong")
    return message(call_log.raise_posted_error, RuntimeError("of a collective"))


def test_error_on_one_rank_releases_all() -> None:
    assert_same(ranks.run_fresh(4, _leave, 1), "something went wrong")
