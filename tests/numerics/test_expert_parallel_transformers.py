"""Experts of transformers models, split by ``graphshard.expert_parallel``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard import expert_parallel
from graphshard.forecast.workload import BatchShape, find_workload
from tests.numerics.compare import assert_close, whole
from tests.ranks import on_ranks

SIZES = (
    "hidden_size=32,num_attention_heads=2,num_key_value_heads=2,vocab_size=64,num_hidden_layers=1"
)
SIZES += ",moe_intermediate_size=16,num_experts=4,num_experts_per_tok=3,head_dim=16"


@on_ranks(2)
def test_gradients_match_whole_model() -> None:
    torch.manual_seed(0)
    plain: Any = find_workload(f"qwen3_moe:{SIZES}", BatchShape(1, 8)).make(None)[0]
    batches = torch.randint(64, (2, 2, 8))
    losses = [plain(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]
    torch.stack(losses).mean().backward()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=expert_parallel.AXES)
    model = copy.deepcopy(plain)
    expert_parallel.parallelize(model, mesh["ep"])
    model = copy.deepcopy(model)
    compiled: Any = torch.compile(
        model,
        fullgraph=True,
        backend=graphshard.backend(
            expert_parallel.data_mesh(mesh),
            overrides=expert_parallel.overrides(model, mesh),
            compiler="aot_eager",
        ),
    )
    ids = batches[dist.get_rank()]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    assert_close("loss", loss, losses[dist.get_rank()])
    for name, param in plain.named_parameters():
        assert_close(name, whole(model.get_parameter(name).grad), param.grad)


@on_ranks(2)
def test_frozen_experts_stay_frozen() -> None:
    model: Any = find_workload(f"qwen3_moe:{SIZES}", BatchShape(1, 8)).make(None)[0]
    frozen = {name for name, _ in model.named_parameters() if "experts" in name}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    expert_parallel.parallelize(model, init_device_mesh("cpu", (2,)))
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad} != set()
