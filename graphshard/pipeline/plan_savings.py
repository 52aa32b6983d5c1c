"""Plan a graph under several candidates for what forward saves, without compiling it.

joint graph ─► for each candidate: joint passes, partition, plan of forward and of backward
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from .. import passes
from .._torch.inductor import (
    KEEP_HOST_COPIES,
    CustomPartitionerFn,
    aot_autograd,
    compile_without_code,
    decompositions_for,
    options_of_plans,
    stub_compiler,
)
from ..planning.saving import Saving, TriedSaving, saves_enough
from ..planning.search import BudgetError
from ..planning.simulate import simulate
from ..show.dump_folder import DumpWriter
from .partition import Partitioner
from .settings import CompileSettings
from .traced_graph import TracedGraph


def with_saving(settings: CompileSettings, saving: Saving, budget_gb: float) -> CompileSettings:
    """Return the settings of a user who asks for ``saving`` explicitly."""
    schedule = dataclasses.replace(
        settings.schedule,
        auto=False,
        activation_memory_budget=saving.activations,
        memory_budget_gb=budget_gb,
    )
    return dataclasses.replace(settings, schedule=schedule, saving=saving)


def plan_candidates(
    traced: TracedGraph, settings: CompileSettings, candidates: Sequence[Saving], within_gb: float
) -> Sequence[TriedSaving]:
    """Plan each candidate in ``candidates``; the result is empty if there is no joint graph."""
    trials = _Trials([with_saving(settings, saving, within_gb) for saving in candidates])
    _partition(traced, settings, trials)
    return trials.tried


def _partition(traced: TracedGraph, settings: CompileSettings, trials: _Trials) -> None:
    """Trace a graph up to its joint graph and pass that to ``trials``; compile nothing."""
    if settings.compiler == "aot_eager":
        aot_autograd(fw_compiler=stub_compiler, partition_fn=trials)(traced.gm, traced.inputs)
        return
    options: dict[str, Any] = {
        **options_of_plans(settings.device),
        **traced.inductor_options,
        **(KEEP_HOST_COPIES if settings.device.type != "cpu" else {}),
        "custom_partitioner_fn": trials,
    }
    decompositions = decompositions_for(traced.inputs)
    compile_without_code(
        traced.gm, traced.inputs, options, decompositions, inner_compile=stub_compiler
    )


class _Trials(CustomPartitionerFn):
    """Partitions and plans copies of a joint graph, once for each candidate.

    Attributes:
        tried: planned candidates, in the order of the settings; empty if there is no joint graph.
    """

    def __init__(self, candidates: Sequence[CompileSettings]) -> None:
        self._candidates = candidates
        self.tried: list[TriedSaving] = []

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.tried = []
        for _, candidates in itertools.groupby(self._candidates, key=_activations):
            planned = []
            for settings, parts in _partitioned(gm, joint_inputs, list(candidates), **kwargs):
                planned.append(_plan(parts, settings))
            is_slower = saves_enough(planned, self.tried)
            self.tried += planned
            if is_slower:
                break
        return parts  # any pair will do: nothing is compiled

    def uuid(self) -> bytes | None:
        return None


def _activations(settings: CompileSettings) -> float | None:
    return settings.schedule.activation_memory_budget


def _partitioned(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    candidates: Sequence[CompileSettings],
    **kwargs: Any,
) -> Iterator[tuple[CompileSettings, tuple[fx.GraphModule, fx.GraphModule]]]:
    """Yield the settings of each candidate with its forward and backward graph.

    Cutting the joint graph takes longest and does not depend on which parameters stay unsharded,
    so candidates that differ only in that share one cut.
    """
    by_offload = itertools.groupby(
        candidates, key=lambda settings: settings.may_offload_activations
    )
    for _, alike in by_offload:
        cut = None
        for settings in alike:
            partitioner = Partitioner(settings, DumpWriter())
            cut = cut or partitioner.cut(_copy(gm), joint_inputs, **kwargs)
            copied = cut._replace(forward=_copy(cut.forward), backward=_copy(cut.backward))
            yield settings, partitioner.save(copied)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph as ``copy.deepcopy`` does, except for how its generated code takes inputs."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def _plan(parts: tuple[fx.GraphModule, fx.GraphModule], settings: CompileSettings) -> TriedSaving:
    """Plan the forward and the backward graph of one candidate."""
    saving, cost_model = settings.saving, settings.cost_model()
    budget = settings.schedule.limits().peak
    assert saving is not None and budget is not None
    forward, backward = parts
    step_us, peak_bytes, refused = 0.0, 0, ""
    for read in passes.read_partition(forward.graph, backward.graph, cost_model):
        problem = read.problem
        try:
            buckets = settings.plan_buckets(problem, (), cost_model, refine=False)
        except BudgetError as error:
            refused = refused or f"{problem.graph} needs {error.needed / 1e9:.3g} GB"
            peak_bytes = max(peak_bytes, error.needed)
            continue
        timeline = simulate(problem, buckets, cost_model)
        step_us += timeline.total_us + timeline.slowdown_us
        peak_bytes = max(peak_bytes, timeline.peak_bytes)
        if timeline.peak_bytes > budget:
            refused = refused or f"{problem.graph} needs {timeline.peak_bytes / 1e9:.3g} GB"
    return TriedSaving(saving, None if refused else step_us, peak_bytes, refused)
