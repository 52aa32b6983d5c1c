"""Shards of a parameter: rows are split as by `torch.chunk`, and padded to one shape per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from graphshard.params.layout import Layout
from graphshard.params.mesh_groups import MeshGroups


@dataclass(frozen=True)
class _Mesh:
    """The part of DeviceMesh that a layout uses."""

    world_size: int
    rank: int
    ndim: int = 1
    device_type: str = "cpu"

    def size(self, axis: int) -> int:
        return self.world_size

    def get_local_rank(self, axis: int) -> int:
        return self.rank


def _layouts(shape: tuple[int, ...], world_size: int) -> list[Layout]:
    """Return the layout of one parameter on every rank."""
    meshes: list[Any] = [_Mesh(world_size, rank) for rank in range(world_size)]
    return [Layout(torch.Size(shape), MeshGroups(mesh)) for mesh in meshes]


worlds = st.integers(1, 9)
split_shapes = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
whole_shapes = st.sampled_from([(), (0,), (0, 3), (5, 0), (2, 0, 3)])


@given(split_shapes, worlds)
def test_rows_are_split_as_by_chunk(shape: tuple[int, ...], world_size: int) -> None:
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    chunks = [*full.chunk(world_size), *[full[:0]] * world_size][:world_size]
    for layout, chunk in zip(_layouts(shape, world_size), chunks):
        assert torch.equal(full[layout.local_rows], chunk)
        assert layout.num_local_rows == len(chunk)
        assert layout.placements == (Shard(0),)


@given(split_shapes, worlds)
def test_padded_shards_have_one_shape_and_hold_all_rows(
    shape: tuple[int, ...], world_size: int
) -> None:
    full = torch.randn(shape)
    layouts = _layouts(shape, world_size)
    shards = [layout.padded_shard(full) for layout in layouts]
    assert {shard.shape for shard in shards} == {layouts[0].padded_shape}
    assert all(shard.is_contiguous() for shard in shards)
    gathered = torch.cat(shards)
    assert torch.equal(gathered[: shape[0]], full)
    assert not gathered[shape[0] :].any()
    assert len(gathered) - shape[0] < world_size
    for layout, shard in zip(layouts, shards):
        assert torch.equal(layout.local_view(shard), full[layout.local_rows])
        assert layout.local_view(shard).data_ptr() == shard.data_ptr() or not layout.num_local_rows


@given(whole_shapes, worlds)
def test_scalars_and_empty_parameters_are_replicated(
    shape: tuple[int, ...], world_size: int
) -> None:
    full = torch.randn(shape)
    for layout in _layouts(shape, world_size):
        assert layout.rows is None and layout.placements == (Replicate(),)
        assert layout.padded_shape == full.shape
        shard = layout.padded_shard(full)
        assert torch.equal(shard, full) and shard is not full
        assert layout.local_view(shard) is shard


@given(st.permutations([0, 1, 2]), worlds)
def test_a_strided_parameter_makes_contiguous_shards(order: list[int], world_size: int) -> None:
    full = torch.randn(5, 4, 3).permute(order)
    shards = []
    for layout in _layouts(tuple(full.shape), world_size):
        shards.append(layout.padded_shard(full))
        assert shards[-1].is_contiguous()
    assert torch.equal(torch.cat(shards)[: len(full)], full)


@pytest.mark.parametrize("shape", [(5, 3), ()])
def test_a_shard_shares_no_memory_with_the_full_parameter(shape: tuple[int, ...]) -> None:
    full = torch.zeros(shape)
    for layout in _layouts(shape, 2):
        layout.padded_shard(full).fill_(1.0)
    assert not full.any()


def test_a_shard_does_not_require_a_gradient() -> None:
    full = torch.randn(5, 3, requires_grad=True)
    assert not any(layout.padded_shard(full).requires_grad for layout in _layouts((5, 3), 2))
