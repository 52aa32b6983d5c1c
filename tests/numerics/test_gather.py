"""Gathers of tensors of several dtypes in one collective, over gloo and over the recording group: gloo
itself takes all of a coalesced gather for tensors of the first one's dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphshard import wires
from graphshard.emit import run
from graphshard.plan import ALL_GATHER
from graphshard.wires import Piece
from tests import ranks, recording
from tests.numerics.compare import generator, world_mesh

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool)


def _shards(rank: int) -> list[Tensor]:
    drawn = generator(rank)
    return [torch.randint(2, (2, 3 + i), generator=drawn).to(d) for i, d in enumerate(DTYPES)]


def _gathered(alone: bool) -> list[Tensor]:
    group, world = world_mesh().get_group().group_name, dist.get_world_size()
    pieces = [Piece(s, 2 * world, s.dtype, s.dtype) for s in _shards(dist.get_rank())]
    parcels = [[piece] for piece in pieces] if alone else [pieces[:2], pieces[2:]]
    launched = wires.send(run, ALL_GATHER, parcels, group, world)
    pairs = zip(parcels, launched, strict=True)
    received = [wires.receive(run, ALL_GATHER, *pair, group, world) for pair in pairs]
    return [full for parcel in received for full in parcel]


@pytest.mark.parametrize("backend", ["gloo", recording.BACKEND])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_several_dtypes_in_one_gather(world: int, alone: bool, backend: str) -> None:
    expected = [torch.cat(of) for of in zip(*map(_shards, range(world)))]
    for found in ranks.run(world, _gathered, alone, backend=backend):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())
