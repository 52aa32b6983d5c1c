"""Forecast a training step of a model: trace it, or shallow copies of it, and plan."""

from __future__ import annotations

import torch
from torch import nn

from .cluster import Cluster
from .forecast import Forecast, make_forecast
from .recipe import Recipe
from .shallow import Progress, Traced, traced_step
from .trace import Inputs
from .workload import Workload, module_workload, recomputed_layers


def plan(
    model: nn.Module,
    inputs: Inputs,
    cluster: Cluster,
    *,
    strategy: str = "zero3",
    dtype: str = "bf16",
    optimizer: str = "adamw",
    recompute: float = False,
    accumulate: int = 1,
    budget_gb: float | None = None,
    offload: bool = False,
) -> Forecast:
    """Forecast a training step of a model on a cluster, which need not exist.

    Nothing is computed, and the model is not modified: its graphs are traced with fake tensors and
    fake ranks, planned as ``graphshard.backend`` plans them, and simulated. Dynamo's caches are
    reset, so functions that this process compiled before are compiled again at their next call.

    Args:
        model: unsharded model on any device, including meta. The loss is the ``loss`` of its
            outputs, or their first tensor (summed, unless it is a scalar).
        inputs: inputs of one microbatch on one rank: a tuple of positional arguments, or a
            dictionary of keyword arguments. Values do not matter.
        cluster: cluster from :func:`graphshard.cluster`.
        strategy: "zero3", "zero2", "hsdp:N", "hpz:N" or "ddp", where N is a number of ranks.
        dtype: "float32"; "bf16": parameters gathered and used in bfloat16, gradients reduced in
            float32; "fp8": as "bf16", with inner linears in fp8.
        optimizer: "adamw", "adam", "momentum" or "sgd"; fused.
        recompute: fraction of the layers that backward recomputes, starting with the first: from 0
            to 1; True: all.
        accumulate: number of microbatches in a step; each reduces its gradients.
        budget_gb: memory that the schedule may use, in GB (1e9 bytes); None: no limit.
        offload: whether the host keeps shards, gradients and optimizer state, as with
            ``CPUOffloadPolicy()``.

    Raises:
        ValueError: an argument is invalid, the strategy's N does not divide the number of GPUs, or
            the model reads values of tensors.
        BackendError: no schedule stays within ``budget_gb``.
        RuntimeError: this process already has a process group.
    """
    recipe = Recipe(strategy, dtype, optimizer, recompute, accumulate, budget_gb, offload)
    return forecast(module_workload(model, inputs), recipe, cluster)


def forecast(
    workload: Workload,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
    traced: Traced | None = None,
) -> Forecast:
    """Forecast a step of a workload.

    Args:
        traced: traced step, if there is one already.

    Raises:
        ValueError: see ``plan``.
        BackendError: see ``plan``.
    """
    step, notes = traced or traced_step(workload, recipe, cluster, progress)
    progress("planning")
    return make_forecast(
        step,
        recipe,
        cluster,
        model=workload.name,
        tokens=workload.tokens,
        unit=workload.unit,
        notes=[*workload.notes, *notes, *_notes_of(recipe, cluster)],
        recomputed=_recomputed(workload, recipe),
    )


def _recomputed(workload: Workload, recipe: Recipe) -> tuple[str, ...]:
    if recipe.recompute in (0, 1):
        return ()
    with torch.device("meta"):
        model, _ = workload.make(None)
    return recomputed_layers(model, recipe.recompute)


def _notes_of(recipe: Recipe, cluster: Cluster) -> list[str]:
    notes = []
    if recipe.dtype == "float32" and cluster.hardware.device_type == "cuda":
        notes.append(
            "attention in float32, if there is any, is a flash kernel: CUDA's take more memory"
        )
    if recipe.offload:
        per_s = cluster.hardware.host_memory.largest / 1e9
        notes.append(
            f"the host reads and writes {per_s:.0f} GB/s for each GPU in its optimizer, for which "
            "each rank needs its share of the cores: torchrun gives it one, unless OMP_NUM_THREADS "
            "says more"
        )
    return notes
