"""Ten SGD steps of graphshard, DDP and eager FSDP2 on the same batches: all losses and gradients
agree. SGD, because Adam would hide a wrong gradient scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.models import GPT, MLP, ConvNet, DeepGPT, Trainable
from tests.numerics.compare import (
    TOLERANCE,
    assert_close,
    compile_sharded,
    draw,
    sgd,
    whole,
    world_mesh,
)

STEPS = 10


@dataclass
class History:
    """Loss and full gradients of each step, and the buffers at the end."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


Wrap = Callable[[nn.Module], nn.Module]
"""Function from a plain model to the module to call instead."""


def ddp(model: nn.Module) -> nn.Module:
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return DistributedDataParallel(model, broadcast_buffers=False)


def fsdp2(model: nn.Module) -> nn.Module:
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=world_mesh())
    return fully_shard(model, mesh=world_mesh())


def _train(kind: Trainable, wrap: Wrap) -> History:
    torch.manual_seed(0)
    model, history = kind(), History()
    mesh = world_mesh()
    wrapped = wrap(model)
    optimizer = sgd(model, lr=0.1)
    for step in range(STEPS):
        loss = wrapped(draw(kind.batch, step)[mesh.get_local_rank()])
        loss.backward()
        grads = {name: whole(param.grad) for name, param in model.named_parameters()}
        history.losses.append(loss.detach())
        history.grads.append(grads)
        optimizer.step()
        optimizer.zero_grad()
    history.buffers = dict(model.named_buffers())
    return history


def _assert_equal(ours: History, theirs: History, tolerance: float) -> None:
    for step in range(STEPS):
        assert_close(f"loss {step}", ours.losses[step], theirs.losses[step], tolerance)
        assert list(ours.grads[step]) == list(theirs.grads[step])
        for name, grad in theirs.grads[step].items():
            assert_close(f"{name} in step {step}", ours.grads[step][name], grad, tolerance)
    assert list(ours.buffers) == list(theirs.buffers)
    for name, buffer in theirs.buffers.items():
        assert_close(name, ours.buffers[name], buffer, tolerance)


def _compare(kind: Trainable, compiler: str, tolerance: float) -> None:
    ours = _train(kind, lambda model: compile_sharded(model, compiler=compiler))
    _assert_equal(ours, _train(kind, ddp), tolerance)
    _assert_equal(ours, _train(kind, fsdp2), tolerance)


@pytest.mark.parametrize("kind", [MLP, DeepGPT, ConvNet])
# On two ranks, even the order of every sum is the same, so the results are bitwise equal.
@pytest.mark.parametrize(("world_size", "tolerance"), [(2, 0.0), (4, TOLERANCE)])
def test_ten_steps_agree_with_ddp_and_fsdp2(
    kind: Trainable, world_size: int, tolerance: float
) -> None:
    ranks.run(world_size, _compare, kind, "aot_eager", tolerance)


@pytest.mark.parametrize("kind", [GPT, ConvNet])
def test_ten_steps_with_inductor_agree_with_ddp_and_fsdp2(kind: Trainable) -> None:
    ranks.run(2, _compare, kind, "inductor", TOLERANCE)
