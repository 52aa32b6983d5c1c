"""Memory of a training step by the formulas of other projects, next to forecast and measurement.

- DeepSpeed: ``estimate_zero3_model_states_mem_needs_all_live`` without offload
  (deepspeed/runtime/zero/stage3.py): 4 bytes per parameter of the largest layer, and 18 / n bytes
  per parameter of the model on n ranks. No activations.
- Megatron-LM: ``report_theoretical_memory`` with the distributed optimizer, without tensor,
  pipeline or sequence parallelism (megatron/training/theoretical_memory_usage.py): 6 + 12 / n bytes
  per parameter on n ranks, and all activations, none recomputed (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterable

from tabulate import tabulate

from graphshard.forecast.forecast import Forecast

from .published import Published

GIB = 1 << 30


def deepspeed_bytes(num_params: int, largest_layer: int, num_gpus: int) -> float:
    """Return the bytes of a GPU's parameters, gradients and optimizer state under ZeRO-3.

    Args:
        largest_layer: number of parameters of the largest module.
    """
    return 4 * largest_layer + 18 * num_params / num_gpus


def megatron_bytes(num_params: int, num_gpus: int, published: Published) -> float:
    """Return the bytes that a GPU needs, activations included."""
    sizes, tokens = published.sizes, published.batch * published.length
    states = num_params * (6 + 12 / num_gpus)
    layers = tokens * sizes.dim * 34 * sizes.layers
    embedding = tokens * (8 + sizes.dim)
    head = 2 * tokens * (sizes.vocab + sizes.dim)
    return states + 1.05 * (layers + embedding + head)


def memory_table(found: Iterable[tuple[Published, Forecast]]) -> str:
    """Return a table in GiB with one row per setting.

    Of runs with equal settings, the last one is shown. Uncompiled runs with measured memory are
    left out.
    """
    lines = {}
    for published, forecast in found:
        num_params, num_gpus = forecast.num_params, published.gpus
        memory, held = forecast.memory, forecast.held
        states = held.parameters + held.trained + memory.optimizer
        largest = published.sizes.vocab * published.sizes.dim
        numbers = [
            deepspeed_bytes(num_params, largest, num_gpus),
            states,
            megatron_bytes(num_params, num_gpus, published),
            memory.allocated,
            memory.high,
        ]
        name = (
            f"{published.name}, {num_gpus} {published.device}, {published.batch} x "
            f"{published.length}, {published.dtype}, {published.recompute} recomputed"
        )
        if published.compiled is not False or published.memory_gib is None:
            lines[name] = [name, *(b / GIB for b in numbers), published.memory_gib]
    headers = ["GiB", "states: DeepSpeed", "forecast", "all: Megatron", "forecast", "at most"]
    return tabulate(list(lines.values()), [*headers, "reserved"], tablefmt="github", floatfmt=".1f")
