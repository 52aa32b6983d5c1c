"""Plan and compare all recipes for training a model on a cluster.

One trace serves all strategies that differ only in who holds what: ZeRO-2 keeps what ZeRO-3 gathers
again, HSDP uses another mesh, and offload puts shards on the host. So each combination of
precision, microbatch size and recomputation (of no layer or of all) takes one trace for these
strategies, one for hpZ on several nodes, and one for DDP where replicas could fit.

Other recipes need further traces, or are slower wherever they are not needed. They are planned by
rule:

- offload, where ZeRO-3 does not fit without it;
- partial recomputation, for the smallest microbatch at which ZeRO-3 does not fit without
  recomputation, and for strategies that fit if all layers are recomputed: as few layers as needed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from .cluster import Cluster
from .deepen import NotPeriodicError
from .largest import largest_that_fits
from .planned_step import plan_step
from .recipe import OPTIMIZERS, Recipe
from .retarget import on_host, on_mesh
from .shallow import Depth, Progress, Repeating, Traced, depths, of_all_depths, traced_step
from .trace import TracedStep
from .workload import MakeWorkload, Workload

GB = 1e9
RESERVED = 0.03
"""Fraction of a device's memory left free when choosing how many layers to recompute.

That choice plans by the quick search. The final forecast is refined, without a memory limit, and
may need more. Measured: 1.5 % more for Llama 3 70B on 8 GPUs. If this is too small, the fastest
candidate may not fit in the final forecast; if too large, more is recomputed than necessary.
"""


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe, planned with one microbatch size.

    Attributes:
        microbatch: number of samples in a microbatch of a rank.
        step_us: time of a whole step.
        memory_bytes: peak memory of a rank, margin included.
        fits: whether that fits on a device.
        traced: traced step that a forecast of this candidate may reuse; None if it may not.
    """

    recipe: Recipe
    microbatch: int
    step_us: float
    memory_bytes: int
    fits: bool
    traced: Traced | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search; ``print`` shows the Pareto front of time and memory.

    Attributes:
        candidates: candidates that fit, fastest first, then the others.
        refused: what was not planned, and why.
        num_traces: number of traces that the search took.
    """

    candidates: tuple[PlannedRecipe, ...]
    refused: tuple[str, ...]
    num_traces: int

    @property
    def best(self) -> PlannedRecipe:
        """Fastest candidate that fits.

        Raises:
            ValueError: nothing fits.
        """
        if not self.candidates or not self.candidates[0].fits:
            raise ValueError("nothing fits: take more or larger GPUs, or fewer tokens")
        return self.candidates[0]

    def front(self) -> list[PlannedRecipe]:
        """Return the candidates that fit and that no other beats in both time and memory."""
        return pareto_front([c for c in self.candidates if c.fits])

    def __str__(self) -> str:
        front = self.front()
        rows = [candidate_row(candidate) for candidate in front]
        counted = f"{len(self.candidates)} recipes, {self.num_traces} traces"
        parts = [f"{counted}; these fit, and none is better in both time and memory:"]
        if not front:
            least = min(self.candidates, key=lambda c: c.memory_bytes, default=None)
            needed = "" if least is None else f"; the least needs {least.memory_bytes / GB:.1f} GB"
            parts = [f"{counted}; none fits{needed}"]
        elif rows:
            parts.append(tabulate(rows, HEADERS, floatfmt=",.1f"))
        return "\n\n".join([*parts, *(f"Not planned: {text}." for text in self.refused)])


HEADERS = ["strategy", "dtype", "recompute", "offload", "microbatches", "step ms", "GB"]


def candidate_row(candidate: PlannedRecipe) -> list[Any]:
    """Return the table row of a candidate, with the columns of ``HEADERS``."""
    recipe = candidate.recipe
    return [
        recipe.strategy,
        recipe.dtype,
        {0.0: "none", 1.0: "all"}.get(recipe.recompute, f"{recipe.recompute:.0%}"),
        "yes" if recipe.offload else "no",
        f"{recipe.accumulate} of {candidate.microbatch}",
        candidate.step_us / 1e3,
        candidate.memory_bytes / GB,
    ]


def pareto_front(candidates: Sequence[PlannedRecipe]) -> list[PlannedRecipe]:
    """Return the candidates that no other beats in both time and memory, fastest first."""
    front: list[PlannedRecipe] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_us, c.memory_bytes)):
        if not front or candidate.memory_bytes < front[-1].memory_bytes:
            front.append(candidate)
    return front


def microbatches(size: int) -> list[int]:
    """Return the microbatch sizes for a batch: the powers of two that divide it, and itself."""
    powers = [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return sorted({*powers, size})


def search(
    make_workload: MakeWorkload,
    size: int,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
) -> SearchResult:
    """Plan all recipes for a step with ``size`` samples on each rank.

    Args:
        make_workload: function from the number of samples in a microbatch to its workload.
        size: number of samples of a rank in a step, over all microbatches.
        recipe: recipe with the optimizer and the memory budget; its other fields are ignored.
    """
    searching = _Search(make_workload, size, recipe, cluster, progress)
    for base in searching.bases():
        for microbatch in microbatches(size):
            if not searching.add(base, microbatch):
                break  # more samples need more memory
    for dtype in searching.dtypes:
        searching.add_parts(dtype)
    found = sorted(searching.found, key=lambda c: (not c.fits, c.step_us))
    return SearchResult(tuple(found), tuple(dict.fromkeys(searching.refused)), searching.num_traces)


class _Search:
    def __init__(
        self,
        make_workload: MakeWorkload,
        size: int,
        recipe: Recipe,
        cluster: Cluster,
        progress: Progress,
    ) -> None:
        self._workload_of, self._size, self._recipe = make_workload, size, recipe
        self._cluster, self._progress = cluster, progress
        self.found: list[PlannedRecipe] = []
        self.refused: list[str] = []
        self.num_traces = 0
        self._needs_of_replicas = 0.0

    @property
    def dtypes(self) -> list[str]:
        return ["bf16", "fp8"] if "float8" in self._cluster.hardware.flops else ["bf16"]

    def bases(self) -> Iterator[Recipe]:
        """Yield ZeRO-3 recipes: each precision, with no layer and with all layers recomputed."""
        if "fp8" not in self.dtypes:
            self.refused.append(f"fp8: {self._cluster.hardware.name} has no products in it")
        for dtype in self.dtypes:
            for recompute in (0.0, 1.0):
                yield dataclasses.replace(
                    self._recipe, strategy="zero3", dtype=dtype, recompute=recompute, offload=False
                )

    def add(self, base: Recipe, microbatch: int) -> bool:
        """Plan a recipe with all strategies; return whether any candidate fits."""
        recipe = dataclasses.replace(base, accumulate=self._size // microbatch)
        workload = self._workload_of(microbatch)
        found = list(self._of_one_trace(recipe, workload, microbatch))
        if recipe.dtype != "fp8" and self._may_replicate():
            found += self._traced("ddp", recipe, workload, microbatch)
        self.found += found
        return any(candidate.fits for candidate in found)

    def _of_one_trace(
        self, recipe: Recipe, workload: Workload, microbatch: int
    ) -> Iterator[PlannedRecipe]:
        traced = self._trace(recipe, workload)
        for variant in self._variants(recipe):
            candidate = self._candidate(traced, variant, microbatch)
            if candidate is None:
                yield from self._traced(variant.strategy, recipe, workload, microbatch)
                continue
            yield candidate
            if variant.strategy == "zero3" and not candidate.fits:
                yield from self._offloaded(traced, variant, microbatch)
        num_gpus = self._cluster.num_gpus
        if num_gpus > (node := self._cluster.hardware.ranks_per_node):
            yield from self._traced(f"hpz:{node}", recipe, workload, microbatch)

    def _variants(self, recipe: Recipe) -> list[Recipe]:
        """Return variants of a recipe for the strategies that a trace of ZeRO-3 serves."""
        hybrid = [f"hsdp:{shards}" for shards in self._shard_groups()]
        return [dataclasses.replace(recipe, strategy=s) for s in ("zero3", "zero2", *hybrid)]

    def _offloaded(
        self, traced: Traced, recipe: Recipe, microbatch: int
    ) -> Iterator[PlannedRecipe]:
        """Yield the candidate with its shards on the host, if that can be forecast."""
        if self._cluster.hardware.device_type == "cpu":
            return
        if recipe.dtype == "fp8":
            self.refused.append("offload with fp8: what its scales take the host is not known")
            return
        offloaded = dataclasses.replace(recipe, offload=True)
        found = self._candidate(traced, offloaded, microbatch)
        if found is not None:
            yield found

    def add_parts(self, dtype: str) -> None:
        """Plan partial recomputation, by the rule in the module docstring."""
        found = [c for c in self.found if c.recipe.dtype == dtype]
        without = [c for c in found if not c.recipe.recompute]
        too_large = [
            c.microbatch
            for c in without
            if c.recipe.strategy == "zero3" and not c.recipe.offload and not c.fits
        ]
        if not too_large:
            return
        microbatch = min(too_large)
        wanted = _that_need_parts([c for c in found if c.microbatch == microbatch])
        quickest = min((c.step_us for c in self.found if c.fits), default=math.inf)
        # Partial recomputation is slower than none: skip what is too slow even without any.
        recipes = [c.recipe for c in wanted if c.step_us < quickest]
        if recipes:
            self._add_parts_of(recipes, self._workload_of(microbatch), microbatch)

    def _add_parts_of(self, recipes: Sequence[Recipe], workload: Workload, microbatch: int) -> None:
        tried = depths(workload.num_layers or 0, workload.period)
        if not tried:
            self.refused.append("parts of recomputation: the model has few layers")
            return
        self._progress(f"parts of recomputation, {recipes[0].dtype}")
        found = of_all_depths(workload, recipes[0], self._cluster, self._progress)
        self.num_traces += sum(map(len, found.steps))
        try:
            parts = [self._least_recomputed(recipe, found, tried, microbatch) for recipe in recipes]
        except NotPeriodicError as error:
            self.refused.append(f"parts of recomputation: {error}")
            return
        self.found += filter(None, parts)

    def _least_recomputed(
        self, recipe: Recipe, found: Repeating, tried: Sequence[Depth], microbatch: int
    ) -> PlannedRecipe | None:
        """Plan a recipe with as few recomputed layers as fit, leaving ``RESERVED`` free.

        Args:
            recipe: recipe without recomputation.
            found: traced steps, from which the step at any depth is derived.
            tried: depths to choose from, those that recompute most layers first.

        Returns:
            The candidate; None if none of the depths fits.
        """

        @functools.cache
        def planned(number: int) -> PlannedRecipe | None:
            depth = tried[number - 1]
            partial = dataclasses.replace(recipe, recompute=depth.recomputed / sum(depth))
            return self._candidate(Traced(found.of_depth(depth), [found.note]), partial, microbatch)

        def memory_of(number: int) -> int:
            candidate = planned(number) if number <= len(tried) else None
            return limit + 1 if candidate is None else candidate.memory_bytes

        limit = int((1 - RESERVED) * self._cluster.memory_bytes)
        best = largest_that_fits(memory_of, limit, 1)
        return None if best is None else planned(best)

    def _shard_groups(self) -> list[int]:
        """Return the sizes of HSDP's shard groups to try: one, two and four nodes."""
        num_gpus, node = self._cluster.num_gpus, self._cluster.hardware.ranks_per_node
        sizes = [node, 2 * node, 4 * node]
        return [size for size in sizes if size < num_gpus and num_gpus % size == 0]

    def _may_replicate(self) -> bool:
        """Return whether full parameters, gradients and optimizer state could fit on a device."""
        fits = self._needs_of_replicas < self._cluster.memory_bytes
        if not fits:
            needed = self._needs_of_replicas / GB
            self.refused.append(f"ddp: parameters, gradients and optimizer need {needed:.0f} GB")
        return fits

    def _traced(
        self, strategy: str, recipe: Recipe, workload: Workload, microbatch: int
    ) -> Iterator[PlannedRecipe]:
        recipe = dataclasses.replace(recipe, strategy=strategy)
        yield self._planned(self._trace(recipe, workload), recipe, microbatch)

    def _trace(self, recipe: Recipe, workload: Workload) -> Traced:
        self._progress(f"{recipe.strategy}, {recipe.dtype}, {workload.tokens} {workload.unit}")
        self.num_traces += 1
        traced = traced_step(workload, recipe, self._cluster)
        states = OPTIMIZERS[recipe.optimizer].states
        self._needs_of_replicas = traced.step.held.params_bytes * (2 + states)
        return traced

    def _candidate(self, traced: Traced, recipe: Recipe, microbatch: int) -> PlannedRecipe | None:
        """Plan a recipe from a trace of ZeRO-3; None if the recipe needs its own trace."""
        step: TracedStep | None = traced.step
        if recipe.kind == "hsdp":
            num_gpus = self._cluster.num_gpus
            step = on_mesh(traced.step, num_gpus, recipe.ranks(num_gpus))
        if step is None:
            return None
        if recipe.offload:
            step = on_host(step)
        keeps = recipe.kind == "zero2"
        found = self._planned(traced._replace(step=step), recipe, microbatch, keep_all=keeps)
        return dataclasses.replace(found, traced=None) if keeps else found

    def _planned(
        self, traced: Traced, recipe: Recipe, microbatch: int, *, keep_all: bool = False
    ) -> PlannedRecipe:
        planned = plan_step(traced.step, recipe, self._cluster, keep_all=keep_all, refine=False)
        memory = planned.memory
        return PlannedRecipe(
            recipe, microbatch, planned.time.step_us, memory.total, memory.fits, traced
        )


def _that_need_parts(candidates: Sequence[PlannedRecipe]) -> list[PlannedRecipe]:
    """Return the candidates that do not fit, but whose variant with full recomputation does."""

    def place(candidate: PlannedRecipe) -> tuple[str, bool]:
        return candidate.recipe.strategy, candidate.recipe.offload

    fits = {place(c) for c in candidates if c.recipe.recompute == 1 and c.fits}
    return [
        c
        for c in candidates
        if c.recipe.kind in ("zero3", "zero2", "hsdp")
        and not (c.recipe.recompute or c.fits)
        and place(c) in fits
    ]
