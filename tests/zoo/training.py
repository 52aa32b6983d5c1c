"""Train a zoo model with graphshard and with DDP or FSDP2, and compare the two.

`compare(name, ...)` runs on a rank. Both runs use the same weights and batches. Losses and
gradients are compared at every SGD step (Adam would hide a wrong gradient scale).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

import graphshard
from graphshard.kinds import GraphKind
from tests.numerics.compare import (
    TOLERANCE,
    distances,
    generator,
    graphshard_warnings,
    train_steps,
    world_mesh,
)

from .models import ZOO

STEPS, LEARNING_RATE = 3, 0.1
# Lower bound of the norm in relative errors, as a fraction of the norm of all gradients: some
# gradients, such as those of a key's bias, are zero except for rounding.
FLOOR = 1e-4


def compare(
    name: str, *, compiler: str = "aot_eager", against: str = "ddp", steps: int = STEPS
) -> float:
    """Train the model ``name`` with graphshard and with ``against`` (a key of WAYS).

    Assert that both agree in every step, and that the model's entry states ``one_graph`` and
    ``all_used`` correctly. Return the largest relative error of a loss.
    """
    logging.set_verbosity_error()
    entry, mesh = ZOO[name], world_mesh()
    torch.manual_seed(0)
    ours = entry.build()
    theirs = copy.deepcopy(ours)
    batches = [entry.batch(generator(dist.get_rank(), step)) for step in range(steps)]
    peer = WAYS[against](theirs, mesh, entry.all_used)
    expected = train_steps(peer, theirs, batches, entry.loss, LEARNING_RATE)
    backend = graphshard.backend(mesh, compiler=compiler)
    compiled = torch.compile(ours, backend=backend, fullgraph=entry.one_graph)
    with graphshard_warnings() as texts:
        trained = train_steps(compiled, ours, batches, entry.loss, LEARNING_RATE)
    losses = [float(abs(a - b) / abs(b)) for a, b in zip(trained.losses, expected.losses)]
    assert max(losses) <= TOLERANCE, losses
    for step, (grads, other) in enumerate(zip(trained.grads, expected.grads, strict=True)):
        error, worst, _ = distances(grads, other, FLOOR)
        assert error <= TOLERANCE, f"step {step}: {worst}: relative error {error:.2e}"
    unused = {n for n in trained.grads[0] if all(grads[n] is None for grads in trained.grads)}
    assert bool(unused) != entry.all_used, unused
    num_graphs = sum(plan.graph == GraphKind.FORWARD for plan in backend.plans)
    assert (num_graphs == 1) == entry.one_graph
    assert len(texts) == (0 if entry.one_graph else 1), texts
    return max(losses)


def bfloat16_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def by_ddp(model: nn.Module, mesh: DeviceMesh, all_used: bool) -> nn.Module:
    return DistributedDataParallel(
        model, process_group=mesh.get_group(), find_unused_parameters=not all_used
    )


def by_fsdp2(model: Any, mesh: DeviceMesh, all_used: bool) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[nn.Module, DeviceMesh, bool], nn.Module]] = {
    "ddp": by_ddp,
    "fsdp2": by_fsdp2,
}
