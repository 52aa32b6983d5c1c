"""Gradient reductions over gloo: all-to-all in the gradient's dtype, then a local mean."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.cost.devices import HARDWARE
from graphshard.kinds import TransferKind
from graphshard.show import Dump
from tests import ranks, recording
from tests.models import MLP
from tests.numerics.compare import TOLERANCE, generator, relative_error, world_mesh

EXCHANGE, SCATTER = "_c10d_functional.all_to_all_single", "_c10d_functional.reduce_scatter_tensor"


def _gradients(hardware: Path, folder: Path) -> list[Tensor]:
    policy = graphshard.SchedulePolicy(hardware=str(hardware))
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", schedule=policy, dump=folder)
    torch.manual_seed(0)
    model = MLP()
    torch.compile(model, backend=backend)(MLP.batch(generator(dist.get_rank()))).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize(("world", "buffer_us"), [(2, 1e6), (2, 0.0), (4, 1e6)])
def test_all_to_all_reduction_equals_reduce_scatter(
    world: int, buffer_us: float, tmp_path: Path
) -> None:
    # On the recording group, reductions use gloo's reduce-scatter.
    table, hardware = HARDWARE["cpu"], tmp_path / "hardware.json"
    interconnect = dataclasses.replace(table.intra, buffer_us=buffer_us)
    hardware.write_text(dataclasses.replace(table, intra=interconnect).to_json())
    gradients = {}
    for backend, op in (("gloo", EXCHANGE), (recording.BACKEND, SCATTER)):
        folder = tmp_path / backend
        gradients[backend] = ranks.run(world, _gradients, hardware, folder, backend=backend)
        plan = Dump.load(folder / "00-backward.json").plan
        buckets = [bucket for bucket in plan.buckets if bucket.kind == TransferKind.REDUCE_SCATTER]
        num_buffers = sum(len(bucket.buffers) for bucket in buckets)
        assert (num_buffers > len(buckets)) == (buffer_us == 0)
        code = (folder / "00-backward.after.py").read_text()
        assert code.count(op) == (num_buffers if op == EXCHANGE else len(buckets))
    tolerance = 0.0 if world == 2 else TOLERANCE
    for exchanged, scattered in zip(*gradients.values()):
        errors = [relative_error(*pair) for pair in zip(exchanged, scattered, strict=True)]
        assert max(errors) <= tolerance


def _bf16_gradients(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return reduced float32 gradients, and the means of all ranks' bf16 gradients."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    backend = graphshard.backend(
        world_mesh(), compiler="aot_eager", mp_policy=policy, dump=folder / f"{dist.get_rank()}"
    )
    torch.manual_seed(0)
    model, batch = MLP(), MLP.batch(generator(dist.get_rank()))
    plain = copy.deepcopy(model).to(torch.bfloat16)
    plain(batch.to(torch.bfloat16)).backward()
    torch.compile(model, backend=backend)(batch).backward()
    return [p.grad.full_tensor() for p in model.parameters()], _means(plain)


def _means(model: nn.Module) -> list[Tensor]:
    means = []
    for param in model.parameters():
        grads = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, param.grad)
        means.append(sum(grad.float() for grad in grads) / len(grads))  # in rank order
    return means


def test_bf16_gradients_are_sent_in_bf16_and_summed_in_float32(tmp_path: Path) -> None:
    world = 4
    for reduced, expected in ranks.run(world, _bf16_gradients, tmp_path):
        for grad, mean in zip(reduced, expected, strict=True):
            assert grad.dtype == torch.float32
            assert torch.equal(grad, mean)
    plan = Dump.load(tmp_path / "0" / "00-backward.json").plan
    reductions = [t for t in plan.problem.transfers if t.kind == TransferKind.REDUCE_SCATTER]
    assert len(reductions) == len(list(MLP().parameters()))
    for transfer in reductions:
        assert (transfer.dtype, transfer.summed_in) == ("torch.bfloat16", "torch.float32")
        rows = plan.params[transfer.param].padded_rows * world
        assert transfer.num_bytes == 2 * rows * math.prod(plan.params[transfer.param].shape[1:])
        assert transfer.reduced_bytes == 2 * transfer.num_bytes // world
