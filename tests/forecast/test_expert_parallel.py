from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from graphshard.dynamo_backend import backend
from graphshard.fake_mesh import Ranks, fake_mesh, sharding_options
from graphshard.forecast.cluster import cluster
from graphshard.forecast.plan import forecast
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.workload import BatchShape, Workload, find_workload
from graphshard.kinds import TransferKind

SIZES = "hidden_size=64,intermediate_size=32,num_attention_heads=2,num_key_value_heads=2"
LAYERS = "vocab_size=96,num_hidden_layers=1"


def _workload(family: str) -> Workload:
    return find_workload(f"{family}:{SIZES},{LAYERS}", BatchShape(1, 16))


def test_experts_are_split_and_their_all_to_alls_are_priced() -> None:
    result = forecast(_workload("mixtral"), Recipe(ep=4), cluster("H100", 32))
    assert "zero3, ep 4, bf16" in str(result)
    assert "equal numbers of tokens" in str(result)
    assert result.tokens == 32 * 16
    for dump in result.dumps:
        plan = dump.plan
        exchanges = [u for u in plan.problem.user_collectives if u.op == "all_to_all_single"]
        rows = [u.num_bytes for u in exchanges if u.num_bytes > 8 * 8]  # no token counts
        assert rows == [2 * 16 * 64 * 2] * 2  # two experts for each token, in bfloat16
        assert {(u.world, u.stride) for u in exchanges} == {(4, 1)}
        gathers = [t for t in plan.problem.transfers if t.kind == TransferKind.ALL_GATHER]
        # Eight ranks do not divide two of eight experts, so the next dimension is sharded.
        experts = [t for t in gathers if (t.world, t.stride) == (8, 4)]
        assert sorted(t.num_bytes for t in experts) == [2 * 32 * 64 * 2, 2 * 2 * 32 * 64 * 2]
        assert {t.world for t in gathers if t not in experts} == {32}
    assert 'parallelize(model, mesh["ep"])' in result.code()
    assert "graphshard.backend(data_mesh(mesh), overrides=overrides(model, mesh)" in result.code()


def test_unsupported_models_and_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts of LlamaForCausalLM: .* just two parameters"):
        forecast(_workload("llama"), Recipe(ep=4), cluster("H100", 8))
    with pytest.raises(ValueError, match="ep=16: must divide the number of experts in"):
        forecast(_workload("mixtral"), Recipe(ep=16), cluster("H100", 16))
    odd = find_workload(f"mixtral:{SIZES},{LAYERS}", BatchShape(1, 17))
    with pytest.raises(ValueError, match="ep=4: must divide the 17 tokens of a microbatch"):
        forecast(odd, Recipe(ep=4), cluster("H100", 8))
    with pytest.raises(ValueError, match="ep=4 with strategy='hsdp:2': use zero3 or zero2"):
        Recipe("hsdp:2", ep=4)


def test_users_overrides_are_combined_with_those_of_experts() -> None:
    ranks = Ranks(1, 8, ep=4)
    model = nn.ModuleDict({"router": nn.Linear(8, 8), "experts": nn.Linear(8, 8)})
    user = {
        "experts.bias": {"shard": False},
        "router": {"fp8": None},
        "experts*": {"reshard_after_forward": False},
        "experts.weight": {"reshard_after_forward": True},
    }
    with fake_mesh(ranks, "cpu") as mesh:
        weight = DTensor.from_local(torch.zeros(2, 8), mesh["ep"], [Shard(0)])
        model["experts"].weight = nn.Parameter(weight)
        options = sharding_options({"overrides": user, "fp8": None}, model, mesh, ranks)
        split, bias, router = (
            backend(**options).options.for_parameter([fqn])
            for fqn in ("experts.weight", "experts.bias", "router.weight")
        )
        assert split.mesh == mesh["efsdp"] and split.dim == 0
        assert split.reshard_after_forward is True and split.shard
        assert bias.mesh != split.mesh and not bias.shard and not bias.reshard_after_forward
        assert router.reshard_after_forward is True
