"""Gradients of several microbatches, of which only the last one communicates: beside FSDP2, and beside the
whole batch; what is sent, and how often anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from tests import ranks, recording
from tests.models import GPT
from tests.numerics.compare import draw, num_graphs, relative_error, sgd, whole

MICROBATCHES = 3
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
Sent = list[list[tuple[str, int]]]


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


@dataclass(frozen=True)
class Trained:
    """Largest relative errors over all steps, collectives of each microbatch of the last one, theirs, and
    how many graphs were compiled."""

    loss_error: float
    grad_error: float
    sent: Sent
    theirs: Sent
    graphs: int


def _reductions() -> list[tuple[str, int]]:
    found = [(e.kind, e.bytes) for e in recording.collectives() if e.kind != "all_gather"]
    recording.clear()
    return found


def _train(
    shape: tuple[int, ...], all_reduce_only: bool, compiler: str, options: dict[str, Any]
) -> Trained:
    torch._dynamo.utils.counters.clear()
    ours, theirs, mesh = _gpt(), _gpt(), _mesh(shape)
    fully_shard(theirs, mesh=mesh, mp_policy=options.get("mp_policy", MixedPrecisionPolicy()))
    theirs.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
    compiled = torch.compile(
        ours, backend=graphshard.backend(mesh, compiler=compiler, **options), fullgraph=True
    )
    errors, optimizers = [], []
    for step in range(4):
        sent, other = [], []
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            if all_reduce_only:
                graphshard.set_requires_all_reduce(ours, last)
                theirs.set_requires_all_reduce(last)  # type: ignore[attr-defined]
            else:
                graphshard.set_requires_gradient_sync(compiled, last)
                theirs.set_requires_gradient_sync(last)  # type: ignore[attr-defined]
            batch = draw(GPT.batch, step * MICROBATCHES + micro)[dist.get_rank()]
            recording.clear()
            loss = compiled(batch)
            loss.backward()
            sent.append(_reductions())
            expected = theirs(batch)
            expected.backward()
            other.append(_reductions())
            errors.append((relative_error(loss, expected), 0.0))
        grads = zip(ours.parameters(), theirs.parameters(), strict=True)
        worst = max(relative_error(*(whole(p.grad) for p in pair)) for pair in grads)
        errors.append((0.0, worst))
        optimizers = optimizers or [sgd(ours), sgd(theirs)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return Trained(*map(max, zip(*errors)), sent, other, num_graphs())


@pytest.mark.parametrize(
    ("shape", "all_reduce_only", "options"),
    [
        ((2,), False, {}),
        ((2,), False, {"mp_policy": BF16}),
        ((2,), False, {"reshard_after_forward": False}),
        ((2,), False, {"overrides": {"*": {"shard": False}}}),
        ((2, 2), False, {}),
        ((2, 2), True, {}),
        ((2, 2), True, {"mp_policy": BF16}),
    ],
)
def test_it_accumulates_as_fsdp2(
    shape: tuple[int, ...], all_reduce_only: bool, options: dict[str, Any]
) -> None:
    world = torch.Size(shape).numel()
    for trained in ranks.run(
        world, _train, shape, all_reduce_only, "aot_eager", options, backend="recording"
    ):
        print(trained.loss_error, trained.grad_error, trained.graphs, trained.sent, trained.theirs)
        # FSDP2 adds up in bfloat16 what a tied weight gets in one microbatch.
        tolerance = 1e-2 if "mp_policy" in options else 1e-6 if "overrides" in options else 0
        assert trained.loss_error <= tolerance and trained.grad_error <= tolerance
        assert trained.graphs == 2
