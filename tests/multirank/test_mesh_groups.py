"""Timeouts of the groups that sharding creates, and names of groups in graphs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard._torch.distributed import (
    fake_ranks,
    group_timeout_s,
    name_for_graphs,
    new_local_group,
    process_group,
)
from graphshard.params.sharded_param import sharded_param_of
from tests import ranks
from tests.models import MLP


def _timeouts() -> tuple[float, float]:
    dist.new_group([0])  # the other ranks are in fewer groups
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = graphshard.shard(MLP(), mesh, reshard_after_forward=2)
    sharded_param = sharded_param_of(next(model.parameters()))
    assert sharded_param is not None and sharded_param.spec.regather_group is not None
    neighbors = process_group(sharded_param.spec.regather_group)
    assert neighbors.size() == 2
    timeout_s = group_timeout_s(neighbors)
    dist.destroy_process_group(neighbors)
    graphshard.shard(MLP(), mesh, reshard_after_forward=2)  # creates the group again
    return group_timeout_s(process_group(mesh.get_group().group_name)), timeout_s


def test_regather_group_has_the_timeout_of_the_mesh() -> None:
    # In fresh ranks: such groups are created only once, with the timeout of the first mesh.
    assert ranks.run_fresh(4, _timeouts) == [(77.0, 77.0)] * 4


def test_new_local_group_does_not_split_the_default_group() -> None:
    device, timeout = torch.device("cuda:0"), timedelta(seconds=7)
    with fake_ranks(4), mock.patch.object(dist.distributed_c10d, "_get_split_source") as split:
        world: Any = dist.group.WORLD
        world.bound_device_id = device
        groups = [new_local_group((0, 2), timeout) for _ in range(2)]
        assert len({group.group_name for group in groups}) == 2
        assert not split.called and world.bound_device_id == device


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
