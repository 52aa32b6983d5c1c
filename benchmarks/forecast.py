"""Forecasts beside published measurements: ``python -m benchmarks.forecast``.

Rows are from torchtitan: benchmarks/llama3_h100_202412_torchtitan.md (Llama 3.1 8B on 8 H100 with
96 GB of 2.4 TB/s at 500 W, torch.compile) and docs/performance.md (Llama 2 and 3 on 64 A100, eager
FSDP2), both by FSDP2 with parameters in bfloat16, gradients reduced in float32 and fused AdamW. No
constant was chosen by them. Memory is what the allocator has in use in the forecast, and what it
has reserved in the measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphshard.forecast.cluster import cluster
from graphshard.forecast.forecast import Forecast
from graphshard.forecast.plan import forecast
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import Inputs
from graphshard.forecast.workload import Workload

from .llama import LLAMA3, Llama, LlamaSizes

GIB = 1 << 30
LLAMA2_13B = LlamaSizes(5120, 40, 40, 40, 13824, recompute=False, vocab=32000)
LLAMA2_70B = LlamaSizes(8192, 80, 64, 8, 28672, recompute=True, vocab=32000)
"""arXiv 2307.09288, and its config.json."""


@dataclass(frozen=True)
class Published:
    """A measurement.

    Attributes:
        recompute: none, op (torchtitan's selective option) or full.
        tokens_per_s: on each GPU.
        memory_gib: reserved; None: not published.
    """

    name: str
    sizes: LlamaSizes
    device: str
    gpus: int
    batch: int
    length: int
    recompute: str
    dtype: str
    tokens_per_s: float
    memory_gib: float | None = None


_LLAMA3_8B, _LLAMA3_70B = LLAMA3["8B"], LLAMA3["70B"]
PUBLISHED = (
    Published("Llama 3 8B", _LLAMA3_8B, "H100-96GB", 8, 2, 8192, "op", "bf16", 6667, 77.0),
    Published("Llama 3 8B", _LLAMA3_8B, "H100-96GB", 8, 2, 8192, "op", "fp8", 8532, 76.8),
    Published("Llama 3 8B", _LLAMA3_8B, "A100-80GB", 64, 1, 8192, "op", "bf16", 2973),
    Published("Llama 3 70B", _LLAMA3_70B, "A100-80GB", 64, 1, 8192, "full", "bf16", 331),
    Published("Llama 2 13B", LLAMA2_13B, "A100-80GB", 64, 2, 4096, "none", "bf16", 2162),
    Published("Llama 2 13B", LLAMA2_13B, "A100-80GB", 64, 2, 4096, "op", "bf16", 1904),
    Published("Llama 2 70B", LLAMA2_70B, "A100-80GB", 64, 2, 4096, "full", "bf16", 353),
)

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _policy(counts: dict[str, int], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Save attention and every second matrix product, as torchtitan's selective option "op"."""
    if op == torch.ops.aten.mm.default:
        name = "recomputed" if context.is_recompute else "forward"
        counts[name] = counts.get(name, 0) + 1
        saves = counts[name] % 2 == 1
    else:
        saves = op == _ATTENTION
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, {}))


def _workload(published: Published) -> Workload:
    def make(num_layers: int | None) -> tuple[nn.Module, Inputs]:
        layers = num_layers or published.sizes.layers
        recomputes = published.recompute == "full"
        sizes = dataclasses.replace(published.sizes, layers=layers, recompute=recomputes)
        model: Any = Llama(sizes)
        for block in model.blocks if published.recompute == "op" else ():
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=_contexts
            )
        ids = torch.zeros((published.batch, published.length), dtype=torch.int64)
        return model, (ids, ids)

    tokens = published.batch * published.length
    return Workload(published.name, make, tokens, num_layers=published.sizes.layers)


def predict(published: Published) -> Forecast:
    """Forecast what was measured."""
    machine = cluster(published.device, published.gpus)
    return forecast(_workload(published), Recipe(dtype=published.dtype), machine)


def rows(chosen: list[int]) -> Iterator[list[Any]]:
    for number in chosen:
        published = PUBLISHED[number]
        found = predict(published)
        per_gpu = found.tokens_per_s / found.cluster.num_gpus
        memory = found.memory.allocated / GIB
        yield [
            published.name,
            f"{published.gpus} {published.device}",
            f"{published.batch} x {published.length}",
            published.dtype,
            published.recompute,
            published.tokens_per_s,
            round(per_gpu),
            f"{per_gpu / published.tokens_per_s - 1:+.0%}",
            published.memory_gib,
            round(memory, 1),
        ]


def main() -> None:
    """Print the table; arguments are the numbers of rows."""
    chosen = [int(text) for text in sys.argv[1:]] or list(range(len(PUBLISHED)))
    headers = ["model", "GPUs", "batch", "dtype", "recomputed", "tokens/s", "forecast", "error"]
    headers += ["GiB", "forecast"]
    print(tabulate(rows(chosen), headers, tablefmt="github"))


if __name__ == "__main__":
    main()
