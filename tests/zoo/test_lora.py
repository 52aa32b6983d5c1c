"""Adapters trained on a frozen model: `peft`'s LoRA on a Llama, unchanged, beside FSDP2; and a base
whose weights are stored as integers. The base is sharded and gathered in its own dtype; only
adapters are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.kinds import TransferKind
from tests import ranks, recording
from tests.numerics.compare import Twins, generator, relative_error, sgd, whole

from .models import ZOO, causal_batch

STEPS = 10


def _adapted(dtype: torch.dtype) -> Any:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(ZOO["llama"].build().to(dtype), config)
    for name, param in model.named_parameters():
        if "lora" in name:
            param.data = param.data.float()
    return model


def _num_bytes(params: Sequence[Tensor], world: int) -> int:
    """Padded to so many shards."""
    rows = [-(-param.shape[0] // world) * world for param in params]
    return sum(n * p[0].numel() * p.element_size() for n, p in zip(rows, params))


def _train_adapters(dtype: torch.dtype) -> tuple[float, float]:
    """Largest errors of losses and of gradients."""
    ours, theirs = _adapted(dtype), _adapted(dtype)
    world = dist.get_world_size()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    size = _num_bytes(trained, world)
    frozen = _num_bytes([p for p in theirs.parameters() if not p.requires_grad], world)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(theirs, mesh=mesh)
    compiled = torch.compile(ours, backend=graphshard.backend(mesh, compiler="aot_eager"))
    errors, optimizers = [], []
    for step in range(STEPS):
        batch = causal_batch(generator(step, dist.get_rank()))
        recording.clear()
        losses = [compiled(**batch).loss]
        losses[0].backward()
        sent = recording.collectives()
        losses.append(theirs(**batch).loss)
        losses[1].backward()
        grads = [
            [p.grad for p in model.parameters() if p.grad is not None] for model in (ours, theirs)
        ]
        assert len(grads[0]) == len(grads[1]) == len(trained)
        worst = max(relative_error(*map(whole, pair)) for pair in zip(*grads))
        errors.append((relative_error(*losses), worst))
        if step:  # the first one shards
            assert sum(e.bytes for e in sent if e.kind == TransferKind.REDUCE_SCATTER) == size
            assert sum(e.bytes for e in sent if e.kind == TransferKind.ALL_GATHER) <= 2 * (
                size + frozen
            )
        optimizers = optimizers or [sgd(ours, 0.1), sgd(theirs, 0.1)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(loss for loss, _ in errors), max(grad for _, grad in errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_trains_as_under_fsdp2(dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for loss_error, grad_error in ranks.run(2, _train_adapters, dtype, backend="recording"):
        assert loss_error <= tolerance and grad_error <= tolerance


class Packed(nn.Module):
    """A linear layer of frozen integers with scales, and a trained adapter beside it.

    Args:
        bits: 8: a byte for each weight (int8); 4: two weights in a byte (uint8).
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


def _train_on_integers(bits: int) -> None:
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


@pytest.mark.parametrize("bits", [8, 4])
def test_a_base_of_integers(bits: int) -> None:
    ranks.run(2, _train_on_integers, bits, backend="recording")
