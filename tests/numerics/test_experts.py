"""Stacked experts: parameters sharded on a dimension other than the first."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

import graphshard
from graphshard.errors import BackendError
from tests.multirank.test_errors import assert_refused
from tests.numerics.compare import (
    assert_close,
    assert_same,
    compile_sharded,
    draw,
    full_values,
    generator,
    sgd,
    train_steps,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks

DIMS = {"*w1": {"dim": 2}, "*w2": {"dim": 1}}
PLACEMENTS = {(3, 8, 12): Shard(2), (3, 12, 8): Shard(1)}


class Dense(nn.Module):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.w1 = nn.Parameter(torch.randn(3, 8, hidden) / 4)
        self.w2 = nn.Parameter(torch.randn(3, hidden, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(torch.bmm(self.norm(x).expand(3, *x.shape), self.w1).relu(), self.w2)
        return (x + y.sum(0)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 8, generator=rng)


def _place(param: nn.Parameter) -> Shard | None:
    return PLACEMENTS.get(tuple(param.shape))


@on_ranks(2)
def test_shards_match_fsdp2() -> None:
    model = Dense()
    eager = fully_shard(copy.deepcopy(model), mesh=world_mesh(), shard_placement_fn=_place)
    batches = [Dense.batch(generator(step, dist.get_rank())) for step in range(3)]
    compiled = compile_sharded(model, compiler="inductor", overrides=DIMS)
    ours = train_steps(compiled, model, batches)
    theirs = train_steps(eager, eager, batches)
    for mine, other in zip(ours.grads, theirs.grads, strict=True):
        for name, grad in other.items():
            assert_close(f"gradient of {name}", mine[name], grad, 1e-6)
    states = zip(model.state_dict().items(), eager.state_dict().items(), strict=True)
    for (name, value), (other_name, other_value) in states:
        assert name == other_name and value.placements == other_value.placements
        assert value.stride() == other_value.stride()
        torch.testing.assert_close(value.to_local(), other_value.to_local())


class Broken(Dense):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            w1 = self.w1
        torch._dynamo.graph_break()
        return super().forward(x) + w1.square().mean()


CASES: dict[str, dict[str, Any]] = {
    "hpZ": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept unsharded, negative dims": {
        "reshard_after_forward": False,
        "overrides": {"*w1": {"dim": -1}, "*w2": {"dim": -2}},
    },
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_uneven_shards_accumulate_and_train(case: str) -> None:
    # Half of the microbatches are not reduced; 10 slices on 4 ranks need padding.
    model = Dense(hidden=10)
    plain = copy.deepcopy(model)
    compiled = compile_sharded(model, **{"overrides": DIMS, **CASES[case]})
    rank = dist.get_rank()
    for step in range(2):
        for micro in range(2):
            batches = draw(Dense.batch, 2 * step + micro)
            with graphshard.no_sync(model) if micro == 0 else contextlib.nullcontext():
                compiled(batches[rank]).backward()
            (sum(map(plain, batches)) / len(batches)).backward()
        assert_same(model, plain)
        for trained in (model, plain):
            sgd(trained).step()
            trained.zero_grad()


@pytest.mark.parametrize("compiles", [False, True])
@on_ranks(4)
def test_eager_parts_may_read_experts(compiles: bool) -> None:
    model = Broken(hidden=10)
    plain = copy.deepcopy(model)
    graphshard.shard(model, world_mesh(), overrides=DIMS)
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", overrides=DIMS)
    call = torch.compile(model, backend=backend) if compiles else model
    batches = draw(Dense.batch, 0)
    call(batches[dist.get_rank()]).backward()
    (sum(map(plain, batches)) / len(batches)).backward()
    assert_same(model, plain)


@on_ranks(4)
def test_expert_states_are_saved_and_loaded(tmp_path: Path) -> None:
    model, optims = Dense(hidden=10), []
    other = copy.deepcopy(model)
    for module in (model, other):
        graphshard.shard(module, world_mesh(), overrides=DIMS)
        optims.append(torch.optim.AdamW(module.parameters(), lr=0.1))
    batch = Dense.batch(generator(dist.get_rank()))
    model(batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    full_norm = torch.stack([whole(p.grad).norm() for p in model.parameters()]).norm()
    assert full_norm <= 1.01e-3 < whole(norm)
    optims[0].step()
    # Full and sharded state dicts, assignment, distributed checkpoints.
    full = graphshard.full_state_dict(model, optims[0])
    assert all(value.is_contiguous() for value in full[0].values())
    graphshard.load_full_state_dict(other, full[0], optims[1], full[1])
    assert_values(other, model)
    for name, param in model.named_parameters():
        saved, loaded = optims[0].state[param], optims[1].state[other.get_parameter(name)]
        assert loaded["exp_avg"].placements == param.placements
        assert torch.equal(whole(saved["exp_avg"]), whole(loaded["exp_avg"])), name
    plain = Dense(hidden=10)
    plain.load_state_dict(full_values(model))
    for assigns in (False, True):
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(plain.state_dict(), assign=assigns)
        assert_values(other, model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    rows = graphshard.shard(Dense(hidden=10), world_mesh())
    dcp.load(rows.state_dict(), checkpoint_id=tmp_path)
    assert_values(rows, model)
    for param, value in zip(rows.parameters(), plain.parameters()):
        param.data = torch.zeros_like(value)
    twin = copy.deepcopy(other)
    twin.to(torch.float64)
    assert_values(twin, model, dtype=torch.float64)


def assert_values(ours: nn.Module, theirs: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(other).to(dtype)), name


@on_ranks(4)
def test_experts_on_meta_device_are_initialized() -> None:
    def init(model: nn.Module) -> None:
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view(param.shape) + number)

    with torch.device("meta"):
        model = graphshard.shard(Dense(hidden=10), world_mesh(), overrides=DIMS)
    graphshard.materialize(model, init)
    plain = Dense(hidden=10)
    with torch.no_grad():
        init(plain)
    assert_values(model, plain)
    for param in model.parameters():
        param.data = whole(param) + 1
    assert torch.equal(whole(model.w1), plain.w1 + 1)
    with torch.device("meta"):
        model = graphshard.shard(Dense(hidden=10), world_mesh(), overrides=DIMS)
    model.to_empty(device="cpu")
    with pytest.raises(BackendError, match=r"elements of parameter '.*' were not initialized"):
        model(Dense.batch(generator(0)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overrides": {"*": {"dim": 1}}}, r"'norm.(weight|bias)'.*dim=1 is out of range.*\(8,\)"),
        ({"overrides": {"w1": {"dim": -4}}}, r"'w1'.*dim=-4 is out of range"),
        ({"overrides": {"w1": {"dim": True}}}, r"\['w1'\]: dim=True: must be the dimension"),
    ],
)
@on_ranks(2)
def test_wrong_dims_are_refused(options: Any, match: str) -> None:
    assert_refused(Dense(), lambda model: graphshard.shard(model, world_mesh(), **options), match)


@on_ranks(2)
def test_fp8_with_another_shard_dimension_is_refused() -> None:
    policy = graphshard.Float8Policy(filter_fn=lambda fqn, shape: True)

    def shard(model: nn.Module) -> None:
        overrides = {"weight": {"dim": 1}}
        graphshard.shard(model, world_mesh(), fp8=policy, overrides=overrides)

    assert_refused(
        nn.Linear(32, 32), shard, "'weight'.*fp8 is not supported for a parameter.*dim=1"
    )


@on_ranks(2)
def test_transformers_experts_match_unsharded_model() -> None:
    """Compare Mixtral, whose experts use torch.nn.functional.grouped_mm."""
    import transformers

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 8, "num_local_experts": 3}
    config = transformers.MixtralConfig(**sizes, use_cache=False)
    model = transformers.MixtralForCausalLM(config)
    plain = copy.deepcopy(model)

    def loss(call: Any, ids: Tensor) -> Tensor:
        result: Tensor = call(input_ids=ids, labels=ids).loss
        return result

    compiled = compile_sharded(model, overrides={"*.experts.*": {"dim": 1}})
    batches = draw(lambda rng: torch.randint(20, (2, 6), generator=rng), 0)
    loss(compiled, batches[dist.get_rank()]).backward()
    torch.stack([loss(plain, batch) for batch in batches]).mean().backward()
    assert_same(model, plain)
    placed = [p.placements for n, p in model.named_parameters() if ".experts." in n]
    assert len(placed) == 2 and set(placed) == {(Shard(1),)}
