"""Process groups that sharding creates in addition to the mesh's."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard._torch.distributed import group_timeout_s, process_group
from graphshard.params.sharded_param import sharded_param_of
from tests import ranks
from tests.models import MLP


def _timeouts() -> tuple[float, float]:
    """Return the timeouts of the mesh's group and of the group in which backward gathers."""
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
