from __future__ import annotations

import pytest

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
