"""Compare forecasts with published measurements: ``python -m benchmarks.forecast [ROW ...]``.

``published`` has the measurements and their sources. Only the prediction intervals of forecasts are
fitted to them. The memory table compares allocated bytes (forecast) with reserved bytes (measured),
and with the formulas of other projects.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Sequence
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
from graphshard.forecast.interval import error_interval
from graphshard.forecast.plan import forecast
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import Inputs
from graphshard.forecast.workload import Workload

from .llama import Llama
from .memory_formulas import memory_table
from .published import PUBLISHED, Published

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.graphshard.float8_mm.default)


def _policy(counts: dict[str, int], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Save attention and every other matrix product, like torchtitan's selective option "op"."""
    if op in _PRODUCTS:
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
    """Forecast the published run."""
    machine = cluster(published.device, published.gpus, link=published.link)
    recipe = Recipe(published.strategy, published.dtype)
    return forecast(_workload(published), recipe, machine)


def ratio(published: Published, found: Forecast) -> float:
    """Return the ratio of the measured to the modelled time of a step."""
    measured_s = found.tokens / found.cluster.num_gpus / published.tokens_per_s
    return measured_s * 1e6 / found.time.modelled_us


_COMPILED = {True: "blocks", False: "no", None: "not said"}


def time_row(published: Published, found: Forecast) -> list[Any]:
    """Return a row of the throughput table."""
    tokens_per_s = found.tokens_per_s / found.cluster.num_gpus
    return [
        f"{published.name} {published.source}",
        f"{published.gpus} {published.device}",
        f"{published.batch} x {published.length}",
        published.dtype,
        published.recompute,
        _COMPILED[published.compiled],
        published.tokens_per_s,
        round(tokens_per_s),
        f"{tokens_per_s / published.tokens_per_s - 1:+.0%}",
    ]


def interval(ratios: Sequence[float]) -> str:
    """Describe the interval that follows from ``ratios``, and its leave-one-out accuracy."""
    errors = error_interval(ratios)
    others = [error_interval([*ratios[:i], *ratios[i + 1 :]]) for i in range(len(ratios))]
    covered = sum(error.covers(ratio) for error, ratio in zip(others, ratios))
    off = statistics.median(abs(e.likely / ratio - 1) for e, ratio in zip(others, ratios))
    return (
        f"Without rows that were not compiled: steps took {errors.low:.2f} to {errors.high:.2f} "
        f"times the modelled time, {errors.likely:.2f} in the median. Made of all other rows, such "
        f"an interval holds {covered} of {len(ratios)}, and the forecast is off by {off:.0%} in "
        "the median."
    )


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
    ratios = [ratio(*each) for each in found if each[0].compiled is not False]
    if len(ratios) > 1:
        print(f"\n{interval(ratios)}")
    print(f"\n{memory_table(found)}")


if __name__ == "__main__":
    main()
