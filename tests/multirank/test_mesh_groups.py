"""Timeouts of the groups that sharding creates, and names of groups in graphs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard._torch.distributed import (
    fake_ranks,
    group_timeout_s,
    name_for_graphs,
    process_group,
)
from graphshard.params.sharded_param import sharded_param_of
from tests import ranks
from tests.models import MLP


def _timeouts() -> tuple[float, float]:
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = graphshard.shard(MLP(), mesh, reshard_after_forward=2)
    sharded_param = sharded_param_of(next(model.parameters()))
    assert sharded_param is not None and sharded_param.spec.regather_group is not None
    neighbors = process_group(sharded_param.spec.regather_group)
    assert neighbors.size() == 2
    return group_timeout_s(process_group(mesh.get_group().group_name)), group_timeout_s(neighbors)


def test_regather_group_has_the_timeout_of_the_mesh() -> None:
    # In fresh ranks: such groups are created only once, with the timeout of the first mesh.
    assert ranks.run_fresh(4, _timeouts) == [(77.0, 77.0)] * 4


def test_name_for_graphs_identifies_one_group() -> None:
    with fake_ranks(4):
        assert name_for_graphs(dist.group.WORLD) == dist.group.WORLD.group_name
        first, _, second = (dist.new_group([0, 1]) for _ in range(3))
        names = [name_for_graphs(group) for group in (first, second, first)]
        assert names == ["graphshard_0", "graphshard_1", "graphshard_0"]
        assert process_group(names[0]) is first and process_group(names[1]) is second
        dist.destroy_process_group(first)
        del first
        assert name_for_graphs(dist.new_group([0, 1])) == "graphshard_2"
        with pytest.raises(RuntimeError, match="graphshard_0"):  # not another group
            process_group(names[0])
    with fake_ranks(4):  # as in a job that recovers from an error
        assert name_for_graphs(dist.new_group([2, 3, 0])) == "graphshard_0"
