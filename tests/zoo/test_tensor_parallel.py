"""Tensor-parallel models of `transformers`, compared with FSDP2 under the same plan.

`transformers` applies its own plans; `parallelize_module` applies those for `peft`'s adapters and
for models that are read from files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from tests.numerics.compare import generator, whole
from tests.numerics.parallel import assert_like_fsdp2, mesh_2d, train
from tests.ranks import on_ranks

from .models import Batch, causal_batch, llama, model_loss

# One layer, of sizes that two ranks can split evenly.
EVEN = {"num_hidden_layers": 1, "vocab_size": 102, "intermediate_size": 44}


def _llama() -> Any:
    torch.manual_seed(0)
    return llama(**EVEN)


def _with_its_own_plan(model: Any, mesh: DeviceMesh) -> Any:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh["tp"].size()))
    return apply_tensor_parallelism(model, mesh["tp"], plan)


def _split_by_torch(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for number in range(len(model.model.layers)):
        prefix = f"model.layers.{number}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"{prefix}.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            plan[f"{prefix}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{prefix}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)


def _with_adapters(mesh: DeviceMesh) -> Any:
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_llama(), config)
    for layer in model.base_model.model.model.layers:
        plan: dict[str, Any] = {
            "self_attn.q_proj.base_layer": ColwiseParallel(),
            "self_attn.q_proj.lora_B.default": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj.base_layer": RowwiseParallel(),
            "self_attn.o_proj.lora_A.default": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
    return model


def _batches(mesh: DeviceMesh) -> list[Batch]:
    return [causal_batch(generator(step, mesh["dp"].get_local_rank())) for step in range(2)]


def _compile(model: Any, mesh: DeviceMesh) -> Any:
    backend = graphshard.backend(mesh["dp"], compiler="aot_eager")
    return torch.compile(model, backend=backend, fullgraph=True)


def _train_both(model: Any, eager: Any, mesh: DeviceMesh) -> None:
    """Train under graphshard and FSDP2, and compare.

    Not bitwise: on some CPUs a matrix product adds in another order if an operand is transposed.
    """
    fully_shard(eager, mesh=mesh["dp"])
    compiled, data = _compile(model, mesh), _batches(mesh)
    ours = train(lambda batch: model_loss(compiled, batch), model, data)
    theirs = train(lambda batch: model_loss(eager, batch), eager, data)
    for mine, other in zip(ours, theirs, strict=True):
        assert_like_fsdp2(mine, other, tolerance=1e-6)
    assert_like_fsdp2(model.state_dict(), eager.state_dict(), tolerance=1e-6)


@on_ranks(4)
def test_transformers_plan_trains_like_fsdp2() -> None:
    mesh = mesh_2d()
    model, eager = (_with_its_own_plan(_llama(), mesh) for _ in range(2))
    _train_both(model, eager, mesh)


@on_ranks(4)
def test_adapters_train_like_fsdp2(tmp_path: Path) -> None:
    mesh = mesh_2d()
    model = _with_adapters(mesh)
    _train_both(model, _with_adapters(mesh), mesh)
    full = {name: whole(param) for name, param in model.named_parameters()}
    model.save_pretrained(tmp_path)
    if dist.get_rank() == 0:
        saved = load_file(tmp_path / "adapter_model.safetensors")
        assert len(saved) == sum("lora" in name for name in full)
        for name, value in saved.items():
            assert torch.equal(value, full[name.replace(".weight", ".default.weight")]), name


@on_ranks(4)
def test_files_are_read_into_shards(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from graphshard.integrations.transformers import from_pretrained

    mesh, folder, tied = mesh_2d(), tmp_path / "model", tmp_path / "tied"
    if dist.get_rank() == 0:
        _llama().save_pretrained(folder)
        llama(**EVEN, tie_word_embeddings=True).save_pretrained(tied)
    dist.barrier()
    theirs = _llama()
    _split_by_torch(theirs, mesh)
    graphshard.shard(theirs, mesh["dp"])
    ours = from_pretrained(
        LlamaForCausalLM, folder, mesh["dp"], parallelize=lambda model: _split_by_torch(model, mesh)
    )
    assert_like_fsdp2(ours.state_dict(), theirs.state_dict())
    batch = _batches(mesh)[0]
    loss = model_loss(_compile(ours.train(), mesh), batch)
    torch.testing.assert_close(loss, model_loss(_llama(), batch), rtol=1e-6, atol=0)

    def untie(model: Any) -> None:
        parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel()})

    with pytest.raises(ValueError, match=r"parallelize unties 'lm_head\.weight'"):
        from_pretrained(LlamaForCausalLM, tied, mesh["dp"], parallelize=untie)
