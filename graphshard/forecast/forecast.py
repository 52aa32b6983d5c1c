"""The forecast of a training step, shown as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from tabulate import tabulate

from ..cost.hardware import CALIBRATED, DATASHEET
from ..params.padding import find_padding
from ..show.dump import Dump
from .cluster import Cluster
from .estimate import MemoryForecast, PlannedGraph, TimeForecast
from .planned_step import Change
from .recipe import Recipe
from .trace import HeldMemory

GB = 1e9


@dataclass(frozen=True)
class Exposed:
    """A bucket, or all calls by the model to one collective, that compute waits for.

    Attributes:
        what: graph, kind and contents of the bucket; or graph, operator and number of calls.
        us: time that compute waits in a step, over all its microbatches, in microseconds.
        why: reason for the wait.
    """

    what: str
    us: float
    why: str


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a training step on a cluster; ``print`` shows them.

    Attributes:
        model: name of the model.
        num_params: number of parameters in the full model.
        tokens: number of tokens, or samples, that all ranks train on in a step.
        unit: unit of ``tokens``: "tokens" or "samples".
        mfu: model FLOPs utilization, as in ``Backend.metrics``: FLOPs of matrix products, attention
            and convolutions, without recomputation, relative to the GPU's peak in their dtypes.
        exposed: collectives and host copies with the longest exposed time, longest first.
        binds: bottleneck of a step: memory, compute, memory bandwidth, link, latency or host.
        changes: changes that would help, largest gain first.
        dumps: plan of each graph.
        graphs: problem, buckets and input shard size of each graph.
        held: memory that a rank holds between graphs.
        notes: assumptions of the forecast.
        recomputed: layers that backward recomputes, as in "model.layers[:3]"; empty unless
            ``recipe.recompute`` is between 0 and 1.
        saved: formula for the size of the tensors saved for backward, as ``--formula`` prints it,
            or "".
    """

    model: str
    num_params: int
    cluster: Cluster
    recipe: Recipe
    tokens: int
    unit: str
    time: TimeForecast
    memory: MemoryForecast
    mfu: float
    exposed: tuple[Exposed, ...]
    binds: str
    changes: tuple[Change, ...]
    dumps: tuple[Dump, ...]
    graphs: tuple[PlannedGraph, ...]
    held: HeldMemory
    notes: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    saved: str = ""

    @property
    def microbatch(self) -> int:
        """Tokens, or samples, in a microbatch, which ``recipe.tp`` ranks share."""
        recipe = self.recipe
        return self.tokens * recipe.tp // (recipe.accumulate * self.cluster.num_gpus)

    @property
    def tokens_per_s(self) -> float:
        """Tokens, or samples, per second over all ranks."""
        return self.tokens / self.time.step_us * 1e6

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def host_bytes(self) -> int:
        """Host memory that each node needs with ``offload``, in bytes; 0 without ``offload``."""
        cluster = self.cluster
        return self.memory.host * min(cluster.num_gpus, cluster.hardware.ranks_per_node)

    @property
    def padding(self) -> str | None:
        """Warning about padding of parameters with fewer rows than shards, or None.

        None if the padding is small or ``ep`` > 1.
        """
        if self.recipe.ep > 1:  # experts have their own shards
            return None
        params = [param for dump in self.dumps for param in dump.plan.params]
        shapes = {param.fqn: param.shape for param in params if param.padded_rows is not None}
        num_gpus = self.cluster.num_gpus
        shards, tp = self.recipe.ranks(num_gpus).shards, self.recipe.tp
        padding = find_padding(shapes, shards, self.held.parameters, self.held.params_bytes / tp)
        if padding is None:
            return None
        # HSDP over one rank would replicate parameters.
        if padding.rows > 1 and num_gpus // tp % padding.rows == 0:
            return f"{padding}; hsdp:{padding.rows} would avoid this padding"
        return str(padding)

    def code(self) -> str:
        budget = self.dumps[0].limits.peak
        return self.recipe.code(
            self.cluster.num_gpus,
            None if budget is None else budget / 1e9,
            self.cluster.hardware.device_type,
            self.recomputed,
        )

    def to_json(self) -> str:
        """Return the main results as JSON.

        Times are in microseconds and sizes in bytes, unless the key names another unit.
        """
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, object]:
        # The contents of ``to_json``.
        time = _with_properties(self.time, "step_us", "modelled_us", "low_us", "high_us")
        memory = _with_properties(self.memory, "allocated", "total", "low", "high", "fits")
        return {
            "model": self.model,
            "num_params": self.num_params,
            "device": self.cluster.hardware.name,
            "gpus": self.cluster.num_gpus,
            "nodes": self.cluster.num_nodes,
            "recipe": dataclasses.asdict(self.recipe),
            self.unit: self.tokens,
            f"{self.unit}_per_s": self.tokens_per_s,
            f"{self.unit}_per_microbatch": self.microbatch,
            "fits": self.fits,
            "mfu": self.mfu,
            "time": {**time, "not_modelled_us": self.time.unmodelled_us},
            "host_bytes": self.host_bytes,
            "memory": memory,
            "exposed": [dataclasses.asdict(exposed) for exposed in self.exposed],
            "binds": self.binds,
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "padding": self.padding,
            "notes": list(self.notes),
            "saved": self.saved,
            "code": self.code(),
        }

    def __str__(self) -> str:
        return forecast_text(self)


def _with_properties(part: TimeForecast | MemoryForecast, *names: str) -> dict[str, object]:
    return {**dataclasses.asdict(part), **{name: getattr(part, name) for name in names}}


# --- as text -------------------------------------------------------------------------------------


def forecast_text(forecast: Forecast) -> str:
    """Return the text that ``print(forecast)`` shows."""
    rows = list(summary_rows(forecast))
    width = max(len(name) for name, _ in rows)
    exposed = [[one.us / 1e3, one.what, one.why] for one in forecast.exposed]
    headers = ["exposed ms", "collective", "reason"]
    parts = [
        "\n".join(f"{name:{width}}  {value}" for name, value in rows),
        tabulate(memory_rows(forecast), ["memory", "GB"], floatfmt=".2f"),
        tabulate(exposed, headers, floatfmt=".2f") if exposed else "",
        tabulate(change_rows(forecast), ["what would help", *CHANGE_HEADERS], floatfmt=".1f"),
        f"Code:\n\n{forecast.code()}",
        *(f"Assumed: {note}." for note in forecast.notes),
    ]
    return "\n\n".join(part for part in parts if part)


_INTERVALS = {
    DATASHEET: "measured steps of compiled models were within it",
    CALIBRATED: "measured steps on calibrated machines were within it",
}


def summary_rows(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Yield the most important results, as pairs of name and text."""
    recipe, time, memory = forecast.recipe, forecast.time, forecast.memory
    size, unit = forecast.num_params / 1e9, "billion"
    if size < 0.1:
        size, unit = size * 1e3, "million"
    yield "model", f"{forecast.model}, {size:.2f} {unit} parameters"
    yield "cluster", f"{forecast.cluster}, {memory.device / GB:.1f} GB each"
    yield "recipe", _recipe_text(forecast)
    per_gpu = forecast.tokens_per_s / forecast.cluster.num_gpus
    yield (
        "step",
        f"{time.step_us / 1e3:,.1f} ms for {forecast.tokens:,} {forecast.unit}: "
        f"{forecast.tokens_per_s:,.0f} per second, {per_gpu:,.0f} per GPU; "
        f"MFU {forecast.mfu:.1%}",
    )
    yield (
        "interval",
        f"{time.low_us / 1e3:,.1f} to {time.high_us / 1e3:,.1f} ms, "
        f"{memory.low / GB:.1f} to {memory.high / GB:.1f} GB: nine of ten "
        f"{_INTERVALS[forecast.cluster.hardware.source]}",
    )
    yield (
        "breakdown",
        f"compute {time.compute_us / 1e3:,.1f} ms, exposed communication "
        f"{time.exposed_us / 1e3:,.1f} ms, slowdown by hidden communication "
        f"{time.lost_us / 1e3:,.1f} ms, optimizer {time.optimizer_us / 1e3:,.1f} ms, "
        f"not modelled {time.unmodelled_us / 1e3:,.1f} ms",
    )
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield (
        "peak memory",
        f"{memory.total / GB:.1f} of {memory.device / GB:.1f} GB, in {memory.when}: {verdict}",
    )
    if memory.activations:
        # With flash attention, activations are proportional to batch size and sequence length.
        tokens = forecast.microbatch
        yield (
            "activations",
            f"{memory.activations / tokens / 1e3:,.1f} KB x {tokens:,} {forecast.unit} of a "
            f"microbatch = {memory.activations / GB:.2f} GB",
        )
    if forecast.saved:
        yield "saved", f"{forecast.saved} of a microbatch, from forward to backward"
    if recipe.offload:
        yield "host", f"{forecast.host_bytes / GB:.1f} GB of host memory per node"
    if padding := forecast.padding:
        yield "padding", padding
    yield "bottleneck", forecast.binds


def _recipe_text(forecast: Forecast) -> str:
    recipe = forecast.recipe
    parts = [recipe.strategy, recipe.dtype, recipe.optimizer]
    if recipe.tp > 1:
        parts.insert(1, f"tp {recipe.tp}")
    if recipe.ep > 1:
        parts.insert(1, f"ep {recipe.ep}")
    if recipe.offload:
        parts.append("offloaded to the host")
    if recipe.recompute == 1:
        parts.append("all layers recomputed")
    elif forecast.recomputed:
        parts.append(f"{' and '.join(forecast.recomputed)} recomputed")
    if recipe.accumulate > 1:
        parts.append(f"{recipe.accumulate} microbatches")
    if recipe.reduce != "ring":
        parts.append(f"reduce {recipe.reduce}")
    return ", ".join(parts)


def memory_rows(forecast: Forecast) -> list[tuple[str, float]]:
    """Return the rows of the memory table: each kind, the margin and the total, in GB."""
    memory = forecast.memory
    kinds = {**memory.kinds, "margin": memory.margin, "total": memory.total}
    return [(name, num_bytes / GB) for name, num_bytes in kinds.items()]


CHANGE_HEADERS = ["saves", "GB"]


def change_rows(forecast: Forecast) -> list[tuple[str, str, float]]:
    """Return the rows of the table of changes: description, then ``CHANGE_HEADERS``."""
    return [
        (
            change.what if change.fits else f"{change.what}: does not fit",
            f"{change.gain:.1%}",
            change.memory_bytes / GB,
        )
        for change in forecast.changes
    ]
