from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.kinds import TransferKind
from tests import ranks, recording
from tests.models import GPT, MLP, Trainable
from tests.numerics.compare import (
    assert_close,
    assert_equal,
    assert_history_rounded,
    compile_sharded,
    draw,
    relative_error,
    sgd,
    train_steps,
    whole,
    world_mesh,
)
from tests.plan.dumps import fqns_of
from tests.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 3


Sent = list[tuple[str, torch.dtype | None, int]]
"""``(kind, dtype, bytes)`` of every collective of a step."""


def _train(kind: Trainable, policy: MixedPrecisionPolicy, bitwise: bool = True) -> Sent:
    """Compare training with FSDP2; return the collectives of an additional step."""
    torch.manual_seed(0)
    ours = kind()
    theirs, exact = copy.deepcopy(ours), copy.deepcopy(ours)
    batches = [draw(kind.batch, step)[dist.get_rank()] for step in range(STEPS)]
    compiled = compile_sharded(ours, compiler="aot_eager", mp_policy=policy)
    trained = train_steps(compiled, ours, batches)
    fully_shard(theirs, mesh=world_mesh(), mp_policy=policy)
    expected = train_steps(theirs, theirs, batches)
    if bitwise:
        assert_equal(trained, expected)
    else:
        fully_shard(exact, mesh=world_mesh())
        in_float32 = train_steps(exact, exact, batches)
        assert_history_rounded(trained, expected, in_float32, policy.param_dtype or FP32)
    recording.clear()
    compiled(batches[0]).backward()
    return [(event.kind, event.dtype, event.bytes) for event in recording.collectives()]


@functools.cache
def _sent(kind: Trainable, policy: MixedPrecisionPolicy, bitwise: bool = True) -> list[Sent]:
    return ranks.run(2, _train, kind, policy, bitwise, backend="recording")


POLICIES = [
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32),
    MixedPrecisionPolicy(reduce_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, cast_forward_inputs=False),
    MixedPrecisionPolicy(param_dtype=FP16, output_dtype=FP32),
    MixedPrecisionPolicy(output_dtype=torch.float64),
]


@pytest.mark.low_precision
@pytest.mark.parametrize(
    ("kind", "policy"),
    [(MLP if policy.cast_forward_inputs else GPT, policy) for policy in POLICIES],
)
def test_training_matches_fsdp2(kind: Trainable, policy: MixedPrecisionPolicy) -> None:
    # FSDP2 divides float16 gradients before reducing them; graphshard averages in the reduction.
    for sent in _sent(kind, policy, bitwise=policy.param_dtype is not FP16):
        used, reduced = (
            policy.param_dtype or FP32,
            policy.reduce_dtype or policy.param_dtype or FP32,
        )
        dtypes = {kind: {d for k, d, _ in sent if k == kind} for kind, *_ in sent}
        assert dtypes == {TransferKind.ALL_GATHER: {used}, TransferKind.REDUCE_SCATTER: {reduced}}


def test_bf16_parameters_halve_all_gather_bytes() -> None:
    by_policy = []
    for policy in (MixedPrecisionPolicy(), POLICIES[0]):
        sent, _ = _sent(MLP, policy, bitwise=True)
        by_policy.append({k: sum(b for of, _, b in sent if of == k) for k in _KINDS})
    plain, mixed = by_policy
    assert mixed[TransferKind.ALL_GATHER] == plain[TransferKind.ALL_GATHER] / 2 > 0
    assert mixed[TransferKind.REDUCE_SCATTER] == plain[TransferKind.REDUCE_SCATTER] > 0


_KINDS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER)


class Mixed(nn.Module):
    """Model with an integer parameter and a buffer, which are not cast, and a replicated scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.index = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        assert self.shift.dtype == FP32 and self.index.dtype == torch.int64
        assert self.scale.dtype == self.linear.weight.dtype == x.dtype == BF16
        return (self.linear(x) * self.scale + self.shift)[self.index].square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(6, 7, generator=rng)


@pytest.mark.low_precision
def test_only_floating_point_parameters_are_cast() -> None:
    for trained in ranks.run(2, _train_mixed, backend="recording"):
        assert {(kind, dtype) for kind, dtype, _ in trained} >= {
            (TransferKind.REDUCE_SCATTER, FP32),
            (TransferKind.ALL_REDUCE, FP32),
        }


def _train_mixed() -> Sent:
    torch.manual_seed(0)
    model = Mixed()
    reference = copy.deepcopy(model)
    compiled = compile_sharded(model, mp_policy=POLICIES[0])
    batches = draw(Mixed.batch, 0)
    recording.clear()
    compiled(batches[dist.get_rank()]).backward()
    sent = [(event.kind, event.dtype, event.bytes) for event in recording.collectives()]
    grads = [_grads_in_bfloat16(reference, batch) for batch in batches]
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert param.grad.dtype == param.dtype == FP32
            expected = sum(of[name] for of in grads) / len(batches)
            assert_close(name, param.grad, expected)
    return sent


def _grads_in_bfloat16(model: Mixed, batch: Tensor) -> dict[str, Tensor]:
    params = {n: p.detach().to(BF16) for n, p in model.named_parameters() if p.is_floating_point()}
    for param in params.values():
        param.requires_grad_()
    torch.func.functional_call(model, params, (batch.to(BF16),)).backward()
    return {name: param.grad.float() for name, param in params.items() if param.grad is not None}


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(14).view(7, 2), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(3e4))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() @ self.table.to(FP32)
        return (y * self.wave[0].abs() * self.wave[1].real).sum() + self.empty.sum() + self.scale

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 7, generator=rng)


@pytest.mark.low_precision
@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        (MixedPrecisionPolicy(), "gloo"),
        (MixedPrecisionPolicy(reduce_dtype=FP32), "gloo"),
        (MixedPrecisionPolicy(reduce_dtype=FP16), "gloo"),
        (POLICIES[0], "gloo"),
        (POLICIES[0], recording.BACKEND),
    ],
)
def test_complex_integer_and_empty_parameters_train(
    policy: MixedPrecisionPolicy, backend: str
) -> None:
    ranks.run(2, _train_kinds, policy, backend=backend)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_complex_parameters_train_with_inductor() -> None:
    ranks.run(2, _train_kinds, MixedPrecisionPolicy(), "inductor")


def _train_kinds(policy: MixedPrecisionPolicy, compiler: str = "aot_eager") -> None:
    torch.manual_seed(0)
    model = Kinds()
    reference = copy.deepcopy(model)
    compiled = compile_sharded(model, mp_policy=policy, compiler=compiler)
    batches = draw(Kinds.batch, 0)
    (compiled(batches[dist.get_rank()]) * 3e4).backward()
    cast = policy.param_dtype or FP32
    (sum(reference(batch.to(cast)) for batch in batches) * 3e4 / len(batches)).backward()
    for name, param in model.named_parameters():
        if param.requires_grad:
            error = relative_error(param.grad, getattr(reference, name).grad)
            # Only `scale` and its gradient are cast; everything else is computed in float32.
            assert error <= (1e-5 if cast == FP32 else torch.finfo(cast).eps), (name, error)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.weight.dtype == FP32 and self.up.weight.dtype == BF16
        return self.down(self.norm(self.up(x).float()).to(BF16)).float().square().mean()


def test_overrides_set_policy_and_resharding() -> None:
    for kept, again in ranks.run(2, _override):
        assert kept == ["down.bias", "down.weight"]
        assert "norm.weight" in again and not set(kept) & set(again)


def _override() -> tuple[list[str], list[str]]:
    overrides = {
        "*": {"reshard_after_forward": True},
        "norm.*": {"mp_policy": MixedPrecisionPolicy()},
        "down.*": {"reshard_after_forward": False},
    }
    options = {"mp_policy": POLICIES[0], "overrides": overrides, "compiler": "aot_eager"}
    schedule = graphshard.SchedulePolicy(overlap=False)  # overlap keeps more unsharded
    backend = graphshard.backend(world_mesh(), **options, schedule=schedule)
    model = Norms()
    torch.compile(model, backend=backend)(torch.randn(3, 6)).backward()
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    forward, backward = backend.plans
    again = [
        fqn
        for b in backward.buckets
        if b.kind == TransferKind.ALL_GATHER
        for fqn in fqns_of(backward, b)
    ]
    return sorted(forward.params[i].fqn for i in forward.kept), again


def test_overflowing_step_is_skipped_on_all_ranks() -> None:
    for before, skipped, after, scale in ranks.run(2, _overflow):
        assert torch.equal(before, skipped) and not torch.equal(before, after)
        assert scale == 512.0


def _overflow() -> tuple[Tensor, Tensor, Tensor, float]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)
    model = MLP()
    compiled = compile_sharded(model, mp_policy=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    states = []
    optimizer = None
    for step in range(2):
        batch = draw(MLP.batch, step)[dist.get_rank()]
        if step == 0 and dist.get_rank() == 1:
            batch = batch * 1e5  # overflows only on this rank
        scaler.scale(compiled(batch).float()).backward()
        optimizer = optimizer or sgd(model)
        states.append(whole(model.up.weight))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(whole(model.up.weight))
    return states[0], states[1], states[3], scaler.get_scale()


@pytest.mark.parametrize("replicated", [True, False])
@on_ranks(2)
def test_overflow_in_one_shard_skips_step_on_all_ranks(replicated: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    # The rank alone decides whether gradients of the first linear are finite.
    of_first: dict[str, Any] = {"shard": False} if replicated else {"mesh": mesh["efsdp"]}
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    graphshard.shard(model, mesh["efsdp", "ep"]._flatten("dp"), overrides={"0": of_first})
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # initializes the scaler
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 0:
        model[1].weight.grad.to_local().fill_(torch.inf)
    before = [whole(param).clone() for param in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(map(torch.equal, map(whole, model.parameters()), before))


class _Float8Table(nn.Module):
    """Lookup in a frozen table that is stored in fp8."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(12.0).view(4, 3).to(torch.float8_e4m3fn)
        self.table = nn.Parameter(table, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        return self.table.to(BF16)[rows] * self.scale


@on_ranks(2)
def test_frozen_float8_parameter_is_gathered_in_param_dtype() -> None:
    model = _Float8Table()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    compiled = compile_sharded(model, compiler="aot_eager", mp_policy=policy)
    expected = torch.arange(12.0).view(4, 3).to(BF16)
    for call in (compiled, model):
        assert torch.equal(call(torch.arange(4)), expected)


class _RoundedWeight(nn.Module):
    """A linear whose weight is rounded to fp8 by hand."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, rows)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.to(torch.float8_e4m3fn).to(x.dtype)
        return nn.functional.linear(x, weight, self.linear.bias)


@pytest.mark.parametrize("rows", [8, 7])
@on_ranks(2)
def test_gradient_of_weight_rounded_to_float8_is_averaged_in_float32(rows: int) -> None:
    model = _RoundedWeight(rows)
    plain = copy.deepcopy(model)
    compiled = compile_sharded(model, compiler="inductor")
    batches = [torch.full((1, 8), 1.0 + 2 * rank) for rank in range(2)]
    compiled(batches[dist.get_rank()]).square().sum().backward()
    torch.stack([plain(batch).square().sum() for batch in batches]).mean().backward()
    for ours, param in zip(model.parameters(), plain.parameters()):
        # Each rank rounds its own gradient to fp8, which has 3 bits of mantissa.
        torch.testing.assert_close(whole(ours.grad), param.grad, rtol=0.125, atol=0.02)
