"""Peak memory of full state dicts and of `materialize`, beyond shards and results."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.memory import MB, Memory, give_memory_back, peak_is_known, peak_of
from benchmarks.models import DeepMLP, parameter_bytes
from tests import ranks

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        not peak_is_known(), reason="this kernel does not report the peak memory of a process"
    ),
]
LINEARS, PARAMS = 20, 200e6
SLACK = 5 * MB  # messages, Python objects, partly used 2 MB pages


def _full_and_back() -> tuple[Memory, Memory]:
    import graphshard

    give_memory_back()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    small, model = DeepMLP(16, 2), DeepMLP.of_bytes(PARAMS, LINEARS)
    graphshard.shard(small, mesh)
    graphshard.load_full_state_dict(small, graphshard.full_state_dict(small))  # imports, connects
    params = parameter_bytes(model)
    graphshard.shard(model, mesh)
    state = {}
    gathering = peak_of(lambda: state.update(graphshard.full_state_dict(model)), params)
    scattering = peak_of(lambda: graphshard.load_full_state_dict(model, state), params)
    return gathering, scattering


def _initialize() -> Memory:
    import graphshard

    give_memory_back()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        small, model = DeepMLP(16, 2), DeepMLP.of_bytes(PARAMS, LINEARS)
    graphshard.materialize(graphshard.shard(small, mesh))
    graphshard.shard(model, mesh)
    return peak_of(lambda: graphshard.materialize(model), parameter_bytes(model))


def test_materialize_holds_one_full_module_at_a_time() -> None:
    for memory in ranks.run_fresh(2, _initialize):
        module, shards = memory.params / LINEARS, memory.params / 2
        # The full module, twice its size to initialize and check its values, and slack.
        assert memory.peak - memory.before <= shards + 3 * module + SLACK, memory


def test_full_state_dict_holds_one_full_parameter_at_a_time() -> None:
    for rank, (gathering, scattering) in enumerate(ranks.run_fresh(2, _full_and_back)):
        parameter = gathering.params / LINEARS
        result = gathering.params if rank == 0 else 0
        # The full parameter, at most its size again for this rank's shard, and slack.
        assert gathering.peak - gathering.before <= result + 2 * parameter + SLACK, gathering
        assert scattering.peak - scattering.before <= 2 * parameter + SLACK, scattering
