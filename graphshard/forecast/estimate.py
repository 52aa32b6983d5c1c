"""Predict the time and peak memory of a planned step, with intervals from past errors.

A graph's plan counts only the memory that the graph keeps alive. This module adds the rank's other
memory: shards that are not inputs of the graph, optimizer state, buffers, earlier gradients, and
activations saved by other graphs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cost.devices import FRAGMENTATION
from ..cost.hardware import CALIBRATED, DATASHEET, Hardware
from ..cost.model import optimizer_passes
from ..kinds import GraphKind, TransferKind
from ..planning.live_bytes import (
    Span,
    alive_by_point,
    fixed_by_point,
    running,
    sum_spans,
    with_fixed_bytes,
)
from ..planning.plan import Bucket, Problem
from ..show.dump import Dump
from .recipe import OPTIMIZERS, Recipe
from .trace import HeldMemory

# Device memory in use outside of tensors, by device type.
OUTSIDE_BYTES = {
    # CUDA context and kernels. Hugging Face's page "Model memory anatomy" measures 1.3 GB on a
    # V100; other GPUs are assumed to need the same.
    "cuda": 1_300_000_000,
    # A Python process that has compiled a step (benchmarks/results/forecast_cpu.md).
    "cpu": 500_000_000,
}

ADDING = 3  # reads and writes per element to add one gradient to another on the host


# --- errors of past forecasts --------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorInterval:
    """Prediction interval for the ratio of measured to modelled values.

    ``benchmarks.forecast_report`` fits it to nine of ten past measurements.

    Attributes:
        low: lower end of the interval.
        likely: median of past ratios.
        high: upper end of the interval.
    """

    low: float
    likely: float
    high: float


# Ratios of measured to modelled step times, by the source of the machine's rates.
STEP_TIME = {
    # benchmarks/results/forecast_cpu.md: steps of six models on CPU ranks.
    CALIBRATED: ErrorInterval(1.00, 1.11, 1.64),
    # benchmarks/results/forecast.md: compiled models on A100, H100 and H200.
    DATASHEET: ErrorInterval(1.13, 1.30, 1.55),
}

# Ratios of allocated to planned bytes of a step: benchmarks/results/forecast_cpu.md.
MEMORY = ErrorInterval(1.00, 1.04, 1.18)


# --- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeForecast:
    """Predicted time of a training step, over all its microbatches.

    Attributes:
        compute_us: time of computation and packing on a GPU.
        exposed_us: time that compute waits for communication and host copies.
        lost_us: slowdown of compute by hidden communication.
        optimizer_us: time of the optimizer; with ``offload``, host time of the optimizer and of
            accumulating gradients.
        errors: ratios of measured step times to ``modelled_us``, from past measurements.
    """

    compute_us: float
    exposed_us: float
    lost_us: float
    optimizer_us: float
    errors: ErrorInterval

    @property
    def modelled_us(self) -> float:
        return self.compute_us + self.exposed_us + self.lost_us + self.optimizer_us

    @property
    def step_us(self) -> float:
        return self.errors.likely * self.modelled_us

    @property
    def unmodelled_us(self) -> float:
        return self.step_us - self.modelled_us

    @property
    def low_us(self) -> float:
        return self.errors.low * self.modelled_us

    @property
    def high_us(self) -> float:
        return self.errors.high * self.modelled_us


def time_of_step(
    dumps: Sequence[Dump], recipe: Recipe, held: HeldMemory, hardware: Hardware
) -> TimeForecast:
    """Predict the time of a step from the plans of its graphs."""
    totals = [dump.totals for dump in dumps]
    exposed_us = sum(t.total_us - t.compute_us for t in totals)
    return TimeForecast(
        compute_us=recipe.accumulate * sum(t.compute_us for t in totals),
        exposed_us=recipe.accumulate * exposed_us,
        lost_us=recipe.accumulate * sum(t.lost_us for t in totals),
        optimizer_us=_optimizer_us(recipe, held, hardware),
        errors=STEP_TIME[hardware.source],
    )


def _optimizer_us(recipe: Recipe, held: HeldMemory, hardware: Hardware) -> float:
    # Optimizers are bound by memory bandwidth.
    passes = optimizer_passes(OPTIMIZERS[recipe.optimizer].states)
    if not recipe.offload:
        return hardware.memory.us(passes * held.trained) + hardware.launch_us
    passes += ADDING * (recipe.accumulate - 1)
    return hardware.host_memory.us(passes * held.trained)


# --- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Memory of a rank at the peak of a step, in bytes.

    Attributes:
        when: graph that runs at the peak, or "optimizer".
        parameters: parameter shards, including padding, and replicated parameters.
        gradients: reduced gradient shards, including those of earlier microbatches.
        optimizer: optimizer state.
        activations: activations, inputs, outputs and temporary values.
        kept: parameters while they are kept unsharded for backward, and secondary shards of hpZ.
        gathered: other unsharded parameters and their communication buffers.
        reducing: full gradients and their communication buffers.
        buffers: buffers of the model.
        margin: allowance for memory outside of the allocator and for fragmentation.
        device: capacity of the device, with which ``total`` is compared.
        host: with ``offload``, host memory for the parameters, gradients and optimizer state.
    """

    when: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    kept: int = 0
    gathered: int = 0
    reducing: int = 0
    buffers: int
    margin: int = 0
    device: int
    host: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        others = ("when", "margin", "device", "host")
        return {name: value for name, value in vars(self).items() if name not in others}

    @property
    def allocated(self) -> int:
        """Device memory without the margin, as ``torch.cuda.max_memory_allocated`` counts it."""
        return sum(self.kinds.values())

    @property
    def total(self) -> int:
        return self.allocated + self.margin

    @property
    def low(self) -> int:
        """Lower end of the interval in which measured memory is expected, without the margin."""
        return int(MEMORY.low * self.allocated)

    @property
    def high(self) -> int:
        """Upper end of the interval in which measured memory is expected, with the margin."""
        return int(MEMORY.high * self.allocated) + self.margin

    @property
    def fits(self) -> bool:
        return self.total <= self.device


@dataclass(frozen=True)
class PlannedGraph:
    """A graph and its planned buckets.

    Attributes:
        input_bytes: size of the shards and replicated parameters among the graph's inputs, which
            ``problem`` counts as live.
        kept_bytes: size of the parameters kept unsharded for backward, and of secondary shards, at
            each point in time, which ``problem`` counts as live; empty if there are none.
    """

    problem: Problem
    buckets: tuple[Bucket, ...]
    input_bytes: int
    kept_bytes: tuple[int, ...] = ()


def peak_of_step(
    graphs: Sequence[PlannedGraph],
    outside: MemoryForecast,
    *,
    accumulate: int,
    device_type: str = "cuda",
) -> MemoryForecast:
    """Return the memory at the peak of a step; ``outside`` comes from ``outside_of_graphs``."""
    candidates = [outside]
    for graph, others in zip(graphs, other_graph_bytes(graphs)):
        gradients = others.held_gradients(outside, accumulate=accumulate)
        around = dataclasses.replace(outside, gradients=gradients)
        candidates.append(_peak_of_graph(graph, around, others))
    peak = max(candidates, key=lambda memory: memory.allocated)
    margin = OUTSIDE_BYTES[device_type] + int(FRAGMENTATION * peak.allocated)
    return dataclasses.replace(peak, margin=margin)


def outside_of_graphs(held: HeldMemory, recipe: Recipe, device_bytes: int) -> MemoryForecast:
    """Return the memory of a rank outside of its graphs, while the optimizer runs."""
    # Optimizers update in place: they need no memory except their states.
    optimizer_bytes = OPTIMIZERS[recipe.optimizer].states * held.trained
    on_device = MemoryForecast(
        when="optimizer",
        parameters=int(held.parameters),
        gradients=int(held.trained),
        optimizer=int(optimizer_bytes),
        buffers=int(held.buffers),
        device=device_bytes,
    )
    if not recipe.offload:
        return on_device
    # The host receives the gradients of a microbatch before it adds them to the earlier ones.
    copies = 2 if recipe.accumulate > 1 else 1
    host = int(held.parameters + copies * held.trained + optimizer_bytes)
    return dataclasses.replace(on_device, parameters=0, gradients=0, optimizer=0, host=host)


class OtherGraphBytes(NamedTuple):
    """Memory that other graphs of a step hold while one graph runs, in bytes."""

    saved: int  # activations saved by earlier forward graphs
    kept: int  # parameters kept unsharded by earlier forward graphs
    gradients: int  # gradients reduced by earlier backward graphs

    def held_gradients(self, outside: MemoryForecast, *, accumulate: int) -> int:
        """Return the bytes of gradients held while the graph runs, without those it reduces."""
        # Accumulated gradients of all graphs exist already: later ones are added in place.
        return outside.gradients if accumulate > 1 else self.gradients


def other_graph_bytes(graphs: Sequence[PlannedGraph]) -> list[OtherGraphBytes]:
    """Return, for each graph, the memory that the other graphs hold while it runs."""
    # A model with graph breaks has several pairs of a forward and a backward graph, in forward
    # order. The backward graphs run in reverse order.
    saved, kept, own, own_kept, others = 0, 0, 0, 0, list[OtherGraphBytes]()
    for position, graph in enumerate(graphs):
        if graph.problem.graph != GraphKind.BACKWARD:
            others.append(OtherGraphBytes(saved, kept, 0))
            own_kept = graph.kept_bytes[-1] if graph.kept_bytes else 0
            own = graph.problem.fixed_boundary_bytes[-1] - graph.input_bytes - own_kept
        else:
            later = graphs[position + 1 :]
            others.append(OtherGraphBytes(saved, kept, sum(map(_reduced_bytes, later))))
            saved, kept = saved + own, kept + own_kept
    return others


def _reduced_bytes(graph: PlannedGraph) -> int:
    reductions = (t for t in graph.problem.transfers if t.kind.is_reduction)
    return sum(t.shard_bytes for t in reductions if not t.host)


def _peak_of_graph(
    graph: PlannedGraph, outside: MemoryForecast, others: OtherGraphBytes
) -> MemoryForecast:
    kinds = bytes_by_kind(graph)
    alive = list(map(sum, zip(*kinds.values())))
    peak = max(range(len(alive)), key=alive.__getitem__)
    at_peak = {name: num_bytes[peak] for name, num_bytes in kinds.items()}
    at_peak["gradients"] += outside.gradients
    at_peak["activations"] += others.saved
    at_peak["kept"] += others.kept
    return dataclasses.replace(outside, when=str(graph.problem.graph), **at_peak)


def bytes_by_kind(graph: PlannedGraph) -> dict[str, list[int]]:
    """Return a graph's live bytes at each point in time, by kind, without its input shards."""
    problem = graph.problem
    other = fixed_by_point(problem)
    kept = list(graph.kept_bytes) or [0] * len(other)
    nothing = with_fixed_bytes(problem, [0] * len(other))
    gathers = [bucket for bucket in graph.buckets if bucket.kind.is_fetch]
    reductions = [bucket for bucket in graph.buckets if not bucket.kind.is_fetch]
    reducing = alive_by_point(nothing, reductions)
    reduced = sum_spans(
        (
            Span(running(bucket.wait), len(other), problem.transfers[i].shard_bytes)
            for bucket in reductions
            if bucket.kind != TransferKind.ALL_REDUCE_SHARDS
            for i in bucket.transfers
            if not problem.transfers[i].host
        ),
        len(other),
    )
    gradients = list(map(min, reduced, reducing))
    return {
        "activations": [alive - part - graph.input_bytes for alive, part in zip(other, kept)],
        "kept": kept,
        "gathered": alive_by_point(nothing, gathers),
        "reducing": list(map(operator.sub, reducing, gradients)),
        "gradients": gradients,
    }
