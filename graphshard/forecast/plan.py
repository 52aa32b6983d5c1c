"""A forecast from a model: trace it, or shallow copies of it that are deepened, and plan."""

from __future__ import annotations

import torch
from torch import nn

from .cluster import Cluster
from .forecast import Forecast, forecast_of
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
    """Forecast a training step of a model on a cluster that need not be there.

    Nothing is computed, and the model stays as it is: its graphs are traced with tensors and ranks
    that do not exist, planned as ``graphshard.backend`` plans them, and simulated. What Dynamo has
    compiled in this process before is compiled again at its next call.

    Args:
        model: plain, on any device, meta among them. Its outputs have a ``loss``, or their first
            tensor is one.
        inputs: of one microbatch on one rank: a tuple, or a dictionary of keywords. Values do not
            matter.
        cluster: see :func:`graphshard.cluster`.
        strategy: zero3, zero2, hsdp:N, hpz:N or ddp, N being a number of ranks.
        dtype: float32; bf16: parameters are gathered and used in bfloat16, gradients reduced in
            float32; fp8: as bf16, with inner linears in fp8.
        optimizer: adamw, adam, momentum or sgd, fused.
        recompute: the part of the layers, the first ones, that backward recomputes: from 0 to 1;
            True: all.
        accumulate: microbatches in a step; each reduces its gradients.
        budget_gb: memory in GB of a billion bytes that the schedule may use; None: any.
        offload: have the host keep shards, gradients and optimizer, as ``CPUOffloadPolicy()`` does.

    Raises:
        ValueError: an argument is wrong, the mesh cannot have the strategy, or the model reads
            values of tensors.
        RuntimeError: this process has a process group.
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
        traced: the step, if it is traced already.

    Raises:
        ValueError: as ``plan``.
    """
    step, notes = traced or traced_step(workload, recipe, cluster, progress)
    progress("planning")
    return forecast_of(
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
