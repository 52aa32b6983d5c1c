"""The most memory that a step needs on a rank, by what it is for: `peak_of_step`.

While a graph runs, what its plan counts is alive, and beside it what the graph does not take: the
other shards, the optimizer's state, buffers and, where microbatches add up, gradients.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cost.device_memory import FRAGMENTED
from ..kinds import GraphKind, TransferKind
from ..planning.live_bytes import alive_by_moment, other_by_moment, with_other_bytes
from ..planning.moments import Span, running, sum_spans
from ..planning.plan import Bucket, Problem
from .interval import MEMORY
from .recipe import OPTIMIZERS, Recipe
from .trace import Held

OUTSIDE_BYTES = {"cuda": 1_300_000_000, "cpu": 500_000_000}
"""What a device holds that no tensor has. A GPU: context and kernels; 1.3 GB are what Hugging
Face's page "Model memory anatomy" measures on a V100; assumed to be the same on others. A CPU: a
process of Python that has compiled a step (benchmarks/results/forecast_cpu.md)."""


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on a rank when it needs most.

    Attributes:
        when: the graph that runs then, or "optimizer".
        parameters: shards, padding included.
        gradients: reduced shards, those of earlier microbatches among them.
        optimizer: its state.
        activations: of the batch, with inputs, results and temporary values.
        gathered: full parameters, and buffers that they travel in.
        reducing: full gradients, and buffers that they travel in.
        buffers: of the model.
        margin: for what is outside of the allocator, and what it cannot hand out.
        device: all that a device has.
        host: what the host keeps for the rank: parameters, gradients and optimizer of ``offload``.
    """

    when: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    reducing: int
    buffers: int
    margin: int
    device: int
    host: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of the device by kind, without the margin."""
        apart = ("when", "margin", "device", "host")
        return {name: value for name, value in vars(self).items() if name not in apart}

    @property
    def allocated(self) -> int:
        """All bytes but the margin: what ``torch.cuda.max_memory_allocated`` counts."""
        return sum(self.kinds.values())

    @property
    def total(self) -> int:
        return self.allocated + self.margin

    @property
    def low(self) -> int:
        """The least bytes that a device would be expected to need: no margin is taken."""
        return int(MEMORY.low * self.allocated)

    @property
    def high(self) -> int:
        """The most bytes that a device would be expected to need: all of the margin is taken."""
        return int(MEMORY.high * self.allocated) + self.margin

    @property
    def fits(self) -> bool:
        return self.total <= self.device


@dataclass(frozen=True)
class PlannedGraph:
    """A graph with its buckets.

    Attributes:
        input_bytes: of the shards that the graph takes; its problem counts them.
    """

    problem: Problem
    buckets: tuple[Bucket, ...]
    input_bytes: int


def peak_of_step(
    graphs: Sequence[PlannedGraph],
    outside: MemoryForecast,
    *,
    accumulate: int,
    device_type: str = "cuda",
) -> MemoryForecast:
    """Return the memory at the moment of a step that needs most.

    Args:
        outside: as of ``outside_of_graphs``.
        accumulate: number of microbatches.
        device_type: a key of ``OUTSIDE_BYTES``.
    """
    earlier = outside.gradients if accumulate > 1 else 0
    candidates = [outside]
    for graph, beside in zip(graphs, beside_graphs(graphs)):
        gradients = earlier + beside.gradients
        candidates.append(_most(graph, dataclasses.replace(outside, gradients=gradients), beside))
    peak = max(candidates, key=lambda memory: memory.allocated)
    margin = OUTSIDE_BYTES[device_type] + int(FRAGMENTED * peak.allocated)
    return dataclasses.replace(peak, margin=margin)


def outside_of_graphs(held: Held, recipe: Recipe, device_bytes: int) -> MemoryForecast:
    """Return the memory while the optimizer runs, which updates in place.

    Args:
        device_bytes: that a device has.
    """
    optimizer_bytes = OPTIMIZERS[recipe.optimizer].states * held.trained
    on_device = MemoryForecast(
        when="optimizer",
        parameters=int(held.parameters),
        gradients=int(held.trained),
        optimizer=int(optimizer_bytes),
        activations=0,
        gathered=0,
        reducing=0,
        buffers=int(held.buffers),
        margin=0,
        device=device_bytes,
    )
    if not recipe.offload:
        return on_device
    # Gradients of a microbatch are copied to the host before they are added to those before.
    copies = 2 if recipe.accumulate > 1 else 1
    host = int(held.parameters + copies * held.trained + optimizer_bytes)
    return dataclasses.replace(on_device, parameters=0, gradients=0, optimizer=0, host=host)


class Beside(NamedTuple):
    """Bytes of other graphs of the step while one of them runs.

    Attributes:
        saved: what the forwards before it have saved.
        gradients: what the backwards that run before its own have reduced.
    """

    saved: int
    gradients: int


def beside_graphs(graphs: Sequence[PlannedGraph]) -> list[Beside]:
    """Return what is beside each graph: one of a pair, forward and backward, in order of forward.

    Where a model has graph breaks, it has several; backwards run in the opposite order.
    """
    saved, own, found = 0, 0, list[Beside]()
    for position, graph in enumerate(graphs):
        if graph.problem.graph != GraphKind.BACKWARD:
            found.append(Beside(saved, 0))
            own = graph.problem.between_bytes[-1] - graph.input_bytes
        else:
            later = graphs[position + 1 :]
            found.append(Beside(saved, sum(map(_reduced_bytes, later))))
            saved += own
    return found


def _reduced_bytes(graph: PlannedGraph) -> int:
    """Return the bytes of reduced gradients that a graph leaves on the device."""
    reductions = (t for t in graph.problem.transfers if t.kind != TransferKind.ALL_GATHER)
    return sum(t.shard_bytes for t in reductions if not t.host)


def _most(graph: PlannedGraph, outside: MemoryForecast, beside: Beside) -> MemoryForecast:
    """Return the memory in the moment of a graph that needs most."""
    parts = parts_by_moment(graph)
    alive = list(map(sum, zip(*parts.values())))
    moment = max(range(len(alive)), key=alive.__getitem__)
    most = {name: by_moment[moment] for name, by_moment in parts.items()}
    most["gradients"] += outside.gradients
    most["activations"] += beside.saved
    return dataclasses.replace(outside, when=str(graph.problem.graph), **most)


def parts_by_moment(graph: PlannedGraph) -> dict[str, list[int]]:
    """Return what is alive in each moment of a graph, by kind, without its shards."""
    problem = graph.problem
    other = other_by_moment(problem)
    nothing = with_other_bytes(problem, [0] * len(other))
    gathers = [bucket for bucket in graph.buckets if _gathers(bucket)]
    reductions = [bucket for bucket in graph.buckets if not _gathers(bucket)]
    reducing = alive_by_moment(nothing, reductions)
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
        "activations": [alive - graph.input_bytes for alive in other],
        "gathered": alive_by_moment(nothing, gathers),
        "reducing": list(map(operator.sub, reducing, gradients)),
        "gradients": gradients,
    }


def _gathers(bucket: Bucket) -> bool:
    return bucket.kind in (TransferKind.ALL_GATHER, TransferKind.COPY_TO_DEVICE)
