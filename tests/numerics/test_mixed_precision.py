"""`mp_policy` beside eager FSDP2 with the same policy, bitwise on two ranks; what travels in which
dtype, and what does not."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.kinds import TransferKind
from tests import ranks, recording
from tests.models import GPT, MLP, DeepGPT, Trainable
from tests.numerics.compare import compile_sharded, draw, relative_error, sgd, whole, world_mesh

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 20


@dataclass(frozen=True)
class Trained:
    """Largest differences of losses and of gradients, whether all parameters ended bitwise equal,
    and kind, dtype and bytes of what our second step sent."""

    loss_error: float
    grad_error: float
    equal: bool
    sent: list[tuple[str, torch.dtype | None, int]]


def _train(kind: Trainable, policy: MixedPrecisionPolicy, compiler: str, steps: int) -> Trained:
    torch.manual_seed(0)
    ours, theirs = kind(), kind()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    fully_shard(theirs, mesh=world_mesh(), mp_policy=policy)
    compiled = compile_sharded(ours, compiler=compiler, mp_policy=policy)
    losses, grads, sent = [], [], []
    optimizers = []
    for step in range(steps):
        batch = draw(kind.batch, step)[dist.get_rank()]
        recording.clear()
        loss = compiled(batch)
        loss.backward()
        events = [(event.kind, event.dtype, event.bytes) for event in recording.collectives()]
        sent = events if step == 1 else sent
        expected: Tensor = theirs(batch)
        expected.backward()
        assert loss.dtype == expected.dtype
        losses.append(relative_error(loss, expected))
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        both = [torch.cat([whole(of.grad).flatten() for of in side]) for side in zip(*pairs)]
        grads.append(relative_error(*both))
        optimizers = optimizers or [sgd(ours), sgd(theirs)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    equal = all(torch.equal(whole(p), whole(q)) for p, q in pairs)
    return Trained(max(losses), max(grads), equal, sent)


POLICIES = [
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32),
    MixedPrecisionPolicy(reduce_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, cast_forward_inputs=False),
    MixedPrecisionPolicy(param_dtype=FP16, output_dtype=FP32),
    MixedPrecisionPolicy(output_dtype=torch.float64),
]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [(GPT, policy) for policy in POLICIES]
    + [(MLP, policy) for policy in POLICIES if policy.cast_forward_inputs],
)
def test_it_trains_as_fsdp2_does(kind: Trainable, policy: MixedPrecisionPolicy) -> None:
    for trained in ranks.run(2, _train, kind, policy, "aot_eager", STEPS, backend="recording"):
        if policy.param_dtype is FP16:  # FSDP2 divides before the reduction, and again behind it
            assert max(trained.loss_error, trained.grad_error) <= 1e-3
        else:
            assert trained.loss_error == trained.grad_error == 0.0
            assert trained.equal
        used, reduced = (
            policy.param_dtype or FP32,
            policy.reduce_dtype or policy.param_dtype or FP32,
        )
        dtypes = {kind: {d for k, d, _ in trained.sent if k == kind} for kind, *_ in trained.sent}
        assert dtypes == {TransferKind.ALL_GATHER: {used}, TransferKind.REDUCE_SCATTER: {reduced}}


def test_it_trains_as_fsdp2_does_by_inductor() -> None:
    policy = POLICIES[0]
    for trained in ranks.run(2, _train, FloatLoss, policy, "inductor", STEPS):
        assert trained.loss_error <= 2e-3
        assert trained.grad_error <= 2e-2


def test_half_the_bytes_travel() -> None:
    by_policy = []
    for policy in (MixedPrecisionPolicy(), POLICIES[0]):
        trained, _ = ranks.run(2, _train, GPT, policy, "aot_eager", 2, backend="recording")
        by_policy.append({k: sum(b for of, _, b in trained.sent if of == k) for k in _KINDS})
    plain, mixed = by_policy
    assert mixed[TransferKind.ALL_GATHER] == plain[TransferKind.ALL_GATHER] / 2 > 0
    assert mixed[TransferKind.REDUCE_SCATTER] == plain[TransferKind.REDUCE_SCATTER] > 0


_KINDS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER)


class FloatLoss(DeepGPT):
    """Whose loss is not rounded to ``param_dtype``."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Mixed(nn.Module):
    """Parameters that are not cast, and one that is replicated."""

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


def test_only_floating_parameters_are_cast() -> None:
    for trained in ranks.run(2, _train_mixed, backend="recording"):
        assert {(kind, dtype) for kind, dtype, _ in trained} >= {
            (TransferKind.REDUCE_SCATTER, FP32),
            (TransferKind.ALL_REDUCE, FP32),
        }


def _train_mixed() -> list[tuple[str, torch.dtype | None, int]]:
    torch.manual_seed(0)
    model = Mixed()
    reference = copy.deepcopy(model)
    compiled = compile_sharded(model, mp_policy=POLICIES[0])
    batches = draw(Mixed.batch, 0)
    recording.clear()
    compiled(batches[dist.get_rank()]).backward()
    sent = [(event.kind, event.dtype, event.bytes) for event in recording.collectives()]
    cast = {
        name: p.detach().to(BF16)
        for name, p in reference.named_parameters()
        if p.is_floating_point()
    }
    for param in cast.values():
        param.requires_grad_()
    for batch in batches:
        torch.func.functional_call(reference, cast, (batch.to(BF16),)).backward()
    for name, param in model.named_parameters():
        if param.requires_grad:
            expected = cast[name].grad.float() / len(batches)
            assert param.grad.dtype == param.dtype == FP32
            assert relative_error(param.grad, expected) <= 1e-2, name
    return sent


class Kinds(nn.Module):
    """Parameters that no policy casts, or that have no elements, or no dimension."""

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


@pytest.mark.parametrize("backend", ["gloo", recording.BACKEND])
def test_what_is_not_cast(backend: str) -> None:
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=FP32), POLICIES[0]]
    policies.append(MixedPrecisionPolicy(reduce_dtype=FP16))
    for policy in policies:
        ranks.run(2, _train_kinds, policy, backend=backend)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_complex_parameters_by_inductor() -> None:
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
            assert error <= (1e-5 if cast == FP32 else 2e-2), (name, error)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.weight.dtype == FP32 and self.up.weight.dtype == BF16
        return self.down(self.norm(self.up(x).float()).to(BF16)).float().square().mean()


def test_overrides() -> None:
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
    schedule = graphshard.SchedulePolicy(overlap=False)  # else it keeps some, too
    backend = graphshard.backend(world_mesh(), **options, schedule=schedule)
    model = Norms()
    torch.compile(model, backend=backend)(torch.randn(3, 6)).backward()
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    forward, backward = backend.plans
    again = [
        p.fqn
        for b in backward.buckets
        if b.kind == TransferKind.ALL_GATHER
        for p in backward.params_of(b)
    ]
    return sorted(forward.params[i].fqn for i in forward.kept), again


@pytest.mark.parametrize("name", ["normal.*", "downs"])
def test_an_override_that_matches_nothing(name: str) -> None:
    ranks.run(2, _override_nothing, name)


def _override_nothing(name: str) -> None:
    model = Norms()
    overrides = {name: {"reshard_after_forward": False}}
    with pytest.raises(RuntimeError, match="matches no parameter: of 6 the nearest are '"):
        graphshard.shard(model, world_mesh(), overrides=overrides)
    assert type(model.up.weight) is nn.Parameter


def test_a_step_that_overflows_is_skipped_on_all_ranks() -> None:
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
            batch = batch * 1e5  # only here
        scaler.scale(compiled(batch).float()).backward()
        optimizer = optimizer or sgd(model)
        states.append(whole(model.up.weight))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(whole(model.up.weight))
    return states[0], states[1], states[3], scaler.get_scale()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)),
        ("mp_policy", MixedPrecisionPolicy(reduce_dtype=torch.int32)),
        ("mp_policy", MixedPrecisionPolicy(output_dtype="bfloat16")),  # type: ignore[arg-type]
        ("mp_policy", MixedPrecisionPolicy(cast_forward_inputs=None)),  # type: ignore[arg-type]
        ("overrides", {"up.weight": {"mp_policy": "bf16"}}),
        ("overrides", {"up.weight": {"reshard_after_forward": "some"}}),
        ("overrides", {"up.weight": False}),
        ("overrides", ["up.weight"]),
    ],
)
def test_a_policy_that_cannot_hold(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        graphshard.backend(**{name: value})
