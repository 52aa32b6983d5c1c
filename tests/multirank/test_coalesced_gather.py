"""Gathers of several dtypes at once, which gloo would cast to the dtype of the first tensor."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.kinds import TransferKind
from graphshard.ops import collectives
from graphshard.ops.collectives import CollectiveInput
from graphshard.ops.nodes import run
from tests import ranks, recording
from tests.numerics.compare import generator, world_mesh

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool)


def _shards(rank: int) -> list[Tensor]:
    drawn = generator(rank)
    values = [100 * torch.rand(2, 3 + i, generator=drawn) for i in range(len(DTYPES))]
    return [value.to(dtype) for value, dtype in zip(values, DTYPES)]


def _gathered(alone: bool, first: int) -> list[Tensor]:
    group, world = world_mesh().get_group().group_name, dist.get_world_size()
    kind = TransferKind.ALL_GATHER
    sent = [
        CollectiveInput(source=s, rows=2 * world, wire_dtype=s.dtype, result_dtype=s.dtype)
        for s in _shards(dist.get_rank())
    ]
    sent = [*sent[first:], *sent[:first]]
    buffers = [[one] for one in sent] if alone else [sent[:2], sent[2:3], sent[3:]]
    launched = collectives.launch_bucket(run, kind, buffers, group, world)
    results: list[torch.Tensor] = []
    for inputs, buffer in zip(buffers, launched, strict=True):
        done = collectives.wait_buffer(run, kind, buffer, group, world)
        results += collectives.results_in_buffer(run, kind, inputs, done, world)
    return [*results[-first:], *results[:-first]] if first else results


def _gathered_from_each(alone: bool) -> list[list[Tensor]]:
    return [_gathered(alone, first) for first in range(len(DTYPES))]


@pytest.mark.parametrize("backend", ["gloo", recording.BACKEND])
@pytest.mark.parametrize("alone", [True, False])
def test_one_gather_of_several_dtypes_keeps_values(alone: bool, backend: str) -> None:
    expected = [torch.cat(shards) for shards in zip(*map(_shards, range(2)))]
    for gathered in chain(*ranks.run(2, _gathered_from_each, alone, backend=backend)):
        for ours, theirs in zip(gathered, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())
