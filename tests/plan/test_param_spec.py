"""Shards of a parameter: rows split as by `torch.chunk`, padded to the same shape on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from graphshard.params.mesh import MeshGroups
from graphshard.params.param_spec import ParamSpec


@dataclass(frozen=True)
class _Mesh:
    world_size: int
    rank: int
    ndim: int = 1
    device_type: str = "cpu"

    def size(self, axis: int) -> int:
        return self.world_size

    def get_local_rank(self, axis: int) -> int:
        return self.rank


def _specs(shape: tuple[int, ...], world_size: int) -> list[ParamSpec]:
    meshes: list[Any] = [_Mesh(world_size, rank) for rank in range(world_size)]
    return [ParamSpec(torch.Size(shape), MeshGroups(mesh)) for mesh in meshes]


worlds = st.integers(1, 9)
split_shapes = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
whole_shapes = st.sampled_from([(), (0,), (0, 3), (5, 0), (2, 0, 3)])


@given(split_shapes, worlds)
def test_rows_are_split_as_by_chunk(shape: tuple[int, ...], world_size: int) -> None:
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    chunks = [*full.chunk(world_size), *[full[:0]] * world_size][:world_size]
    for spec, chunk in zip(_specs(shape, world_size), chunks):
        assert torch.equal(full[spec.local_rows], chunk)
        assert spec.num_local_rows == len(chunk)
        assert spec.placements == (Shard(0),)


@given(split_shapes, worlds)
def test_padded_shards_have_one_shape_and_hold_all_rows(
    shape: tuple[int, ...], world_size: int
) -> None:
    full = torch.randn(shape)
    specs = _specs(shape, world_size)
    shards = [spec.padded_shard(full) for spec in specs]
    assert {shard.shape for shard in shards} == {specs[0].padded_shape}
    assert all(shard.is_contiguous() for shard in shards)
    gathered = torch.cat(shards)
    assert torch.equal(gathered[: shape[0]], full)
    assert not gathered[shape[0] :].any()
    assert len(gathered) - shape[0] < world_size
    for spec, shard in zip(specs, shards):
        assert torch.equal(spec.local_view(shard), full[spec.local_rows])
        assert spec.local_view(shard).data_ptr() == shard.data_ptr() or not spec.num_local_rows


@given(whole_shapes, worlds)
def test_scalars_and_empty_parameters_are_replicated(
    shape: tuple[int, ...], world_size: int
) -> None:
    full = torch.randn(shape)
    for spec in _specs(shape, world_size):
        assert spec.rows is None and spec.placements == (Replicate(),)
        assert spec.padded_shape == full.shape
        shard = spec.padded_shard(full)
        assert torch.equal(shard, full) and shard is not full
        assert spec.local_view(shard) is shard


@given(st.permutations([0, 1, 2]), worlds)
def test_a_strided_parameter_makes_contiguous_shards(order: list[int], world_size: int) -> None:
    full = torch.randn(5, 4, 3).permute(order)
    shards = []
    for spec in _specs(tuple(full.shape), world_size):
        shards.append(spec.padded_shard(full))
        assert shards[-1].is_contiguous()
    assert torch.equal(torch.cat(shards)[: len(full)], full)


@pytest.mark.parametrize("shape", [(5, 3), ()])
def test_shard_shares_no_memory_with_full_parameter(shape: tuple[int, ...]) -> None:
    full = torch.zeros(shape)
    for spec in _specs(shape, 2):
        spec.padded_shard(full).fill_(1.0)
    assert not full.any()


def test_shard_does_not_require_grad() -> None:
    full = torch.randn(5, 3, requires_grad=True)
    assert not any(spec.padded_shard(full).requires_grad for spec in _specs((5, 3), 2))
