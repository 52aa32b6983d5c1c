"""FSDP2's tests of mixed precision in wrapped modules, with `overrides` instead of wrapping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from graphshard.kinds import TransferKind
from tests import ranks, recording
from tests.numerics.compare import (
    assert_equal,
    by_fsdp2,
    compare_with_fsdp2,
    compile_sharded,
    draw,
    train_steps,
)
from tests.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass
class Pair:
    x: Tensor
    y: Tensor


@dataclass
class Nested:
    pair: Pair
    z: list[Tensor]


class Tupled(NamedTuple):
    x: Tensor
    y: Tensor


class Containers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = InContainer(kind), InContainer(kind)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "nested":
            nested = self.second(self.first(Nested(Pair(x, x * 2), [x * 3])))
            return nested.pair.x.sum() + nested.pair.y.sum() + nested.z[0].sum()
        kind = Pair if self.kind == "dataclass" else Tupled
        pair = self.second(self.first(kind(x, x * 2)))
        return pair.x.sum() + pair.y.sum()


class InContainer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.kind = kind

    def forward(self, given: Any) -> Any:
        if self.kind == "nested":
            pair = Pair(self.linear(given.pair.x), self.linear(given.pair.y))
            return Nested(pair, [self.linear(given.z[0])])
        return type(given)(self.linear(given.x), self.linear(given.y))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), AddsInput()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), torch.ones(7)).sum()


class AddsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + y.sum() + y.element_size()


class Sizes(nn.Module):
    """Model whose loss depends on the dtypes of the inputs of its parts.

    Args:
        dtype: dtype to which the model itself casts one input of the second part.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.second = AddsInput(), AddsInput()
        self.widen = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(self.first(x, x)).to(self.dtype)
        return self.second(y, x).sum() + x.element_size()


class Recomputed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.dtype = nn.Linear(7, 7), dtype

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, x.to(self.dtype), use_reentrant=False)
        return y.float().sum()

    def part(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y * y.element_size()


def _layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 5))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))


HALF = MixedPrecisionPolicy(BF16, FP32)
AS_THEY_ARE = MixedPrecisionPolicy(FP16, cast_forward_inputs=False)
PARTS = {"first": HALF, "second": HALF}
LAYERS = {"0": HALF, "1": HALF, "2": HALF}

Policies = dict[str, MixedPrecisionPolicy]
"""Policy of each module that FSDP2 wraps, by FQN; "": the model itself."""

CASES: dict[str, tuple[Callable[[], nn.Module], Policies]] = {
    "dataclasses": (lambda: Containers("dataclass"), {"": HALF, **PARTS}),
    "nested dataclasses": (lambda: Containers("nested"), {"": HALF, **PARTS}),
    "named tuples": (lambda: Containers("named tuple"), {"": HALF, **PARTS}),
    "no casts": (lambda: Containers("nested"), {"": MixedPrecisionPolicy()}),
    "another input, cast": (TwoInputs, {"": HALF, "second": HALF}),
    "another input, not cast": (
        TwoInputs,
        {"": HALF, "second": MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False)},
    ),
    "a part in float16": (lambda: Sizes(FP32), {"second": MixedPrecisionPolicy(FP16)}),
    "a part that the model casts for": (lambda: Sizes(FP16), {"second": AS_THEY_ARE}),
    "a part whose outputs are cast": (
        lambda: Sizes(FP32),
        {"first": MixedPrecisionPolicy(FP16, output_dtype=FP32)},
    ),
    "inputs cast again": (lambda: Recomputed(FP32), {"": HALF, "first": HALF}),
    "outputs cast again": (
        lambda: Recomputed(BF16),
        {"": HALF, "first": MixedPrecisionPolicy(BF16, BF16, FP32, False)},
    ),
    "layer norm": (_layer_norm, {"": HALF, **LAYERS}),
    "batch norm in float32": (
        _batch_norm,
        {"": HALF, **LAYERS, "1": MixedPrecisionPolicy(output_dtype=BF16)},
    ),
}


NOT_ON_2_11 = ("dataclasses", "nested dataclasses", "inputs cast again")


@pytest.mark.low_precision
@pytest.mark.parametrize("name", compare_with_fsdp2(CASES, NOT_ON_2_11))
@on_ranks(2)
def test_overridden_parts_match_parts_wrapped_by_fsdp2(name: str) -> None:
    make, policies = CASES[name]
    torch.manual_seed(0)
    ours = make()
    theirs = by_fsdp2(copy.deepcopy(ours), policies)
    parts = {fqn: {"mp_policy": policy} for fqn, policy in policies.items() if fqn}
    whole_model = policies.get("", MixedPrecisionPolicy())
    compiled = compile_sharded(ours, mp_policy=whole_model, overrides=parts)
    # The same kernels compute gradients, but FSDP2 divides float16 gradients before adding them.
    halves = FP16 in [policy.param_dtype for policy in policies.values()]
    tolerance = torch.finfo(FP16).eps if halves else 0.0
    batches = [draw(_batch, step)[dist.get_rank()] for step in range(3)]
    pairs = (compiled, ours), (theirs, theirs)
    histories = [train_steps(*pair, batches, _summed, lr=0.001) for pair in pairs]
    assert_equal(*histories, tolerance)


def _summed(model: Any, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.sum()


def _batch(rng: torch.Generator) -> Tensor:
    return torch.randn(4, 7, generator=rng)


@on_ranks(2)
def test_batch_norm_keeps_float32_buffers() -> None:
    policy = {"mp_policy": HALF}
    overrides = dict.fromkeys("012", policy)
    model = _batch_norm()
    # Inductor, since ATen on a CPU does not support float32 buffers with bfloat16 weights.
    compiled = compile_sharded(model, compiler="inductor", overrides=overrides, **policy)
    for _ in range(2):
        y = compiled(torch.randn(4, 7))
        y.sum().backward()
        assert y.dtype == BF16 and y.isfinite().all()
    assert model[1].running_mean.dtype == FP32 and model[1].weight.grad.dtype == FP32


def test_unfrozen_model_reduces_in_reduce_dtype() -> None:
    for dtypes in ranks.run(2, _thaw, backend="recording"):
        assert dtypes == {FP32}


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))
        self.counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def _thaw() -> set[torch.dtype | None]:
    model = Frozen().requires_grad_(False)
    compiled = compile_sharded(model, mp_policy=HALF)
    with torch.no_grad():
        compiled(torch.ones(4, 7))
    model.layers.requires_grad_(True)
    recording.clear()
    compiled(torch.ones(4, 7)).backward()
    assert {p.grad.dtype for p in model.layers.parameters()} == {FP32}
    events = recording.collectives()
    return {event.dtype for event in events if event.kind == TransferKind.REDUCE_SCATTER}


def test_model_cast_to_float32_reduces_in_reduce_dtype() -> None:
    for dtypes in ranks.run(2, _widen, backend="recording"):
        assert dtypes == {BF16}


def _widen() -> set[torch.dtype | None]:
    model = nn.Sequential(nn.Linear(7, 6, dtype=BF16), nn.Linear(6, 5, dtype=BF16))
    compiled = compile_sharded(model, mp_policy=MixedPrecisionPolicy(BF16, BF16))
    compiled(torch.ones(4, 7)).sum().backward()
    model.zero_grad()
    model.to(FP32)
    recording.clear()
    compiled(torch.ones(4, 7)).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}
    events = recording.collectives()
    return {event.dtype for event in events if event.kind == TransferKind.REDUCE_SCATTER}
