"""Compare forecasts with published measurements: ``python -m benchmarks.forecast [ROW ...]``.

Only the prediction intervals of forecasts are fitted to the measurements. All runs use AdamW, and
gather parameters in bfloat16 (or in fp8, where the dtype is fp8). Sources:

    [h100]   torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1, FSDP2, H100 with
             96 GB at 2.4 TB/s and 500 W, 400 Gb/s per GPU
    [h200]   torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: the same on H200
    [a100]   torchtitan, docs/performance.md of 2024: Llama 2 and 3, FSDP2, 64 A100
    [fms]    github.com/foundation-model-stack/fms-fsdp, README.md: Llama 2, FSDP1, 128 A100 with
             400 Gb/s per node (pytorch.org/blog/maximizing-training)
    [ibm]    pytorch.org/blog/maximizing-training: the same on 96 H100 with 800 Gb/s per node
    [race]   results/race.md: FSDP2 and graphshard on one H200 as the first of 8 ranks, over
             modelled links
    [eager]  torchtitan pull request 2961: its graph trainer (SimpleFSDP and tensor parallelism) in
             one graph of eager kernels; 8192 tokens for each data rank, and option "op", are the
             defaults of its configuration
    [graph]  torchtitan pull request 3141: the same, compiled by Inductor
    [4]      a reported figure for which no source was found; all settings are assumed

The memory table compares allocated bytes (forecast) with reserved bytes (measured).

The intervals are not fitted to rows with tensor parallelism or to uncompiled rows. The memory table
omits rows with tensor parallelism, and uncompiled rows whose memory was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterable, Sequence
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

from .forecast_report import covers, error_interval
from .llama import LLAMA3, Llama, LlamaSizes, parallelize

GIB = 1 << 30
LLAMA2_7B = LlamaSizes(4096, 32, 32, 32, 11008, recompute=False, vocab=32000)
LLAMA2_13B = LlamaSizes(5120, 40, 40, 40, 13824, recompute=False, vocab=32000)
LLAMA2_70B = LlamaSizes(8192, 80, 64, 8, 28672, recompute=True, vocab=32000)
"""Sizes from arXiv 2307.09288 and the config.json of each model."""


@dataclass(frozen=True)
class Published:
    """A published measurement.

    Attributes:
        source: name of the source in the module docstring.
        compiled: whether blocks are compiled, or None if the source does not say.
        recompute: recomputed activations: "none", "op" (torchtitan's selective option) or "full".
        tokens_per_s: throughput of each GPU.
        memory_gib: reserved memory of each GPU, if published.
        link: network between nodes, as in ``cluster`` (default: the device's).
        tp: number of GPUs over which tensor parallelism splits the model; they share a batch.
    """

    source: str
    name: str
    sizes: LlamaSizes
    device: str
    gpus: int
    batch: int
    length: int
    recompute: str
    dtype: str
    compiled: bool | None
    tokens_per_s: float
    memory_gib: float | None = None
    strategy: str = "zero3"
    link: str | None = None
    tp: int = 1


_H100, _A100 = "H100-96GB", "A100-80GB"
_8B, _70B = ("Llama 3 8B", LLAMA3["8B"]), ("Llama 3 70B", LLAMA3["70B"])
_2_7B, _2_13B, _2_70B = (
    ("Llama 2 7B", LLAMA2_7B),
    ("Llama 2 13B", LLAMA2_13B),
    ("Llama 2 70B", LLAMA2_70B),
)
PUBLISHED = (
    Published("[h100]", *_8B, _H100, 8, 2, 8192, "op", "bf16", True, 6667, 77.0),
    Published("[h100]", *_8B, _H100, 8, 2, 8192, "op", "fp8", True, 8532, 76.8),
    Published("[a100]", *_8B, _A100, 64, 1, 8192, "op", "bf16", None, 2973),
    Published("[a100]", *_70B, _A100, 64, 1, 8192, "full", "bf16", None, 331),
    Published("[a100]", *_2_13B, _A100, 64, 2, 4096, "none", "bf16", None, 2162),
    Published("[a100]", *_2_13B, _A100, 64, 2, 4096, "op", "bf16", None, 1904),
    Published("[a100]", *_2_70B, _A100, 64, 2, 4096, "full", "bf16", None, 353),
    Published("[h100]", *_8B, _H100, 8, 2, 8192, "op", "bf16", False, 5762, 82.4),
    Published("[h100]", *_8B, _H100, 128, 2, 8192, "op", "bf16", False, 5605, 67.0),
    Published("[h100]", *_8B, _H100, 128, 2, 8192, "op", "bf16", True, 6514, 62.0),
    Published("[h100]", *_8B, _H100, 128, 2, 8192, "op", "fp8", True, 8380, 61.8),
    Published("[h100]", *_8B, _H100, 8, 1, 32768, "full", "fp8", True, 3890, 83.9),
    Published("[h200]", *_8B, "H200", 32, 2, 8192, "op", "fp8", True, 10938, 47.96),
    Published("[h200]", *_8B, "H200", 64, 2, 8192, "op", "fp8", True, 10753, 46.97),
    Published(
        *("[fms]", *_2_7B, _A100, 128, 2, 4096, "none", "bf16", False, 3760),
        strategy="hsdp:8",
        link="50Gb/s",
    ),
    Published(*("[fms]", *_2_70B, _A100, 128, 6, 4096, "full", "bf16", False, 380), link="50Gb/s"),
    Published(*("[ibm]", *_2_70B, "H100", 96, 2, 4096, "full", "bf16", False, 800), link="100Gb/s"),
    Published("[race]", *_8B, "H200", 8, 1, 8192, "none", "bf16", True, 10116, 58.0),
    Published("[race]", *_8B, "H200", 8, 1, 8192, "none", "bf16", True, 10239, 55.6),
    Published("[graph]", *_8B, "H100", 8, 1, 8192, "op", "bf16", True, 7522, 38.4, tp=2),
    Published("[eager]", *_8B, "H100", 8, 1, 8192, "op", "bf16", False, 7214, tp=2),
    Published("[4]", *_8B, "H200", 4, 1, 8192, "op", "bf16", None, 6495, tp=2),
)

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.graphshard.float8_mm.default)


def _policy(counts: dict[str, int], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Select activations to save as torchtitan's option "op" does.

    It saves attention, every second matrix product, and reduce-scatters of tensor parallelism.
    """
    if op in _PRODUCTS:
        name = "recomputed" if context.is_recompute else "forward"
        counts[name] = counts.get(name, 0) + 1
        saves = counts[name] % 2 == 1
    else:
        saves = op in (_ATTENTION, _REDUCE_SCATTER)
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
    layers = published.sizes.layers
    return Workload(published.name, make, tokens, num_layers=layers, parallelize=parallelize)


def predict(published: Published) -> Forecast:
    machine = cluster(published.device, published.gpus, link=published.link)
    recipe = Recipe(published.strategy, published.dtype, tp=published.tp)
    return forecast(_workload(published), recipe, machine)


def ratio(published: Published, found: Forecast) -> float:
    measured_s = found.tokens / found.cluster.num_gpus / published.tokens_per_s
    return measured_s * 1e6 / found.time.modelled_us


_COMPILED = {True: "blocks", False: "no", None: "not said"}


def time_row(published: Published, found: Forecast) -> list[Any]:
    tokens_per_s = found.tokens_per_s / found.cluster.num_gpus
    return [
        f"{published.name} {published.source}",
        f"{published.gpus} {published.device}{f', tp {published.tp}' * (published.tp > 1)}",
        f"{published.batch} x {published.length}",
        published.dtype,
        published.recompute,
        _COMPILED[published.compiled],
        published.tokens_per_s,
        round(tokens_per_s),
        f"{tokens_per_s / published.tokens_per_s - 1:+.0%}",
    ]


def interval(ratios: Sequence[float]) -> str:
    errors = error_interval(ratios)
    others = [error_interval([*ratios[:i], *ratios[i + 1 :]]) for i in range(len(ratios))]
    covered = sum(map(covers, others, ratios))
    off = statistics.median(abs(e.likely / ratio - 1) for e, ratio in zip(others, ratios))
    return (
        f"Without rows that were not compiled: steps took {errors.low:.2f} to {errors.high:.2f} "
        f"times the modelled time, {errors.likely:.2f} in the median. Leave-one-out intervals "
        f"cover {covered} of {len(ratios)} rows, and the median error of such forecasts is "
        f"{off:.0%}."
    )


def memory_table(found: Iterable[tuple[Published, Forecast]]) -> str:
    lines = {}
    for published, result in found:
        if published.tp > 1:
            continue
        memory, held = result.memory, result.held
        states = held.parameters + held.trained + memory.optimizer
        numbers = (states, memory.allocated, memory.high)
        name = (
            f"{published.name}, {published.gpus} {published.device}, {published.batch} x "
            f"{published.length}, {published.dtype}, {published.recompute} recomputed"
        )
        if published.compiled is not False or published.memory_gib is None:
            lines[name] = [name, *(b / GIB for b in numbers), published.memory_gib]
    headers = ["GiB", "states", "all", "at most", "reserved"]
    return tabulate(list(lines.values()), headers, tablefmt="github", floatfmt=".1f")


def main() -> None:
    """Print the tables; command-line arguments are the numbers of the rows to forecast."""
    chosen = [int(text) for text in sys.argv[1:]] or list(range(len(PUBLISHED)))
    found = []
    for number in chosen:
        found.append((PUBLISHED[number], predict(PUBLISHED[number])))
        print(f"row {number}: {ratio(*found[-1]):.2f}", file=sys.stderr, flush=True)
    headers = ["model", "GPUs", "batch", "dtype", "recomputed", "compiled", "tokens/s"]
    headers += ["forecast", "error"]
    print(tabulate([time_row(*each) for each in found], headers, tablefmt="github"))
    ratios = [ratio(*each) for each in found if each[0].compiled is not False and each[0].tp == 1]
    if len(ratios) > 1:
        print(f"\n{interval(ratios)}")
    print(f"\n{memory_table(found)}")


if __name__ == "__main__":
    main()
