"""SGD steps of graphshard, DDP and eager FSDP2. Adam would hide a wrong gradient scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.models import ConvNet, DeepGPT, Trainable
from tests.numerics.compare import (
    TOLERANCE,
    History,
    assert_close,
    assert_equal,
    compile_sharded,
    draw,
    train_steps,
    world_mesh,
)

STEPS = 3


Wrap = Callable[[nn.Module], nn.Module]
"""Function that wraps a plain model and returns the module to call."""


def ddp(model: nn.Module) -> nn.Module:
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return DistributedDataParallel(model, broadcast_buffers=False)


def fsdp2(model: nn.Module) -> nn.Module:
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=world_mesh())
    return fully_shard(model, mesh=world_mesh())


def _train(kind: Trainable, wrap: Wrap) -> tuple[History, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = kind()
    batches = [draw(kind.batch, step)[dist.get_rank()] for step in range(STEPS)]
    return train_steps(wrap(model), model, batches, lr=0.1), dict(model.named_buffers())


def _compare(kind: Trainable, compiler: str, tolerance: float) -> None:
    ours, our_buffers = _train(kind, lambda model: compile_sharded(model, compiler=compiler))
    for wrap in (ddp, fsdp2):
        theirs, their_buffers = _train(kind, wrap)
        assert_equal(ours, theirs, tolerance)
        assert list(our_buffers) == list(their_buffers)
        for name, buffer in their_buffers.items():
            assert_close(name, our_buffers[name], buffer, tolerance)


# Two ranks have only one order of summation, so results are bitwise equal.
@pytest.mark.parametrize("kind", [DeepGPT, ConvNet])
def test_steps_agree_with_ddp_and_fsdp2(kind: Trainable) -> None:
    ranks.run(2, _compare, kind, "aot_eager", 0.0)


def test_steps_with_inductor_agree_with_ddp_and_fsdp2() -> None:
    ranks.run(2, _compare, ConvNet, "inductor", TOLERANCE)
