"""Run torchtitan's own trainer on CPU ranks: `torchrun -m tests.zoo.torchtitan_on_cpu LOSSES ...`.

The other arguments are those of `torchtitan.train`. The first rank writes its log, (step, loss,
gradient norm), to the file LOSSES. With `--whole_loss`, the loss of the Qwen3 mixture of experts is
computed in one piece instead of chunks.

torchtitan 0.3 is made for GPUs, so this module replaces parts of it before its main() runs:

- The device is the CPU, without a memory monitor; process group timeouts stay unchanged.
- FSDP2 reduces gradients with plain sums, since gloo cannot divide in the collective.
- Attention is SDPA, which ignores document boundaries: FlexAttention has no backward on CPUs.
- Debug models have two layers, and Qwen's embeddings are tied, as in its small models.
- Data sets are generated text, since the wheel contains none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

# Before other imports, since modules of torchtitan copy these names.
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan import train  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.llama3 import llama3_configs  # noqa: E402
from torchtitan.models.qwen3 import config_registry, qwen3_configs  # noqa: E402

from .words import WORDS  # noqa: E402

LAYERS = 2


class NoMonitor:
    device_name = "CPU"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def _texts(_: str) -> Dataset:
    return Dataset.from_dict(
        {"text": [" ".join(WORDS[i * j % len(WORDS)] for j in range(i)) for i in range(5, 200)]}
    )


def _small(make: Callable[..., Any], tied: bool) -> Callable[..., Any]:
    def made(**kwargs: Any) -> Any:
        config = make(**kwargs)
        config.layers = config.layers[:LAYERS]
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if tied:
            config.enable_weight_tying = True
            config.tok_embeddings.param_init = {"weight": skip_param_init}
        return config

    return made


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _replace_what_needs_a_gpu(logged: list[tuple[int, float, float]]) -> None:
    def log(self: Any, step: int, loss: float, largest: float, norm: float, **_: Any) -> None:
        logged.append((step, loss, norm))

    def log_validation(self: Any, loss: float, step: int, **_: Any) -> None:
        logged.append((step, loss, 0.0))

    metrics.MetricsProcessor.log = log
    metrics.MetricsProcessor.log_validation = log_validation
    metrics.build_device_memory_monitor = NoMonitor
    fsdp.disable_fsdp_gradient_division = _sum_gradients
    distributed.set_pg_timeouts = lambda **_: None
    for name in ("c4_test", "c4_validation"):
        DATASETS[name].loader = _texts
    for configs in (llama3_configs, qwen3_configs):
        for flavor, make in configs.items():
            configs[flavor] = _small(make, tied=configs is qwen3_configs)


def _make_loss_whole() -> None:
    make = config_registry.qwen3_moe_debug

    def made() -> Any:
        config = make()
        config.loss = config.loss.loss_fn
        return config

    config_registry.qwen3_moe_debug = made


def main(losses: Path) -> None:
    logged: list[tuple[int, float, float]] = []
    _replace_what_needs_a_gpu(logged)
    if "--whole_loss" in sys.argv:
        sys.argv.remove("--whole_loss")
        _make_loss_whole()
    train.main()
    if os.environ["RANK"] == "0":
        losses.write_text(json.dumps(logged))


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
