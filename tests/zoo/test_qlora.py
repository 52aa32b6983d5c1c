"""QLoRA: peft adapters on a base quantized by torchao.

Quantized weights are tensor subclasses and cannot be sharded. With `ignored_params`, every rank
keeps them in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import BackendError
from tests import ranks
from tests.numerics.compare import Twins, assert_close, draw, sgd, step_all, world_mesh

from .models import causal_batch, llama, model_loss


def _int8(base: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(base, Int8WeightOnlyConfig())


def _int4(base: nn.Module) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    quantize_(base, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)))


def _nf4(base: nn.Module) -> None:
    from torchao.quantization.quantize_.workflows import to_nf4

    for module in base.modules():
        if isinstance(module, nn.Linear):
            weight = to_nf4(module.weight.detach(), block_size=64, scaler_block_size=4)
            module.weight = nn.Parameter(weight, requires_grad=False)


QUANTISE: dict[str, Callable[[nn.Module], None]] = {"int8": _int8, "int4": _int4, "nf4": _nf4}


def _adapted(name: str) -> Any:
    import peft

    torch.manual_seed(0)
    base = llama(num_hidden_layers=1, intermediate_size=48)
    QUANTISE[name](base.model.layers)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


def _quantized(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if type(p.data) is not torch.Tensor}


def _train(name: str, compiler: str) -> None:
    model = _adapted(name)
    quantized = _quantized(model)
    assert len(quantized) == 7
    reference = _adapted(name)  # instead of deepcopy, which quantizes NF4 again
    twins = Twins(model, reference, compiler=compiler, ignored_params=set(quantized.values()))
    optimizers = [sgd(twins.model), sgd(twins.reference)]
    for step in range(3):
        twins.backward(draw(causal_batch, step), model_loss)
        _check(twins, quantized)
        step_all(*optimizers)


def _check(twins: Twins, quantized: dict[str, nn.Parameter]) -> None:
    theirs = dict(twins.reference.named_parameters())
    for name, param in twins.model.named_parameters():
        if name in quantized:
            assert param is quantized[name] and param.grad is None
            assert torch.equal(_values(param), _values(theirs[name])), name
        else:
            assert isinstance(param, DTensor), name
            assert_close(f"{name}.grad", param.grad, theirs[name].grad)
            assert_close(name, param, theirs[name])


def _values(param: Any) -> torch.Tensor:
    in_full = param.get_original_weight if hasattr(param, "get_original_weight") else None
    values: torch.Tensor = (in_full or param.dequantize)()
    return values


def test_quantized_base_in_ignored_params_trains_with_inductor() -> None:
    ranks.run(2, _train, "int8", "inductor")


def test_quantized_base_in_ignored_params_trains() -> None:
    ranks.run(2, _train, "nf4", "aot_eager")


def _refused(name: str) -> str:
    model = _adapted(name)
    before = list(model.parameters())
    compiled = torch.compile(model, backend=graphshard.backend(world_mesh(), compiler="aot_eager"))
    with pytest.raises(BackendError) as caught:
        compiled(**draw(causal_batch, 0)[dist.get_rank()])
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert not any(isinstance(param, DTensor) for param in before)
    return str(caught.value)


@pytest.mark.parametrize("name", QUANTISE)
def test_quantized_base_is_refused_with_advice(name: str) -> None:
    for text in ranks.run(2, _refused, name):
        assert "layers.0.self_attn.q_proj.base_layer.weight' is a" in text
        assert "ignored_params=" in text
