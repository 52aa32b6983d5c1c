"""Train a zoo model with graphshard and with DDP or FSDP2, and compare the two.

`compare(name, ...)` runs on a rank. Both trainings use the same weights and batches. Losses and
gradients are compared at every step, under SGD, since Adam would hide a gradient of wrong scale.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

import graphshard
from graphshard.kinds import GraphKind

from .models import ZOO, Batch

STEPS, LEARNING_RATE = 5, 0.1
# Lower bound of the divisor in relative errors of gradients, relative to the norm of all gradients.
# Some gradients are zero but for rounding, such as those of a key's bias.
FLOOR = 1e-4


@dataclass
class Trace:
    """Losses and full gradients of each step; None for parameters without a gradient."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The differences between our training and the other one, on one rank.

    Attributes:
        loss_error: largest relative difference of a step's loss.
        gradient_error: largest relative difference (in norms) of a gradient; infinite if a
            parameter has a gradient in only one training.
        worst: step and parameter of ``gradient_error``.
        unused: parameters that never had a gradient.
        num_graphs: number of forward graphs that were compiled.
        warnings: warnings of graphshard.
    """

    loss_error: float
    gradient_error: float
    worst: str
    unused: tuple[str, ...]
    num_graphs: int
    warnings: tuple[str, ...]


def compare(
    name: str,
    *,
    compiler: str = "aot_eager",
    against: str = "ddp",
    steps: int = STEPS,
) -> Comparison:
    """Train the model ``name`` with graphshard and with ``against`` (a key of WAYS)."""
    logging.set_verbosity_error()
    entry, mesh = ZOO[name], init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    ours = entry.build()
    theirs = copy.deepcopy(ours)
    batches = [_batch(name, step) for step in range(steps)]
    expected = train(WAYS[against](theirs, mesh, entry.all_used), theirs, batches)
    backend = graphshard.backend(mesh, compiler=compiler)
    compiled = torch.compile(ours, backend=backend, fullgraph=entry.one_graph)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = train(compiled, ours, batches)
    num_graphs = sum(plan.graph == GraphKind.FORWARD for plan in backend.plans)
    return _compared(trace, expected, num_graphs, [str(w.message) for w in caught])


def compare_with_fsdp2(name: str, steps: int) -> Comparison:
    """Train the model ``name`` with graphshard and with FSDP2."""
    return compare(name, against="fsdp2", steps=steps)


def _batch(name: str, step: int) -> Batch:
    """Return this rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return ZOO[name].batch(generator)


def bfloat16_autocast() -> AbstractContextManager[Any]:
    """Return the autocast context for training in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


def train(call: Callable[..., Any], model: nn.Module, batches: list[Batch]) -> Trace:
    """Train ``model`` with SGD; ``call`` runs forward. The optimizer precedes the first forward."""
    trace = Trace()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for batch in batches:
        loss = call(**batch).loss
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append({name: _full(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return trace


def _full(gradient: Tensor | None) -> Tensor | None:
    """Return a full copy of a gradient, or None; a collective if the gradient is sharded."""
    if gradient is None:
        return None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def by_ddp(model: nn.Module, mesh: DeviceMesh, all_used: bool) -> nn.Module:
    """Return the model wrapped in DDP."""
    return DistributedDataParallel(
        model, process_group=mesh.get_group(), find_unused_parameters=not all_used
    )


def by_fsdp2(model: Any, mesh: DeviceMesh, all_used: bool) -> nn.Module:
    """Shard each layer, then the model, with FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[nn.Module, DeviceMesh, bool], nn.Module]] = {
    "ddp": by_ddp,
    "fsdp2": by_fsdp2,
}


def _compared(ours: Trace, theirs: Trace, num_graphs: int, messages: list[str]) -> Comparison:
    """Return the largest differences between two trainings."""
    losses = [abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    errors = [
        (error, f"step {step}: {name}")
        for step, (mine, other) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
        for name, error in gradient_errors(mine, other).items()
    ]
    worst, where = max(errors)
    steps = ours.gradients
    return Comparison(
        loss_error=max(losses),
        gradient_error=worst,
        worst=where,
        unused=tuple(n for n in steps[0] if all(step[n] is None for step in steps)),
        num_graphs=num_graphs,
        warnings=tuple(m for m in messages if m.startswith("graphshard")),
    )


def gradient_errors(
    ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]
) -> dict[str, float]:
    """Return ``|ours - theirs| / |theirs|`` by parameter.

    The divisor is at least FLOOR times the norm of all gradients.
    """
    assert ours.keys() == theirs.keys()
    total = math.hypot(*(float(g.norm()) for g in theirs.values() if g is not None))
    return {name: _error(ours[name], theirs[name], FLOOR * total) for name in theirs}


def _error(ours: Tensor | None, theirs: Tensor | None, floor: float) -> float:
    """Return the relative difference of two gradients, infinite if only one is None."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return float((ours - theirs).norm()) / max(float(theirs.norm()), floor)
