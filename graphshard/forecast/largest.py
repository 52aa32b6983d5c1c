"""Find the largest model of a family, and the largest batch, that a cluster can train.

Deeper models need no further traces: two shallow copies determine any number of layers. Each wider
model is traced, at the ratio of layers to width of the original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .cluster import Cluster
from .planned_step import PlannedStep, plan_step
from .recipe import Recipe
from .retarget import on_mesh
from .shallow import LEAST_PERIODS, Depth, Progress, repeating
from .trace import TracedStep
from .workload import Workload

GB = 1e9
WIDTHS = 2**0.5
"""Ratio of each width tried to the one before."""
SMALLEST = 1 / 64
"""Smallest width to try if nothing fits, as a fraction of the model's width."""


@dataclass(frozen=True)
class LargestFit:
    """The largest size that a strategy can train if one thing grows.

    Attributes:
        grown: what grows: "layers", "layers and width" or "samples".
        what: description of the size, as in "136 layers".
        memory_bytes: peak memory of a rank, margin included.
    """

    strategy: str
    grown: str
    what: str
    num_params: int
    step_us: float
    memory_bytes: int


@dataclass(frozen=True)
class LargestResult:
    """The largest sizes, by what grows and by strategy; ``print`` shows a table."""

    found: tuple[LargestFit, ...]

    def __str__(self) -> str:
        return tabulate(list(map(largest_row, self.found)), HEADERS, floatfmt=",.1f")


HEADERS = ["grown", "strategy", "largest", "billion parameters", "step ms", "GB"]


def largest_row(one: LargestFit) -> list[Any]:
    """Return a table row, with the columns of ``HEADERS``."""
    return [
        one.grown,
        one.strategy,
        one.what,
        one.num_params / 1e9,
        one.step_us / 1e3,
        one.memory_bytes / GB,
    ]


def strategies(cluster: Cluster) -> list[str]:
    """Return the strategies that one trace serves; on several nodes also HSDP within each node."""
    node = cluster.hardware.ranks_per_node
    hybrid = [f"hsdp:{node}"] if node < cluster.num_gpus and cluster.num_gpus % node == 0 else []
    return ["zero3", "zero2", *hybrid]


def plan_by(
    step: TracedStep, strategy: str, recipe: Recipe, cluster: Cluster
) -> PlannedStep | None:
    """Plan a ZeRO-3 step with another strategy; None if that needs its own trace."""
    recipe = dataclasses.replace(recipe, strategy=strategy)
    moved: TracedStep | None = step
    if recipe.kind == "hsdp":
        moved = on_mesh(step, cluster.num_gpus, recipe.ranks(cluster.num_gpus))
    if moved is None:
        return None
    return plan_step(moved, recipe, cluster, keep_all=recipe.kind == "zero2", refine=False)


def largest_that_fits(memory_of: Callable[[int], int], limit: int, least: int) -> int | None:
    """Return the largest number whose memory is within ``limit``; None if ``least`` is not.

    Memory grows almost linearly with the number. So the next number is extrapolated from the last
    two that fit or, after one that does not fit, taken halfway.

    Args:
        memory_of: function from a number to its memory in bytes.
        least: smallest number to try.
    """
    fits, memory = least, memory_of(least)
    if memory > limit:
        return None
    fails, tried = None, 2 * least
    while fails is None or fails - fits > 1:
        needed = memory_of(tried)
        slope = max(1, (needed - memory) // (tried - fits))
        if needed > limit:
            fails = tried
            tried = (fits + fails) // 2
        else:
            fits, memory = tried, needed
            tried = fits + max(1, (limit - memory) // slope)
        if fails is not None:
            tried = min(max(tried, fits + 1), fails - 1)
    return fits


def largest(
    make_workload: Callable[[float, int], Workload],
    recipe: Recipe,
    cluster: Cluster,
    size: int,
    progress: Progress = lambda text: None,
) -> LargestResult:
    """Return the largest model, by depth alone and by depth and width, and the largest batch.

    Args:
        make_workload: function from a factor on width and depth, and a number of samples in a
            microbatch, to a workload.
        recipe: settings of the training run; its strategy is ignored.
        size: number of samples in a microbatch while the model grows.

    Raises:
        NotPeriodicError: layers do not repeat.
        ValueError: ``recipe.recompute`` is neither 0 nor 1.
    """
    if recipe.recompute not in (0, 1):
        raise ValueError(
            f"--largest with recompute={recipe.recompute:g}: have all layers recomputed or none"
        )
    recipe = dataclasses.replace(recipe, strategy="zero3")
    grower = _Grower(make_workload, recipe, cluster, size, progress)
    return LargestResult((*grower.by_depth(), *grower.by_width(), *grower.by_batch()))


class _Grower:
    def __init__(
        self,
        make_workload: Callable[[float, int], Workload],
        recipe: Recipe,
        cluster: Cluster,
        size: int,
        progress: Progress,
    ) -> None:
        self._workload_of, self._recipe, self._cluster = make_workload, recipe, cluster
        self._size, self._progress = size, progress

    def by_depth(self) -> Iterator[LargestFit]:
        """Yield, for each strategy, the deepest model of the same width."""
        step_of = self._steps(self._workload_of(1.0, self._size))
        for strategy in strategies(self._cluster):

            def memory_of(num_layers: int, strategy: str = strategy) -> int:
                planned = self._plan(step_of(num_layers), strategy)
                return self._cluster.memory_bytes + 1 if planned is None else planned.memory.total

            least = LEAST_PERIODS + 1
            layers = largest_that_fits(memory_of, self._cluster.memory_bytes, least)
            if layers is not None:
                yield from self._at("layers", f"{layers} layers", step_of(layers), [strategy])

    def by_width(self) -> Iterator[LargestFit]:
        """Yield, for each strategy, the largest model with the same ratio of layers to width."""
        grown = list(self._growing("layers and width", self._of_factor, 1.0, WIDTHS))
        factor = 1.0
        while not grown and factor > SMALLEST:
            factor /= WIDTHS
            grown = list(self._at("layers and width", *self._of_factor(factor)))
        yield from grown

    def by_batch(self) -> Iterator[LargestFit]:
        """Yield, for each strategy, the largest microbatch of the model itself."""
        yield from self._growing("samples", self._of_size, 1, 2)

    def _growing(
        self, grown: str, make: Callable[[Any], tuple[str, TracedStep]], start: Any, ratio: Any
    ) -> Iterator[LargestFit]:
        """Multiply a number by ``ratio`` until no strategy fits; yield the last fit of each."""
        best: dict[str, LargestFit] = {}
        number = start
        while found := list(self._at(grown, *make(number))):
            best.update({one.strategy: one for one in found})
            number *= ratio
        yield from best.values()

    def _at(
        self, grown: str, what: str, step: TracedStep, tried: Sequence[str] = ()
    ) -> Iterator[LargestFit]:
        """Yield the results of the strategies that fit, among ``tried`` or, by default, all."""
        for strategy in tried or strategies(self._cluster):
            planned = self._plan(step, strategy)
            if planned is not None and planned.memory.fits:
                yield _largest(grown, strategy, what, step, planned)

    def _of_factor(self, factor: float) -> tuple[str, TracedStep]:
        workload = self._workload_of(factor, self._size)
        layers = workload.num_layers or 0
        return f"{workload.name}, {layers} layers", self._steps(workload)(layers)

    def _of_size(self, size: int) -> tuple[str, TracedStep]:
        workload = self._workload_of(1.0, size)
        return f"{size} samples", self._steps(workload)(workload.num_layers or 0)

    def _steps(self, workload: Workload) -> Callable[[int], TracedStep]:
        self._progress(f"{workload.name}, {workload.tokens} {workload.unit}")
        deep = Depth.of((LEAST_PERIODS + 2) * workload.period, self._recipe)
        found = repeating(workload, deep, self._recipe, self._cluster)
        return lambda num_layers: found.of_depth(Depth.of(num_layers, self._recipe))

    def _plan(self, step: TracedStep, strategy: str) -> PlannedStep | None:
        return plan_by(step, strategy, self._recipe, self._cluster)


def _largest(
    grown: str, strategy: str, what: str, step: TracedStep, planned: PlannedStep
) -> LargestFit:
    params = int(step.held.num_params)
    return LargestFit(strategy, grown, what, params, planned.time.step_us, planned.memory.total)
