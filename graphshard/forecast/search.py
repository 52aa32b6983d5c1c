"""Plan and compare recipes for training a model on a cluster.

One trace per precision, microbatch size and recomputation (all layers or none) serves ZeRO-3,
ZeRO-2, HSDP and offload: unless rows are padded, their steps are derived from it. hpZ on several
nodes needs another trace, and so does DDP if replicas could fit. Offload and partial
recomputation cost time, so they are planned only where ZeRO-3 does not fit without them. Each
degree of tensor parallelism needs its own traces, but only a few: microbatches are planned from the
largest to the first that fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from ..show.page import Json, table_data
from .cluster import Cluster
from .deepen import NotPeriodicError
from .derive import (
    Depth,
    Progress,
    ShallowCopies,
    depths,
    for_strategy,
    on_host,
    trace_all_depths,
    trace_step,
)
from .forecast import GB
from .largest import largest_that_fits, shard_groups
from .planned_step import plan_step
from .recipe import OPTIMIZERS, Recipe
from .trace import TracedStep
from .workload import MakeWorkload, Workload

# Fraction of a device's memory left free when choosing how many layers to recompute. The choice
# uses the quick search; the refined forecast may need more memory (measured: 1.5 % more for Llama 3
# 70B on 8 GPUs). Too small: the fastest candidate may not fit. Too large: needless recomputation.
RESERVED = 0.03

HEADERS = ["strategy", "tp", "dtype", "recompute", "offload", "microbatches", "step ms", "GB"]


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe, planned with one microbatch size."""

    recipe: Recipe
    microbatch: int  # samples in a microbatch, which ``recipe.tp`` ranks share
    step_us: float  # time of a whole step
    memory_bytes: int  # peak of a rank, including the margin
    fits: bool  # whether the step fits on a device, and into the budget
    # Traced step that a forecast of this candidate can reuse.
    traced: TracedStep | None = field(default=None, repr=False, compare=False)

    def row(self) -> list[str | float]:
        # The columns of ``HEADERS``.
        recipe = self.recipe
        return [
            recipe.strategy,
            recipe.tp,
            recipe.dtype,
            {0.0: "none", 1.0: "all"}.get(recipe.recompute, f"{recipe.recompute:.0%}"),
            "yes" if recipe.offload else "no",
            f"{recipe.accumulate} of {self.microbatch}",
            self.step_us / 1e3,
            self.memory_bytes / GB,
        ]

    def as_dict(self) -> Json:
        return {
            "recipe": dataclasses.asdict(self.recipe),
            "samples_per_microbatch": self.microbatch,
            "step_us": self.step_us,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class SearchResult:
    """The result of a search; ``print`` shows the Pareto front of time and memory."""

    candidates: tuple[PlannedRecipe, ...]  # candidates that fit come first; then by step time
    refused: tuple[str, ...]  # recipes that were not planned, and the reasons

    @property
    def best(self) -> PlannedRecipe:
        """Fastest candidate that fits or, if none fits, fastest of all."""
        return self.candidates[0]

    def front(self) -> list[PlannedRecipe]:
        return pareto_front([c for c in self.candidates if c.fits])

    def table(self) -> Json:
        """Return the table of the candidates that fit or, if none fits, of all."""
        fitting = [candidate for candidate in self.candidates if candidate.fits]
        cells = (candidate.row() for candidate in fitting or self.candidates)
        rows = [[*names, f"{ms:.1f}", f"{gigabytes:.1f}"] for *names, ms, gigabytes in cells]
        return table_data("recipes that fit" if fitting else "no recipe fits", HEADERS, rows)

    def as_dict(self) -> Json:
        candidates = [candidate.as_dict() for candidate in self.candidates]
        return {"candidates": candidates, "refused": list(self.refused)}

    def __str__(self) -> str:
        front = self.front()
        counted = f"{len(self.candidates)} recipes"
        parts = [f"{counted}; Pareto front of step time and memory among those that fit:"]
        if front:
            rows = [candidate.row() for candidate in front]
            parts.append(tabulate(rows, HEADERS, floatfmt=",.1f"))
        else:
            least = min((c.memory_bytes for c in self.candidates), default=None)
            needed = "" if least is None else f"; the smallest needs {least / GB:.1f} GB"
            parts = [f"{counted}; none fits{needed}"]
        return "\n\n".join([*parts, *(f"Not planned: {text}." for text in self.refused)])


def pareto_front(candidates: Sequence[PlannedRecipe]) -> list[PlannedRecipe]:
    """Return the candidates that each need less memory than all faster ones, fastest first."""
    front: list[PlannedRecipe] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_us, c.memory_bytes)):
        if not front or candidate.memory_bytes < front[-1].memory_bytes:
            front.append(candidate)
    return front


def microbatches(size: int) -> list[int]:
    """Return the microbatch sizes to try: the powers of two that divide ``size``, and ``size``."""
    powers = [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return sorted({*powers, size})


def search(
    make_workload: MakeWorkload,
    size: int,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
    *,
    split: bool = False,
    dtypes: Sequence[str] | None = None,
) -> SearchResult:
    """Plan recipes for a training step; return the candidates and the refused recipes.

    Args:
        size: number of samples of a rank, or of ``recipe.tp`` ranks, in a step, over all
            microbatches.
        recipe: settings of all candidates: optimizer, ``budget_gb``, ``reduce`` and ``tp``. ``ep``
            must be 1; other fields are ignored.
        split: whether to also plan tensor parallelism within a node, with the same number of
            samples per rank in a step; ``recipe.tp`` must be 1.
        dtypes: precisions to try (default: bf16, and fp8 if the device has it and ``recipe.tp`` is
            1).
    """
    refused: list[str] = []
    dtypes = dtypes or _dtypes(recipe, cluster, refused)
    searching = _Search(make_workload, size, recipe, cluster, progress, dtypes, refused)
    bases, sizes = list(searching.bases()), microbatches(size)
    for i, base in enumerate(bases):
        fits = True
        for j, microbatch in enumerate(sizes):
            # More samples need more memory, but a step of one microbatch needs less for gradients:
            # it does not hold those of earlier ones.
            if fits or microbatch == size:
                searching.done = f"{i * len(sizes) + j} of {len(bases) * len(sizes)}: "
                fits = any(candidate.fits for candidate in searching.add(base, microbatch))
    searching.done = ""
    for dtype in dtypes:
        searching.add_partial_recomputation(dtype)
    for tp in searching.degrees() if split else ():
        searching.add_split(tp)
    candidates = sorted(searching.candidates, key=lambda c: (not c.fits, c.step_us))
    return SearchResult(tuple(candidates), tuple(dict.fromkeys(refused)))


def _dtypes(recipe: Recipe, cluster: Cluster, refused: list[str]) -> list[str]:
    if not cluster.has_fp8:
        refused.append(f"fp8: {cluster.hardware.name} has no fp8 matrix products")
        return ["bf16"]
    if recipe.tp > 1:
        refused.append(_NO_FP8)
        return ["bf16"]
    return ["bf16", "fp8"]


@dataclass
class _Search:
    make_workload: MakeWorkload
    size: int
    recipe: Recipe
    cluster: Cluster
    progress: Progress
    dtypes: Sequence[str]
    refused: list[str]
    done: str = ""  # count of traced precisions and sizes, for ``progress``
    candidates: list[PlannedRecipe] = field(default_factory=list)

    def bases(self) -> Iterator[Recipe]:
        for dtype in self.dtypes:
            for recompute in (0.0, 1.0):
                yield self._base(dtype, recompute, self.recipe.tp)

    def _base(self, dtype: str, recompute: float, tp: int) -> Recipe:
        return dataclasses.replace(
            self.recipe, strategy="zero3", dtype=dtype, recompute=recompute, offload=False, tp=tp
        )

    def add(self, base: Recipe, microbatch: int) -> list[PlannedRecipe]:
        """Plan a recipe with each strategy, and return the candidates.

        hpZ is left out unless there are several nodes of several ranks. DDP is left out with fp8,
        with ``tp`` > 1, or if parameters, gradients and optimizer state alone exceed the memory.
        """
        num_before = len(self.candidates)
        recipe = dataclasses.replace(base, accumulate=self.size // microbatch)
        workload = self.make_workload(microbatch)
        traced = self._add_derived(recipe, workload, microbatch)
        node = self.cluster.hardware.ranks_per_node // recipe.tp
        if node in shard_groups(self.cluster, recipe.tp):
            self._add_traced(f"hpz:{node}", recipe, workload, microbatch)
        replica_bytes = traced.held.params_bytes * (2 + OPTIMIZERS[recipe.optimizer].states)
        can_replicate = recipe.dtype != "fp8" and recipe.tp == 1
        if can_replicate and replica_bytes < self.cluster.memory_bytes:
            self._add_traced("ddp", recipe, workload, microbatch)
        elif can_replicate:
            self.refused.append(
                f"ddp: parameters, gradients and optimizer state need {replica_bytes / GB:.0f} GB "
                f"of a GPU's {self.cluster.memory_bytes / GB:.0f} GB"
            )
        return self.candidates[num_before:]

    def _add_derived(self, recipe: Recipe, workload: Workload, microbatch: int) -> TracedStep:
        """Plan ZeRO-3, ZeRO-2 and HSDP from a trace of ZeRO-3 where possible; return the trace.

        If ZeRO-3 does not fit, plan it with offload as well.
        """
        traced = self._trace(recipe, workload)
        groups = shard_groups(self.cluster, recipe.tp)
        for strategy in ("zero3", "zero2", *(f"hsdp:{size}" for size in groups)):
            variant = dataclasses.replace(recipe, strategy=strategy)
            step = for_strategy(traced, variant, self.cluster.num_gpus)
            candidate = self._plan(step or self._trace(variant, workload), variant, microbatch)
            self.candidates.append(candidate)
            if strategy == "zero3" and not candidate.fits:
                self._add_offloaded(traced, variant, microbatch)
        return traced

    def degrees(self) -> list[int]:
        num_gpus, node = self.cluster.num_gpus, self.cluster.hardware.ranks_per_node
        powers = [1 << i for i in range(1, node.bit_length())]
        return [tp for tp in powers if node % tp == 0 and tp < num_gpus and num_gpus % tp == 0]

    def add_split(self, tp: int) -> None:
        """Plan tensor parallelism over ``tp`` ranks, with ever smaller microbatches until one fits.

        If the whole batch does not fit in one microbatch, also plan with all layers recomputed.
        """
        if "fp8" in self.dtypes:
            self.refused.append(_NO_FP8)
        dtype = next((dtype for dtype in self.dtypes if dtype != "fp8"), None)
        if dtype is None:
            return
        size = self.size * tp
        try:
            for recompute in (0.0, 1.0):
                if self._add_largest(self._base(dtype, recompute, tp), size) == size:
                    return  # one microbatch fits without recomputation, which would cost time
        except ValueError as error:
            self.refused.append(f"tensor parallelism: {error}")

    def _add_largest(self, base: Recipe, size: int) -> int | None:
        """Plan ``size`` samples in ever smaller microbatches until one fits without offload.

        Return the size of that microbatch, or None.
        """
        for microbatch in reversed(microbatches(size)):
            num_before = len(self.candidates)
            recipe = dataclasses.replace(base, accumulate=size // microbatch)
            self._add_derived(recipe, self.make_workload(microbatch), microbatch)
            if any(c.fits and not c.recipe.offload for c in self.candidates[num_before:]):
                return microbatch
        return None

    def _add_offloaded(self, traced: TracedStep, recipe: Recipe, microbatch: int) -> None:
        if self.cluster.hardware.device_type == "cpu":
            return  # shards are in host memory already
        if recipe.dtype == "fp8":
            self.refused.append(
                "offload with fp8: the host's time to compute fp8 scales is unknown"
            )
            return
        offloaded = dataclasses.replace(recipe, offload=True)
        self.candidates.append(self._plan(on_host(traced), offloaded, microbatch))

    def add_partial_recomputation(self, dtype: str) -> None:
        """Plan partial recomputation with the smallest microbatch too large for plain ZeRO-3.

        Plain ZeRO-3 neither recomputes nor offloads. Only recipes that might beat the fastest
        candidate are planned.
        """
        candidates = [c for c in self.candidates if c.recipe.dtype == dtype]
        too_large = [
            c.microbatch
            for c in candidates
            if c.recipe.strategy == "zero3" and not (c.recipe.recompute or c.recipe.offload)
            if not c.fits
        ]
        if not too_large:
            return
        microbatch = min(too_large)
        fastest_us = min((c.step_us for c in self.candidates if c.fits), default=math.inf)
        # Partial recomputation costs time: skip recipes that are too slow even without it.
        recipes = [
            c.recipe
            for c in _fit_if_recomputed([c for c in candidates if c.microbatch == microbatch])
            if c.step_us < fastest_us
        ]
        if not recipes:
            return
        workload = self.make_workload(microbatch)
        tried = depths(workload.num_layers or 0, workload.period)
        if not tried:
            self.refused.append("partial recomputation: the model has too few layers")
            return
        self.progress(f"partial recomputation, {dtype}")
        base = self._base(dtype, 0.0, self.recipe.tp)  # from which all strategies are derived
        copies = trace_all_depths(workload, base, self.cluster, self.progress)
        try:
            partial = [self._least_recomputed(r, copies, tried, microbatch) for r in recipes]
        except NotPeriodicError as error:
            self.refused.append(f"partial recomputation: {error}")
            return
        self.candidates += filter(None, partial)

    def _least_recomputed(
        self, recipe: Recipe, copies: ShallowCopies, tried: Sequence[Depth], microbatch: int
    ) -> PlannedRecipe | None:
        """Plan the last depth in ``tried`` that leaves a fraction ``RESERVED`` of the memory free.

        Return None if no depth does.
        """

        @functools.cache
        def planned(number: int) -> PlannedRecipe | None:
            depth = tried[number - 1]
            partial = dataclasses.replace(recipe, recompute=depth.recomputed / sum(depth))
            step = for_strategy(copies.at_depth(depth), partial, self.cluster.num_gpus)
            if step is None:
                return None
            return self._plan(on_host(step) if partial.offload else step, partial, microbatch)

        def memory_at(number: int) -> int:
            candidate = planned(number) if number <= len(tried) else None
            return limit + 1 if candidate is None or not candidate.fits else candidate.memory_bytes

        limit = int((1 - RESERVED) * self.cluster.memory_bytes)
        best = largest_that_fits(memory_at, limit, 1)
        return None if best is None else planned(best)

    def _add_traced(
        self, strategy: str, recipe: Recipe, workload: Workload, microbatch: int
    ) -> None:
        recipe = dataclasses.replace(recipe, strategy=strategy)
        self.candidates.append(self._plan(self._trace(recipe, workload), recipe, microbatch))

    def _trace(self, recipe: Recipe, workload: Workload) -> TracedStep:
        size = f"{workload.tokens} {workload.unit}"
        self.progress(f"{self.done}{recipe.strategy}, {recipe.dtype}, {size}")
        return trace_step(workload, recipe, self.cluster)

    def _plan(self, traced: TracedStep, recipe: Recipe, microbatch: int) -> PlannedRecipe:
        plan = functools.partial(plan_step, traced, cluster=self.cluster, refine=False)
        try:
            planned, within_budget = plan(recipe), True
        except ValueError:  # exceeds the budget: plan without it to report the memory
            planned, within_budget = plan(dataclasses.replace(recipe, budget_gb=None)), False
        time, memory = planned.time, planned.memory
        fits = within_budget and memory.fits
        return PlannedRecipe(recipe, microbatch, time.step_us, memory.total, fits, traced)


_NO_FP8 = "fp8 with tensor parallelism: split parameters cannot use fp8"


def _fit_if_recomputed(candidates: Sequence[PlannedRecipe]) -> list[PlannedRecipe]:
    """Return the ZeRO and HSDP candidates that fit only with all layers recomputed."""
    recomputed = [c for c in candidates if c.recipe.recompute == 1 and c.fits]
    fits = {(c.recipe.strategy, c.recipe.offload) for c in recomputed}
    return [
        c
        for c in candidates
        if c.recipe.kind in ("zero3", "zero2", "hsdp")
        and not (c.recipe.recompute or c.fits)
        and (c.recipe.strategy, c.recipe.offload) in fits
    ]
