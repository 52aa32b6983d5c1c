from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.fake_mesh import Ranks
from graphshard.forecast.cluster import cluster
from graphshard.forecast.plan import forecast
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import TracedStep, trace
from graphshard.forecast.workload import BatchShape, find_workload, module_workload
from graphshard.kinds import TransferKind
from graphshard.tensor_parallel import parallelize
from tests.ranks import on_ranks

from .test_trace import HARDWARE, Stack, _ids

RECIPE = Recipe("hsdp:2", tp=2)
SIZES = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2"


def _split(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def _trace(recipe: Recipe) -> TracedStep:
    options = recipe.traced_options()
    return trace(
        lambda: (Stack(2), (_ids(),)), recipe.ranks(8), HARDWARE, options, parallelize=_split
    )


def test_split_parameters_are_sharded_over_data_ranks() -> None:
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


def test_groups_of_earlier_trace_are_not_used() -> None:
    # The meshes of both tensor-parallel axes are equal, but one group has another name.
    assert _trace(Recipe("zero3", tp=2)).graphs
    assert _trace(RECIPE).graphs


def test_tokens_of_shared_batch_are_counted_once() -> None:
    workload = module_workload(nn.Identity(), (torch.zeros(64),))
    shown = forecast(workload, RECIPE, cluster("H100", 8), traced=_trace(RECIPE))
    assert shown.tokens == 4 * 64
    assert "hsdp:2, tp 2, bf16" in str(shown)
    assert (
        'mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))\n'
        'parallelize(model, mesh["tp"])'
    ) in shown.code()
    assert 'graphshard.backend(mesh["replicate", "shard"], ' in shown.code()


def test_collectives_of_split_model_are_listed_as_exposed() -> None:
    workload = module_workload(nn.Identity(), (torch.zeros(64),))
    shown = forecast(workload, RECIPE, cluster("H100", 8), traced=_trace(RECIPE))
    for dump in shown.dumps:
        users = dump.plan.problem.user_collectives
        (row,) = [one for one in shown.exposed if one.what.startswith(f"{dump.plan.graph} user")]
        assert row.what == f"{dump.plan.graph} user all_reduce ({len(users)})"
        assert row.us == pytest.approx(dump.totals.user_exposed_us) and row.us > 0


def test_llama_is_split_by_plan_in_its_config() -> None:
    workload = find_workload(f"qwen3:{SIZES},vocab_size=96,num_hidden_layers=1", BatchShape(1, 8))
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


@on_ranks(2)
def test_loss_and_gradients_of_split_llama_match_whole_model() -> None:
    workload = find_workload(f"llama:{SIZES},vocab_size=96,num_hidden_layers=1", BatchShape(2, 8))
    torch.manual_seed(0)
    whole: Any = workload.make(1)[0]
    ids = torch.randint(96, (2, 8))
    labels = ids.masked_fill(torch.rand(2, 8) < 0.3, -100)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    split = copy.deepcopy(whole)
    parallelize(split, mesh["tp"])
    assert split(input_ids=ids).logits.shape == (2, 8, 96 / 2)
    with pytest.raises(ValueError, match="pass position_ids with inputs_embeds"):
        split(inputs_embeds=torch.zeros(2, 8, 64))
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    # As the Trainer passes them.
    more = {"num_items_in_batch": torch.tensor(7), "shift_labels": labels.roll(-1, 1)}
    torch.testing.assert_close(split(**inputs, **more).loss, whole(**inputs, **more).loss)
    backend = graphshard.backend(mesh["dp"], compiler="aot_eager")
    compiled: Any = torch.compile(split, backend=backend)
    expected, loss = whole(**inputs).loss, compiled(**inputs).loss
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for one, param in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), one.grad)


def test_experts_are_refused() -> None:
    workload = find_workload(f"mixtral:{SIZES},num_hidden_layers=1", BatchShape(1, 8))
    with pytest.raises(ValueError, match=r"cannot split .*experts.* by style .*: pass a function"):
        trace(
            lambda: workload.make(1), Ranks(1, 4, 2), HARDWARE, {}, parallelize=workload.parallelize
        )
