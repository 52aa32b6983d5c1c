"""Forecasts of tensor-parallel models on a simulated mesh."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graphshard.forecast.cluster import cluster
from graphshard.forecast.plan import make_forecast
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import Ranks, TracedStep, trace
from graphshard.forecast.workload import BatchShape, find_workload
from graphshard.kinds import TransferKind

from .test_trace import HARDWARE, Stack, _ids

RECIPE = Recipe("hsdp:2", tp=2)


def _split(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def _trace(recipe: Recipe) -> TracedStep:
    options = recipe.traced_options()
    return trace(
        lambda: (Stack(2), (_ids(),)), recipe.ranks(8), HARDWARE, options, parallelize=_split
    )


def test_shards_of_split_parameters() -> None:
    whole, split = _trace(Recipe("hsdp:2")), _trace(RECIPE)
    assert RECIPE.ranks(8) == Ranks(replicas=2, shards=2, tp=2)
    assert split.held.num_params == whole.held.num_params
    # Two blocks have two weights [256, 64] each; tp halves them, and two ranks share each half.
    assert whole.held.parameters - split.held.parameters == 4 * 256 * 64 * 4 / 2 / 2
    for graph in split.graphs:
        shapes = {param.fqn: param.shape for param in graph.params}
        assert shapes["blocks.1.up.weight"] == (128, 64)
        assert shapes["blocks.1.down.weight"] == (64, 128)
        for transfer in graph.problem.transfers:
            assert (transfer.world, transfer.stride) == (2, 2)
            reduces = transfer.kind == TransferKind.REDUCE_SCATTER
            assert transfer.replica_stride == (4 if reduces else 1)


def test_groups_of_an_earlier_trace_are_not_used() -> None:
    # The meshes of both tensor-parallel axes are equal, but one group has another name.
    assert _trace(Recipe("zero3", tp=2)).graphs
    assert _trace(RECIPE).graphs


def test_ranks_that_share_a_batch_count_its_tokens_once() -> None:
    forecast = make_forecast(_trace(RECIPE), RECIPE, cluster("H100", 8), model="", tokens=64)
    assert forecast.tokens == 4 * 64
    assert "hsdp:2, tp 2, bf16" in str(forecast)
    assert (
        'mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))\n'
        'parallelize(model, mesh["tp"])'
    ) in forecast.code()
    assert 'graphshard.backend(mesh["replicate", "shard"], ' in forecast.code()


def test_a_llama_is_split_as_its_configuration_says() -> None:
    sizes = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2"
    workload = find_workload(f"qwen3:{sizes},vocab_size=96,num_hidden_layers=1", BatchShape(1, 8))
    step = trace(
        lambda: workload.make(1),
        Ranks(1, 4, 2),
        HARDWARE,
        Recipe().traced_options(),
        parallelize=workload.parallelize,
    )
    shapes = {param.fqn: param.shape for param in step.graphs[0].params}
    layer = "model.layers.0"
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (48, 64)
    assert shapes[f"{layer}.mlp.down_proj.weight"] == (64, 64)
    assert shapes[f"{layer}.self_attn.q_proj.weight"] == (2 * 128, 64)
    assert shapes[f"{layer}.self_attn.q_norm.weight"] == (128,)
    assert shapes[f"{layer}.input_layernorm.weight"] == shapes["model.norm.weight"] == (64,)


def test_experts_are_refused() -> None:
    sizes = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2"
    workload = find_workload(f"mixtral:{sizes},num_hidden_layers=1", BatchShape(1, 8))
    with pytest.raises(ValueError, match=r"cannot split .*experts.* by style .*: pass a function"):
        trace(
            lambda: workload.make(1), Ranks(1, 4, 2), HARDWARE, {}, parallelize=workload.parallelize
        )
