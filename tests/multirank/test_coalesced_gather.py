"""Gathers of tensors of several dtypes in one collective, over gloo and over the recording group: gloo
itself casts all of a coalesced gather to the first one's dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.kinds import TransferKind
from graphshard.ops import collectives
from graphshard.ops.collectives import CollectiveInput
from graphshard.ops.emitter import run
from tests import ranks, recording
from tests.numerics.compare import generator, world_mesh

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool)


def _shards(rank: int) -> list[Tensor]:
    drawn = generator(rank)
    values = [100 * torch.rand(2, 3 + i, generator=drawn) for i in range(len(DTYPES))]
    return [of.to(dtype) for of, dtype in zip(values, DTYPES)]


def _gathered(alone: bool, first: int) -> list[Tensor]:
    group, world = world_mesh().get_group().group_name, dist.get_world_size()
    pieces = [CollectiveInput(s, 2 * world, s.dtype, s.dtype) for s in _shards(dist.get_rank())]
    pieces = [*pieces[first:], *pieces[:first]]
    parcels = [[piece] for piece in pieces] if alone else [pieces[:2], pieces[2:3], pieces[3:]]
    launched = collectives.send(run, TransferKind.ALL_GATHER, parcels, group, world)
    found: list[torch.Tensor] = []
    for parcel, buffer in zip(parcels, launched, strict=True):
        done = collectives.receive(run, TransferKind.ALL_GATHER, buffer, group, world)
        found += collectives.copy_out(run, TransferKind.ALL_GATHER, parcel, done, world)
    return [*found[-first:], *found[:-first]] if first else found


@pytest.mark.parametrize("backend", ["gloo", recording.BACKEND])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("first", range(len(DTYPES)))
def test_several_dtypes_in_one_gather(first: int, alone: bool, backend: str) -> None:
    expected = [torch.cat(of) for of in zip(*map(_shards, range(2)))]
    for found in ranks.run(2, _gathered, alone, first, backend=backend):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())
