"""Adapters on a frozen base: `peft`'s LoRA on a Llama compared with FSDP2, and an integer base.

The base is sharded and gathered in its own dtype; only gradients of adapters are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.kinds import TransferKind
from tests import recording
from tests.numerics.compare import (
    History,
    Twins,
    assert_history_rounded,
    generator,
    train_steps,
    world_mesh,
)
from tests.ranks import on_ranks

from .models import ZOO, Batch, causal_batch, model_loss

STEPS = 10


def _adapted() -> Any:
    """Return a bfloat16 model with float32 adapters."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(ZOO["llama-shallow"].build().bfloat16(), config)
    for name, param in model.named_parameters():
        if "lora" in name:
            param.data = param.data.float()
    return model


def _num_bytes(params: Sequence[Tensor], world: int) -> int:
    rows = [-(-param.shape[0] // world) * world for param in params]
    return sum(n * p[0].numel() * p.element_size() for n, p in zip(rows, params))


def _check_bytes(compiled: Any, batch: Batch, plain: nn.Module) -> None:
    recording.clear()
    model_loss(compiled, batch).backward()
    sent, world = recording.collectives(), dist.get_world_size()
    trained = _num_bytes([p for p in plain.parameters() if p.requires_grad], world)
    frozen = _num_bytes([p for p in plain.parameters() if not p.requires_grad], world)
    assert sum(e.bytes for e in sent if e.kind == TransferKind.REDUCE_SCATTER) == trained
    gathered = sum(e.bytes for e in sent if e.kind == TransferKind.ALL_GATHER)
    assert gathered <= 2 * (trained + frozen)


@pytest.mark.low_precision
@on_ranks(2, backend="recording")
def test_lora_trains_like_fsdp2() -> None:
    mesh, rank = world_mesh(), dist.get_rank()
    batches = [causal_batch(generator(step, rank)) for step in range(STEPS)]

    def by_fsdp2(computes_in: torch.dtype | None = None) -> History:
        model = _adapted().to(computes_in)
        return train_steps(fully_shard(model, mesh=mesh), model, batches, model_loss, lr=0.1)

    ours = _adapted()
    compiled = torch.compile(ours, backend=graphshard.backend(mesh, compiler="aot_eager"))
    trained = train_steps(compiled, ours, batches, model_loss, lr=0.1)
    assert_history_rounded(trained, by_fsdp2(), by_fsdp2(torch.float64), torch.bfloat16)
    _check_bytes(compiled, batches[0], _adapted())


class Packed(nn.Module):
    """A linear layer of frozen integer weights with scales, plus a trainable adapter.

    Args:
        bits: bits per weight: 8 (int8), or 4 (two weights in a uint8).
    """

    def __init__(self, features: int, bits: int) -> None:
        super().__init__()
        dtype = torch.int8 if bits == 8 else torch.uint8
        width = features * bits // 8
        low, high = (-128, 128) if bits == 8 else (0, 256)
        codes = torch.randint(low, high, (features, width), dtype=dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(features, 1) / 128, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, features) / 4)
        self.up = nn.Parameter(torch.randn(features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes
        if weight.dtype == torch.uint8:
            halves = torch.stack([weight & 15, weight >> 4], -1)
            weight = halves.flatten(-2).to(torch.int8) - 8
        return F.linear(x, weight.float() * self.scales) + x @ self.down.t() @ self.up.t()


class Quantised(nn.Module):
    FEATURES = 18

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed(self.FEATURES, bits) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, Quantised.FEATURES, generator=rng)


@pytest.mark.parametrize("bits", [8, 4])
@on_ranks(2, backend="recording")
def test_adapters_train_on_integer_base(bits: int) -> None:
    twins = Twins(Quantised(bits))
    recording.clear()
    twins.train(Quantised.batch, STEPS)
    world = dist.get_world_size()
    every = list(Quantised(bits).parameters())
    (forward, backward) = twins.backend.plans
    assert forward.num_bytes(TransferKind.ALL_GATHER) == _num_bytes(every, world)
    trained = [p for p in every if p.requires_grad]
    assert backward.num_bytes(TransferKind.REDUCE_SCATTER) == _num_bytes(trained, world)
    stored = {t.dtype for t in forward.problem.transfers}
    assert stored == {"torch.float32", str(every[0].dtype)}
