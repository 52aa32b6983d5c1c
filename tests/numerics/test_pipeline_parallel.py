"""Pipeline stages as separate models, each sharded over its own data-parallel ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleLoopedBFS
from torch.distributed.pipelining._backward import stage_backward_input

import graphshard
from graphshard.kinds import TransferKind
from tests import recording
from tests.numerics.compare import generator, whole
from tests.ranks import on_ranks

STEPS, MICROBATCHES = 2, 4


class ReducingOnce(PipelineStage):
    runs_backwards_reversed = False

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        last = 0 if self.runs_backwards_reversed else self.chunks - 1
        with nullcontext() if fwd_chunk_id == last else graphshard.no_sync(self.submod):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class ReducingOnceReversed(ReducingOnce):
    runs_backwards_reversed = True


def _parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5)),
        nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3)),
    ]


def _batch(step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    rng = generator(step, dp_rank)
    return torch.randn(8, 6, generator=rng), torch.randn(8, 3, generator=rng)


def _on_one_rank() -> nn.Module:
    model = nn.Sequential(*_parts())
    optim = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for dp_rank in range(2):
            batch, target = _batch(step, dp_rank)
            (F.mse_loss(model(batch), target) / 2).backward()
        optim.step()
        optim.zero_grad()
    return model


@on_ranks(4, backend="recording")
def test_1f1b_trains_like_one_rank() -> None:
    reduced_each, reduced_once = _train(PipelineStage), _train(ReducingOnce)
    assert reduced_each == MICROBATCHES * reduced_once > 0


@on_ranks(4, backend="recording")
def test_looped_bfs_trains_like_one_rank() -> None:
    assert _train(ReducingOnceReversed, _looped_bfs) > 0


def _looped_bfs(stage: PipelineStage, *args: Any) -> ScheduleLoopedBFS:
    return ScheduleLoopedBFS([stage], *args)


@pytest.mark.parametrize("compiles", [True, False])
@on_ranks(1)
def test_split_backward_is_refused(compiles: bool) -> None:
    mesh, part = init_device_mesh("cpu", (1,)), _parts()[1]
    # Schedules themselves refuse what ``torch.compile`` returns, but not this.
    if compiles:
        part.compile(backend=graphshard.backend(mesh, compiler="aot_eager"))
    else:
        graphshard.shard(part, mesh)
    x = torch.ones(2, 5, requires_grad=True)
    loss = part(x).square().mean()
    with pytest.raises(RuntimeError) as raised:
        stage_backward_input([loss], None, [x], part.parameters())
    errors = [raised.value, raised.value.__cause__]  # torch 2.13 wraps errors of the backward
    assert any("'0.weight' is sharded, so it would get no gradient" in str(e) for e in errors)
    loss.backward()
    assert x.grad is not None and all(param.grad is not None for param in part.parameters())


def _train(kind: Any, make_schedule: Any = Schedule1F1B) -> int:
    """Compare with one rank; return the number of reductions in the last step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    rank = pp.get_local_rank()
    part = _parts()[rank]
    compiled = torch.compile(part, backend=graphshard.backend(dp, compiler="aot_eager"))
    stage = kind(compiled, rank, pp.size(), torch.device("cpu"), group=pp.get_group())
    schedule = make_schedule(stage, MICROBATCHES, F.mse_loss)
    optim = torch.optim.SGD(part.parameters(), 0.1)
    for step in range(STEPS):
        recording.clear()
        batch, target = _batch(step, dp.get_local_rank())
        schedule.step(batch) if rank == 0 else schedule.step(target=target)
        reductions = [e for e in recording.collectives() if e.kind == TransferKind.REDUCE_SCATTER]
        optim.step()
        optim.zero_grad()
    for param, expected in zip(part.parameters(), _on_one_rank()[rank].parameters(), strict=True):
        torch.testing.assert_close(whole(param.detach()), expected.detach())
    return len(reductions)
