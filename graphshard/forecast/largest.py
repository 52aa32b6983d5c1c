"""Find the largest model of a family, and the largest batch, that a cluster can train."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tabulate import tabulate

from .cluster import Cluster
from .deepen import NotPeriodicError
from .derive import (
    LEAST_PERIODS,
    Depth,
    Progress,
    ShallowCopies,
    for_strategy,
    trace_copies,
    trace_step,
)
from .forecast import GB
from .planned_step import PlannedStep, plan_step
from .recipe import Recipe
from .trace import TracedStep
from .workload import Workload

WIDTHS = 2**0.5  # ratio of successive widths to try
SMALLEST = 1 / 64  # smallest width to try if nothing fits, as a fraction of the model's width
MOST_LAYERS = 512  # a plan for the thousands of layers of a tiny model would take minutes
# Models whose layers repeat after more layers are refused: copies of three and four periods are
# traced for each width.
LONGEST_PERIOD = 16

HEADERS = ["grown", "strategy", "largest", "billion parameters", "step ms", "GB"]


@dataclass(frozen=True)
class LargestFit:
    """The largest model or batch that fits with a strategy."""

    strategy: str
    grown: str  # quantity that was increased: "layers", "layers and width" or "samples"
    what: str  # description of the size, as in "136 layers"
    num_params: int
    step_us: float
    memory_bytes: int  # peak of a rank, including the margin

    def row(self) -> list[str | float]:
        # The columns of ``HEADERS``.
        sizes = (self.num_params / 1e9, self.step_us / 1e3, self.memory_bytes / GB)
        return [self.grown, self.strategy, self.what, *sizes]


@dataclass(frozen=True)
class LargestResult:
    """The largest models and batches that fit with each strategy; ``print`` shows a table."""

    fits: tuple[LargestFit, ...]

    def __str__(self) -> str:
        if not self.fits:
            return "nothing fits: use more GPUs, or GPUs with more memory"
        return tabulate([fit.row() for fit in self.fits], HEADERS, floatfmt=",.1f")


_Key = tuple[str, int | None, int, str]


def _key(workload: Workload, strategy: str) -> _Key:
    return workload.name, workload.num_layers, workload.tokens, strategy


def _layers(depth: Depth, period: int) -> str:
    return f"{sum(depth)} layers" + (" or more" if sum(depth) + period > MOST_LAYERS else "")


def shard_groups(cluster: Cluster, tp: int = 1) -> list[int]:
    """Return the HSDP shard counts to try: the numbers of ``tp``-rank groups in 1, 2 and 4 nodes.

    A count is left out if it is below 2 or does not divide the cluster into several replicas.
    """
    node, num_groups = cluster.hardware.ranks_per_node // tp, cluster.num_gpus // tp
    sizes = (node, 2 * node, 4 * node)
    return [size for size in sizes if 1 < size < num_groups and num_groups % size == 0]


def largest_that_fits(
    memory_at: Callable[[int], int], limit: int, least: int, most: float = float("inf")
) -> int | None:
    """Return the largest number in ``[least, most]`` whose memory is at most ``limit``, or None.

    The result of ``memory_at`` must not decrease as the number grows.
    """
    # Memory grows almost linearly with the number: extrapolate from the last two numbers that fit,
    # and bisect after a number that does not fit.
    fits, memory = least, memory_at(least)
    if memory > limit:
        return None
    fails, tried = None, 2 * least
    while (fails is None or fails - fits > 1) and fits < most:
        tried = int(min(tried, most))
        needed = memory_at(tried)
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
    """Find, for each strategy, the largest models and the largest batch that fit the cluster.

    Models are scaled in depth alone, and in width and depth together.

    Args:
        make_workload: function that takes a scale factor for width and depth and a microbatch size,
            and returns a workload whose name states its width.
        recipe: settings of the training run, except for the strategy.
        size: number of samples in a microbatch while the model is scaled.

    Raises:
        NotPeriodicError: the model's layers do not repeat.
        ValueError: ``recipe.recompute`` is neither 0 nor 1.
    """
    if recipe.recompute not in (0, 1):
        raise ValueError(
            f"--largest with recompute={recipe.recompute:g}: recompute all layers (1) or none (0)"
        )
    recipe = dataclasses.replace(recipe, strategy="zero3")
    grower = _Grower(make_workload, recipe, cluster, size, progress)
    return LargestResult((*grower.by_depth(), *grower.by_width(), *grower.by_batch()))


@dataclass
class _Grower:
    make_workload: Callable[[float, int], Workload]
    recipe: Recipe
    cluster: Cluster
    size: int
    progress: Progress
    _traced: dict[_Key, ShallowCopies] = field(default_factory=dict)
    _shallow: dict[_Key, TracedStep] = field(default_factory=dict)

    @property
    def strategies(self) -> list[str]:
        """ZeRO-3, ZeRO-2, and HSDP over the smallest of ``shard_groups``, if any."""
        groups = shard_groups(self.cluster, self.recipe.tp)
        return ["zero3", "zero2", *(f"hsdp:{size}" for size in groups[:1])]

    def by_depth(self) -> Iterator[LargestFit]:
        # Shallow copies determine any number of layers, so deeper models need no trace.
        workload = self.make_workload(1.0, self.size)
        for strategy in self.strategies:
            copies = self._copies(workload, strategy)
            if (deepest := self._deepest(copies, strategy, sum(copies.shallow))) is not None:
                what = _layers(deepest, copies.layers.period)
                yield self._fit(strategy, "layers", what, copies.at_depth(deepest))

    def by_width(self) -> Iterator[LargestFit]:
        """Yield, for each strategy, the deepest model of the largest width that fits.

        The width is found by scaling width and depth together; then only the depth grows.
        """
        for strategy, factor in self._widest().items():
            workload = self.make_workload(factor, self.size)
            copies = self._copies(workload, strategy)
            if (deepest := self._deepest(copies, strategy, workload.num_layers or 0)) is not None:
                what = f"{workload.name}, {_layers(deepest, copies.layers.period)}"
                yield self._fit(strategy, "layers and width", what, copies.at_depth(deepest))

    def by_batch(self) -> Iterator[LargestFit]:
        def step_at(strategy: str, size: int) -> TracedStep:
            return self._own_step(self.make_workload(1.0, size), strategy)

        for strategy in self.strategies:
            size = self._most(functools.partial(step_at, strategy), strategy, 1)
            if size is not None:
                yield self._fit(strategy, "samples", f"{size} samples", step_at(strategy, size))

    def _widest(self) -> dict[str, float]:
        """Return each strategy's largest scale factor that fits; below 1 only if none fits at 1."""
        best: dict[str, float] = {}
        factor = 1.0
        while fitting := self._fitting(factor):
            best.update(dict.fromkeys(fitting, factor))
            factor *= WIDTHS
        while not best and factor > SMALLEST:
            factor /= WIDTHS
            best = dict.fromkeys(self._fitting(factor), factor)
        return best

    def _fitting(self, factor: float) -> list[str]:
        workload, limit = self.make_workload(factor, self.size), self.cluster.memory_bytes
        return [s for s in self.strategies if self._memory(self._own_step(workload, s), s) <= limit]

    def _deepest(self, copies: ShallowCopies, strategy: str, least: int) -> Depth | None:
        layers = self._most(lambda n: self._step(copies, n), strategy, least, MOST_LAYERS)
        return None if layers is None else copies.nearest(Depth.at(layers, self.recipe))

    def _most(
        self,
        step_at: Callable[[int], TracedStep],
        strategy: str,
        least: int,
        most: float = float("inf"),
    ) -> int | None:
        return largest_that_fits(
            lambda number: self._memory(step_at(number), strategy),
            self.cluster.memory_bytes,
            least,
            most,
        )

    def _memory(self, step: TracedStep, strategy: str) -> int:
        planned = self._plan(step, strategy)
        return self.cluster.memory_bytes + 1 if planned is None else planned.memory.total

    def _fit(self, strategy: str, grown: str, what: str, step: TracedStep) -> LargestFit:
        planned = self._plan(step, strategy)
        assert planned is not None
        num_params, memory = int(step.held.num_params), planned.memory.total
        return LargestFit(strategy, grown, what, num_params, planned.time.step_us, memory)

    def _step(self, copies: ShallowCopies, num_layers: int) -> TracedStep:
        return copies.at_depth(Depth.at(num_layers, self.recipe))

    def _own_step(self, workload: Workload, strategy: str) -> TracedStep:
        """Return the step of ``workload`` with all its layers."""
        num_layers = workload.num_layers or 0
        if num_layers >= LEAST_PERIODS * workload.period:
            return self._step(self._copies(workload, strategy), num_layers)
        key = _key(workload, strategy)
        if key not in self._shallow:
            step = None
            if strategy != "zero3":
                step = self._adapted(self._own_step(workload, "zero3"), strategy)
            self._shallow[key] = step or trace_step(
                workload, self._recipe(strategy), self.cluster, self.progress
            )
        return self._shallow[key]

    def _copies(self, workload: Workload, strategy: str) -> ShallowCopies:
        """Return the traced shallow copies of a model; trace each model once if possible."""
        # Depth, width and batch grow from one model, and several factors may round to one model.
        key = _key(workload, strategy)
        if key not in self._traced:
            copies = None if strategy == "zero3" else self._adapted_copies(workload, strategy)
            self._traced[key] = copies or self._trace_copies(workload, strategy)
        return self._traced[key]

    def _trace_copies(self, workload: Workload, strategy: str) -> ShallowCopies:
        if workload.period > LONGEST_PERIOD:
            raise NotPeriodicError(
                f"--largest: of the {workload.num_layers} layers of the model that is "
                f"{workload.name}, {workload.period} differ before they repeat: at most "
                f"{LONGEST_PERIOD} may, because several repetitions are traced"
            )
        self.progress(f"{workload.name}, {workload.tokens} {workload.unit}")
        deep = (LEAST_PERIODS + 2) * workload.period
        deep += (workload.num_layers or 0) % workload.period
        depth = Depth.at(deep, self.recipe)
        return trace_copies(workload, depth, self._recipe(strategy), self.cluster)

    def _adapted_copies(self, workload: Workload, strategy: str) -> ShallowCopies | None:
        copies = self._copies(workload, "zero3")
        steps = [[self._adapted(step, strategy) for step in row] for row in copies.steps]
        adapted = [[step for step in row if step is not None] for row in steps]
        return copies._replace(steps=adapted) if adapted == steps else None

    def _adapted(self, step: TracedStep, strategy: str) -> TracedStep | None:
        return for_strategy(step, self._recipe(strategy), self.cluster.num_gpus)

    def _recipe(self, strategy: str) -> Recipe:
        return dataclasses.replace(self.recipe, strategy=strategy)

    def _plan(self, step: TracedStep, strategy: str) -> PlannedStep | None:
        with contextlib.suppress(ValueError):  # exceeds the budget
            return plan_step(step, self._recipe(strategy), self.cluster, refine=False)
        return None
