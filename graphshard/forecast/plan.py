"""A forecast from a model: trace it, or a shallow copy of it that is deepened, and plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .cluster import Cluster
from .deepen import Layers, NotPeriodicError, deepen
from .forecast import Forecast, forecast_of
from .recipe import Recipe
from .trace import Inputs, TracedStep, trace
from .workload import Workload, module_workload, recompute_layers

Progress = Callable[[str], None]
"""Told what is done next."""

LEAST_PERIODS = 3
"""Of layers in a shallow copy: the first and the last may differ from those in between."""


def plan(
    model: nn.Module,
    inputs: Inputs,
    cluster: Cluster,
    *,
    strategy: str = "zero3",
    dtype: str = "bf16",
    optimizer: str = "adamw",
    recompute: bool = False,
    accumulate: int = 1,
    budget_gb: float | None = None,
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
        recompute: have backward recompute each layer.
        accumulate: microbatches in a step; each reduces its gradients.
        budget_gb: memory in GB of a billion bytes that the schedule may use; None: any.

    Raises:
        ValueError: an argument is wrong, the mesh cannot have the strategy, or the model reads
            values of tensors.
        RuntimeError: this process has a process group.
    """
    recipe = Recipe(strategy, dtype, optimizer, recompute, accumulate, budget_gb)
    return forecast(module_workload(model, inputs), recipe, cluster)


def forecast(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> Forecast:
    """Forecast a step of a workload.

    Raises:
        ValueError: as ``plan``.
    """
    traced, notes = traced_step(workload, recipe, cluster, progress)
    progress("planning")
    return forecast_of(
        traced,
        recipe,
        cluster,
        model=workload.name,
        tokens=workload.tokens,
        unit=workload.unit,
        notes=[*workload.notes, *notes, *_notes_of(recipe, cluster)],
    )


def _notes_of(recipe: Recipe, cluster: Cluster) -> list[str]:
    if recipe.dtype != "float32" or cluster.hardware.device_type != "cuda":
        return []
    return ["attention in float32, if there is any, is a flash kernel: CUDA's take more memory"]


def _leave(model: nn.Module) -> None:
    """Leave a model as it is."""


class Traced(NamedTuple):
    """A traced step, and how it was traced."""

    step: TracedStep
    notes: list[str]


class Repeating(NamedTuple):
    """Steps of two shallow copies of a model whose layers repeat.

    Attributes:
        num_layers: of the shorter one.
    """

    short: TracedStep
    longer: TracedStep
    layers: Layers
    num_layers: int

    def with_layers(self, num_layers: int) -> TracedStep:
        """Return the step of the model with so many layers, or with a few less: whole periods.

        Raises:
            NotPeriodicError: the copies do not show that layers repeat.
        """
        periods = (num_layers - self.num_layers) // self.layers.period
        return deepen(self.short, self.longer, max(1, periods), self.layers)


def traced_step(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> Traced:
    """Trace a step: of the whole model, or of two shallow copies where layers repeat."""
    shallow = shallow_layers(workload)
    if shallow is None:
        return Traced(_traced(workload, None, recipe, cluster, progress), [])
    assert workload.num_layers is not None
    try:
        step = repeating(workload, shallow, recipe, cluster, progress).with_layers(
            workload.num_layers
        )
    except NotPeriodicError as error:
        note = f"all layers were traced, since {error}"
        return Traced(_traced(workload, None, recipe, cluster, progress), [note])
    longer = shallow + workload.period
    note = f"{shallow} and {longer} layers were traced, and repeat: the rest is like them"
    return Traced(step, [note])


def repeating(
    workload: Workload,
    num_layers: int,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
) -> Repeating:
    """Trace copies with ``num_layers`` layers, and with a period more."""
    layers = Layers(_path_of_layers(workload, num_layers), workload.period)
    short, longer = (
        _traced(workload, number, recipe, cluster, progress)
        for number in (num_layers, num_layers + workload.period)
    )
    return Repeating(short, longer, layers, num_layers)


def _traced(
    workload: Workload,
    num_layers: int | None,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress,
) -> TracedStep:
    progress(f"tracing {num_layers or workload.num_layers or 'all'} layers")
    return trace(
        lambda: workload.make(num_layers),
        recipe.ranks(cluster.num_gpus),
        cluster.hardware,
        recipe.traced_options(),
        recompute_layers if recipe.recompute else _leave,
    )


def shallow_layers(workload: Workload) -> int | None:
    """Return how many layers a shallow copy has; None: the model itself is as shallow."""
    if workload.num_layers is None:
        return None
    period = workload.period
    least = LEAST_PERIODS * period
    shallow = least + (workload.num_layers - least) % period
    return shallow if workload.num_layers > shallow + period else None


def _path_of_layers(workload: Workload, num_layers: int) -> str:
    """Return the name of the list of so many layers in a shallow copy; "" if there is none."""
    with torch.device("meta"):
        model, _ = workload.make(num_layers)
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    return lists[0] if lists else ""
