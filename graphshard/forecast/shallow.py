"""The step of a deep model, from copies of it with few layers: `traced_step`.

Layers repeat: two copies tell of all numbers of layers (``deepen``). Where backward recomputes the
first layers of a model and not the rest, there are two kinds of layers, and four copies tell of all
numbers of each: with few layers, with a period more of one kind, of the other, and of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .cluster import Cluster
from .deepen import Layers, NotPeriodicError, deepen
from .recipe import Recipe
from .trace import TracedStep, trace
from .workload import Workload, num_recomputed, recompute_layers

Progress = Callable[[str], None]
"""Told what is done next."""

LEAST_PERIODS = 3
"""Of layers of a kind in a shallow copy: the first and the last may differ from those between."""


class Traced(NamedTuple):
    """A traced step, and how it was traced."""

    step: TracedStep
    notes: list[str]


class Depth(NamedTuple):
    """Numbers of layers: of the first ones, which backward recomputes, and of those behind."""

    recomputed: int
    saved: int

    @classmethod
    def of(cls, num_layers: int, recipe: Recipe) -> Depth:
        first = num_recomputed(num_layers, recipe.recompute)
        return cls(first, num_layers - first)

    def shallow(self, period: int) -> Depth:
        """Return the depth of the shallowest copy that tells of this one."""
        return Depth(*(_few(number, period) for number in self))


def _few(num_layers: int, period: int) -> int:
    least = LEAST_PERIODS * period
    few = least + (num_layers - least) % period
    return few if num_layers > few + period else num_layers


class Repeating(NamedTuple):
    """Steps of shallow copies of a model whose layers repeat.

    Attributes:
        steps: in each row with a period more of the first layers, from row to row with a period
            more of the others; what does not grow has one.
        shallow: depth of the first.
    """

    steps: Sequence[Sequence[TracedStep]]
    layers: Layers
    shallow: Depth

    @property
    def note(self) -> str:
        """Says which depths were traced."""
        few, num_numbers = sum(self.shallow), len(self.steps) + len(self.steps[0]) - 1
        *most, last = (str(few + i * self.layers.period) for i in range(num_numbers))
        return f"{', '.join(most)} and {last} layers were traced, and repeat: the rest is like them"

    def of_depth(self, depth: Depth) -> TracedStep:
        """Return the step of the model of a depth, or of one a little less: whole periods.

        Raises:
            NotPeriodicError: the copies do not show that layers repeat.
        """
        first, rest = (
            max(0, deep - few) // self.layers.period for deep, few in zip(depth, self.shallow)
        )
        rows = [self._prolonged(row, first) for row in self.steps]
        return self._prolonged(rows, rest)

    def _prolonged(self, steps: Sequence[TracedStep], periods: int) -> TracedStep:
        return steps[0] if len(steps) == 1 else deepen(steps[0], steps[1], periods, self.layers)


def traced_step(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> Traced:
    """Trace a step: of the whole model, or of shallow copies where layers repeat."""
    if workload.num_layers is None:
        return Traced(_traced(workload, None, recipe, cluster, progress), [])
    depth = Depth.of(workload.num_layers, recipe)
    if depth.shallow(workload.period) == depth:
        return Traced(_traced(workload, depth, recipe, cluster, progress), [])
    try:
        found = repeating(workload, depth, recipe, cluster, progress)
        return Traced(found.of_depth(depth), [found.note])
    except NotPeriodicError as error:
        note = f"all layers were traced, since {error}"
        return Traced(_traced(workload, depth, recipe, cluster, progress), [note])


def repeating(
    workload: Workload,
    depth: Depth,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
) -> Repeating:
    """Trace the shallow copies that tell of models as deep as ``depth``.

    Args:
        recipe: its ``recompute`` does not count: ``depth`` says which layers are recomputed.
    """
    period = workload.period
    few = depth.shallow(period)
    first, rest = (
        (number, number + period) if deep > number else (number,)
        for deep, number in zip(depth, few)
    )
    layers = Layers(_path_of_layers(workload, sum(few)), period)
    steps = [
        [_traced(workload, Depth(a, b), recipe, cluster, progress) for a in first] for b in rest
    ]
    return Repeating(steps, layers, few)


def depths(num_layers: int, period: int) -> list[Depth]:
    """Return the depths of a model that four copies tell of, the fewest saved layers first."""
    least, more = LEAST_PERIODS * period, num_layers % period
    saved = range(least + more, num_layers - least + 1, period)
    return [Depth(num_layers - number, number) for number in saved]


def of_all_depths(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> Repeating:
    """Trace the four copies that tell of all ``depths`` of a model."""
    assert workload.num_layers is not None
    deep = (LEAST_PERIODS + 2) * workload.period
    depth = Depth(deep, deep + workload.num_layers % workload.period)
    return repeating(workload, depth, recipe, cluster, progress)


def _traced(
    workload: Workload,
    depth: Depth | None,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress,
) -> TracedStep:
    """Trace a copy of a depth; None: the model as it is, which cannot be made with other layers.

    Raises:
        ValueError: there is no host beside the device.
    """
    if recipe.offload and cluster.hardware.device_type == "cpu":
        raise ValueError("offload: a CPU is the host itself; leave offload out, or plan for a GPU")
    num_layers: int | None = None
    part = recipe.recompute
    if depth is not None:
        num_layers, part = sum(depth), depth.recomputed / sum(depth)
    progress(f"tracing {num_layers or 'all'} layers")
    return trace(
        lambda: workload.make(num_layers),
        recipe.ranks(cluster.num_gpus),
        cluster.hardware,
        recipe.traced_options(),
        functools.partial(recompute_layers, part=part),
    )


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
