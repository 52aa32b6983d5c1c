from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import graphshard
from graphshard.params.memory_report import MemoryBytes
from tests import ranks
from tests.models import ConvNet
from tests.numerics.compare import compile_sharded, draw, world_mesh
from tests.ranks import on_ranks

WORLD = 2


def _reports() -> tuple[list[graphshard.MemoryReport], int, str]:
    model = ConvNet()
    compiled = compile_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters())
    found = [graphshard.memory_report(compiled, optimizer)]
    batch = draw(ConvNet.batch, 0)[dist.get_rank()]
    with graphshard.no_sync(compiled):
        compiled(batch).backward()
    found.append(graphshard.memory_report(model, optimizer))
    compiled(batch).backward()
    optimizer.step()
    found.append(graphshard.memory_report(compiled, optimizer))
    local = sum(param.to_local().nbytes for param in model.parameters())
    return found, local, str(found[-1])


def test_reported_bytes_of_a_rank_are_exact() -> None:
    full = sum(param.nbytes for param in ConvNet().parameters())
    buffers = sum(buffer.nbytes for buffer in ConvNet().buffers())
    rows = [param.shape[0] for param in ConvNet().parameters()]
    each = [param.nbytes // param.shape[0] for param in ConvNet().parameters()]
    padded = sum(-(-n // WORLD) * size for n, size in zip(rows, each))
    steps = 4 * len(rows)  # AdamW keeps a 4-byte step counter per parameter
    gathered = WORLD * padded
    for (before, between, after), local, text in ranks.run(WORLD, _reports):
        assert before.parameters == before.gradients == MemoryBytes(full, full)
        assert before.optimizer == before.sums == before.gathered == (0, 0)
        assert between.parameters == between.gradients == after.parameters == (padded, full)
        assert between.sums == (full, 0) and after.sums == (0, 0)
        assert after.buffers == (buffers, buffers)
        assert after.optimizer.unsharded == 2 * full + steps
        assert after.optimizer.rank == 2 * local + steps
        assert 0 < after.gathered.rank <= gathered
        assert after.total.rank == sum(held.rank for held in vars(after).values())
        assert re.search(rf"parameters +{padded / 1e6:.3f} +{full / 1e6:.3f}\n", text)


def _offloaded() -> graphshard.MemoryReport:
    model = ConvNet()
    kept = {"conv1.*": {"offload_policy": OffloadPolicy()}}
    compiled = compile_sharded(model, offload_policy=CPUOffloadPolicy(), overrides=kept)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    compiled(draw(ConvNet.batch, 0)[dist.get_rank()]).backward()
    optimizer.step()
    return graphshard.memory_report(compiled, optimizer)


def test_reported_bytes_on_the_host_are_exact() -> None:
    for report in ranks.run(2, _offloaded):
        held = report.parameters.rank + report.gradients.rank + report.optimizer.rank
        shard = -(-ConvNet().conv1.weight.shape[0] // 2) * ConvNet().conv1.weight[0].nbytes
        assert held - 3 * shard <= report.on_host.rank < held
        assert f"total, on the host  {report.on_host.rank / 1e6:.3f}" in re.sub(
            " {3,}", "  ", str(report)
        )


@on_ranks(2)
def test_gathered_bytes_are_known_for_models_that_reuse_a_graph() -> None:
    first, second = ConvNet(), ConvNet()
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    gathered = []
    for model in (first, second, copy.deepcopy(first)):
        torch.compile(model, backend=backend)(draw(ConvNet.batch, 0)[dist.get_rank()])
        gathered.append(graphshard.memory_report(model).gathered)
    assert backend.metrics()["num_compiles"] == 1
    assert gathered[0].rank > 0 and gathered == [gathered[0]] * 3


@on_ranks(2)
def test_optimizer_state_in_containers_is_counted() -> None:
    model = nn.Linear(4, 2, bias=False)
    compile_sharded(model)(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    weight = model.weight
    history = [torch.zeros_like(weight), torch.zeros_like(weight)]
    optimizer.state[weight] = {"history": history, "ema": {"slow": torch.zeros(3)}}
    report = graphshard.memory_report(model, optimizer)
    assert report.optimizer == MemoryBytes(2 * 16 + 12, 2 * 32 + 12)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="model is a list"):
        graphshard.memory_report([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer is a Linear"):
        graphshard.memory_report(nn.Linear(2, 2), nn.Linear(2, 2))  # type: ignore[arg-type]
