"""All ways to train a model on a cluster, planned and compared: `search`.

A trace serves all strategies that only say who holds what: ZeRO-2 keeps what ZeRO-3 gathers again,
and HSDP has another mesh. So a model is traced once for each precision, size of microbatches and
choice of recomputation, once more for hpZ, and once more for DDP where replicas could fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .cluster import Cluster
from .plan import Progress, traced_step
from .planned_step import plan_step
from .recipe import OPTIMIZERS, Recipe
from .retarget import on_mesh
from .trace import TracedStep
from .workload import Workload, WorkloadOf

GB = 1e9


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        microbatch: samples of a microbatch on a rank.
        step_us: of a whole step.
        memory_bytes: of a rank, margin included.
        fits: whether a device has that.
    """

    recipe: Recipe
    microbatch: int
    step_us: float
    memory_bytes: int
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """Candidates, the quickest that fits first; ``print`` shows the front of time and memory.

    Attributes:
        refused: what was not planned, and why.
        num_traces: that it took.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    num_traces: int

    @property
    def best(self) -> Candidate:
        """The quickest that fits.

        Raises:
            ValueError: nothing fits.
        """
        if not self.candidates or not self.candidates[0].fits:
            raise ValueError("nothing fits: take more or larger GPUs, or fewer tokens")
        return self.candidates[0]

    def front(self) -> list[Candidate]:
        """Return those that fit and that no other beats in both time and memory."""
        return pareto_front([c for c in self.candidates if c.fits])

    def __str__(self) -> str:
        front = self.front()
        rows = [candidate_row(candidate) for candidate in front]
        counted = f"{len(self.candidates)} ways, {self.num_traces} traces"
        parts = [f"{counted}; these fit, and none is better in both time and memory:"]
        if not front:
            least = min(self.candidates, key=lambda c: c.memory_bytes, default=None)
            needed = "" if least is None else f"; the least needs {least.memory_bytes / GB:.1f} GB"
            parts = [f"{counted}; none fits{needed}"]
        elif rows:
            parts.append(tabulate(rows, HEADERS, floatfmt=",.1f"))
        return "\n\n".join([*parts, *(f"Not planned: {text}." for text in self.refused)])


HEADERS = ["strategy", "dtype", "recompute", "microbatches", "step ms", "GB"]


def candidate_row(candidate: Candidate) -> list[Any]:
    """Return a row of a table with ``HEADERS``."""
    recipe = candidate.recipe
    return [
        recipe.strategy,
        recipe.dtype,
        "all" if recipe.recompute else "none",
        f"{recipe.accumulate} of {candidate.microbatch}",
        candidate.step_us / 1e3,
        candidate.memory_bytes / GB,
    ]


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other one beats in both time and memory, quickest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_us, c.memory_bytes)):
        if not front or candidate.memory_bytes < front[-1].memory_bytes:
            front.append(candidate)
    return front


def microbatches(size: int) -> list[int]:
    """Return the sizes that a batch can be cut into: powers of two that divide it, and itself."""
    powers = [1 << i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return sorted({*powers, size})


def search(
    workload_of: WorkloadOf,
    size: int,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
) -> SearchResult:
    """Plan all ways to train on ``size`` samples of each rank in a step.

    Args:
        workload_of: returns the workload of a microbatch of so many samples.
        recipe: its optimizer, and what is not searched for.
    """
    searching = _Search(workload_of, size, recipe, cluster, progress)
    for base in searching.bases():
        for microbatch in microbatches(size):
            if not searching.add(base, microbatch):
                break  # more samples need more memory
    found = sorted(searching.found, key=lambda c: (not c.fits, c.step_us))
    return SearchResult(tuple(found), tuple(dict.fromkeys(searching.refused)), searching.num_traces)


class _Search:
    def __init__(
        self,
        workload_of: WorkloadOf,
        size: int,
        recipe: Recipe,
        cluster: Cluster,
        progress: Progress,
    ) -> None:
        self._workload_of, self._size, self._recipe = workload_of, size, recipe
        self._cluster, self._progress = cluster, progress
        self.found: list[Candidate] = []
        self.refused: list[str] = []
        self.num_traces = 0
        self._needs_of_replicas = 0.0

    def bases(self) -> Iterator[Recipe]:
        """Yield ZeRO-3 in each precision, without and with recomputation."""
        dtypes = ["bf16"]
        if "float8" in self._cluster.hardware.flops:
            dtypes.append("fp8")
        else:
            self.refused.append(f"fp8: {self._cluster.hardware.name} has no products in it")
        for dtype in dtypes:
            for recompute in (False, True):
                yield dataclasses.replace(
                    self._recipe, strategy="zero3", dtype=dtype, recompute=recompute
                )

    def add(self, base: Recipe, microbatch: int) -> bool:
        """Plan a recipe with all strategies; return whether any fits."""
        recipe = dataclasses.replace(base, accumulate=self._size // microbatch)
        workload = self._workload_of(microbatch)
        found = list(self._of_one_trace(recipe, workload, microbatch))
        if recipe.dtype != "fp8" and self._may_replicate():
            found += self._traced("ddp", recipe, workload, microbatch)
        self.found += found
        return any(candidate.fits for candidate in found)

    def _of_one_trace(
        self, recipe: Recipe, workload: Workload, microbatch: int
    ) -> Iterator[Candidate]:
        step = self._trace(recipe, workload)
        num_gpus = self._cluster.num_gpus
        yield self._candidate(step, recipe, microbatch)
        yield self._candidate(
            step, dataclasses.replace(recipe, strategy="zero2"), microbatch, keep_all=True
        )
        for shards in self._shard_groups():
            hybrid = dataclasses.replace(recipe, strategy=f"hsdp:{shards}")
            moved = on_mesh(step, num_gpus, hybrid.ranks(num_gpus))
            if moved is not None:
                yield self._candidate(moved, hybrid, microbatch)
            else:
                yield from self._traced(hybrid.strategy, recipe, workload, microbatch)
        if num_gpus > (node := self._cluster.hardware.ranks_per_node):
            yield from self._traced(f"hpz:{node}", recipe, workload, microbatch)

    def _shard_groups(self) -> list[int]:
        """Return sizes of groups of shards for HSDP: a node, and two and four of them."""
        num_gpus, node = self._cluster.num_gpus, self._cluster.hardware.ranks_per_node
        sizes = [node, 2 * node, 4 * node]
        return [size for size in sizes if size < num_gpus and num_gpus % size == 0]

    def _may_replicate(self) -> bool:
        """Return whether full parameters, gradients and optimizer alone could fit on a device."""
        fits = self._needs_of_replicas < self._cluster.memory_bytes
        if not fits:
            needed = self._needs_of_replicas / GB
            self.refused.append(f"ddp: parameters, gradients and optimizer need {needed:.0f} GB")
        return fits

    def _traced(
        self, strategy: str, recipe: Recipe, workload: Workload, microbatch: int
    ) -> Iterator[Candidate]:
        recipe = dataclasses.replace(recipe, strategy=strategy)
        yield self._candidate(self._trace(recipe, workload), recipe, microbatch)

    def _trace(self, recipe: Recipe, workload: Workload) -> TracedStep:
        self._progress(f"{recipe.strategy}, {recipe.dtype}, {workload.tokens} {workload.unit}")
        self.num_traces += 1
        step = traced_step(workload, recipe, self._cluster).step
        states = OPTIMIZERS[recipe.optimizer].states
        self._needs_of_replicas = step.held.params_bytes * (2 + states)
        return step

    def _candidate(
        self, step: TracedStep, recipe: Recipe, microbatch: int, *, keep_all: bool = False
    ) -> Candidate:
        planned = plan_step(step, recipe, self._cluster, keep_all=keep_all, refine=False)
        memory = planned.memory
        return Candidate(recipe, microbatch, planned.time.step_us, memory.total, memory.fits)
