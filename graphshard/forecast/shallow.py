"""Trace a step of a deep model by tracing copies of it with few layers.

If layers repeat, two copies determine any number of layers (``deepen``). If backward recomputes
only the first layers of a model, there are two kinds of layers, and four copies determine any
number of each: one with few layers, and three with one more period of one kind, of the other, and
of both.
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
"""Callback that is told what happens next."""

LEAST_PERIODS = 3
"""Fewest periods of each kind of layers in a shallow copy, since the first and last may differ."""


class Traced(NamedTuple):
    """A traced step, and notes on how it was traced."""

    step: TracedStep
    notes: list[str]


class Depth(NamedTuple):
    """Numbers of layers: the first ones, which backward recomputes, and the ones after them."""

    recomputed: int
    saved: int

    @classmethod
    def of(cls, num_layers: int, recipe: Recipe) -> Depth:
        first = num_recomputed(num_layers, recipe.recompute)
        return cls(first, num_layers - first)

    def shallow(self, period: int) -> Depth:
        """Return the depth of the shallowest copy from which this depth can be derived."""
        return Depth(*(_few(number, period) for number in self))


def _few(num_layers: int, period: int) -> int:
    least = LEAST_PERIODS * period
    few = least + (num_layers - least) % period
    return few if num_layers > few + period else num_layers


class Repeating(NamedTuple):
    """The steps of shallow copies of a model whose layers repeat.

    Attributes:
        steps: steps in rows. Within a row, the second step has one more period of recomputed
            layers; the second row has one more period of saved layers. A kind of layers that does
            not grow has a single entry.
        layers: naming and period of the layers.
        shallow: depth of the first step.
    """

    steps: Sequence[Sequence[TracedStep]]
    layers: Layers
    shallow: Depth

    @property
    def note(self) -> str:
        """Sentence that says which depths were traced."""
        few, num_numbers = sum(self.shallow), len(self.steps) + len(self.steps[0]) - 1
        *most, last = (str(few + i * self.layers.period) for i in range(num_numbers))
        return f"{', '.join(most)} and {last} layers were traced, and repeat: the rest is like them"

    def of_depth(self, depth: Depth) -> TracedStep:
        """Return the step at ``depth``, rounded down to whole periods.

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
    """Trace a step of the whole model, or of shallow copies if layers repeat."""
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
    """Trace the shallow copies from which a model as deep as ``depth`` can be derived.

    Args:
        recipe: settings of the training run; ``depth`` overrides its ``recompute``.
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
    """Return the depths of a model that four copies determine, fewest saved layers first."""
    least, more = LEAST_PERIODS * period, num_layers % period
    saved = range(least + more, num_layers - least + 1, period)
    return [Depth(num_layers - number, number) for number in saved]


def of_all_depths(
    workload: Workload, recipe: Recipe, cluster: Cluster, progress: Progress = lambda text: None
) -> Repeating:
    """Trace the four copies that determine all ``depths`` of a model."""
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
    """Trace a copy of the given depth; None: the model as it is, whose depth cannot change.

    Raises:
        ValueError: offload from a CPU, which is the host itself.
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
    """Return the name of the list with ``num_layers`` layers in a shallow copy, or ""."""
    with torch.device("meta"):
        model, _ = workload.make(num_layers)
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    return lists[0] if lists else ""
