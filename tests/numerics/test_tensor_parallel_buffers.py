from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphshard
from tests.numerics.compare import whole
from tests.numerics.parallel import (
    MLP,
    assert_trains_like_fsdp2,
    batches,
    mesh_2d,
    split,
    under_fsdp2,
    under_graphshard,
)
from tests.ranks import on_ranks


class Scaled(MLP):
    scale: DTensor
    count: DTensor

    def parallelize(self, tp: DeviceMesh) -> Scaled:
        super().parallelize(tp)
        scale = torch.linspace(0.5, 2.0, 14, device=self.out.weight.device)
        count = torch.zeros((), dtype=torch.int64, device=scale.device)
        self.register_buffer("scale", distribute_tensor(scale, tp, [Shard(0)]))
        self.register_buffer("count", distribute_tensor(count, tp, [Replicate()]))
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = x + self.down(F.gelu(self.up(self.norm(x)) * self.scale.to_local()))
        return self.out(x).square().mean()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    assert all(isinstance(buffer, DTensor) for buffer in model.buffers())
    return {name: whole(buffer) for name, buffer in model.named_buffers()}


def _assert_buffers(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in _buffers(model).items():
        assert torch.equal(value, expected[name]), name


@on_ranks(4)
def test_training_matches_fsdp2() -> None:
    mesh = mesh_2d()
    model, compiled = under_graphshard(Scaled, mesh)
    eager = under_fsdp2(Scaled, mesh)
    data = batches(Scaled, mesh, 2)
    assert_trains_like_fsdp2(compiled, model, eager, data)
    assert model.count.full_tensor() == len(data)


@on_ranks(4)
def test_differing_buffers_take_values_of_first_rank() -> None:
    mesh = mesh_2d()
    expected = _buffers(split(Scaled, mesh))
    model = split(Scaled, mesh)
    is_other = mesh["dp"].get_local_rank() == 1
    model.scale.to_local().mul_(1 + is_other)
    graphshard.shard(model, mesh["dp"])
    _assert_buffers(model, expected)
    model.count.to_local().add_(int(is_other))
    graphshard.sync_buffers(model)
    _assert_buffers(model, expected)


@on_ranks(4)
def test_full_state_dict_is_loaded() -> None:
    mesh = mesh_2d()
    model = graphshard.shard(split(Scaled, mesh), mesh["dp"])
    expected = _buffers(model)
    state = graphshard.full_state_dict(model)
    for name, value in expected.items():
        assert not state or torch.equal(state[name], value), name
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    graphshard.load_full_state_dict(model, state)
    _assert_buffers(model, expected)


@on_ranks(4)
def test_meta_device_buffers_are_materialized() -> None:
    mesh = mesh_2d()
    with torch.device("meta"):
        model = Scaled().parallelize(mesh["tp"])
    graphshard.shard(model, mesh["dp"])

    def fill_parameters(model: nn.Module) -> None:
        for param in model.parameters():
            nn.init.normal_(param)

    def fill(model: nn.Module) -> None:
        fill_parameters(model)
        for buffer in model.buffers():
            buffer.fill_(3)

    with pytest.raises(ValueError, match=r"init does not write the buffer '(scale|count)'"):
        graphshard.materialize(model, fill_parameters)
    graphshard.materialize(model, fill)
    _assert_buffers(model, {"scale": torch.full((14,), 3.0), "count": torch.tensor(3)})
