"""Chooses what forward saves for backward, before a graph is compiled: ``SchedulePolicy.auto``.

    Dynamo graph ─► AOTAutograd ─► joint graph ─► each way: joint passes, partition, plan ─► best

The first rank tries, and all ranks follow: it depends on a rank's batch and prices. The graph is
then compiled as if the user had asked for what was chosen, so no cache and no plan knows of this.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import passes
from .._torch.dynamo import Restart
from .._torch.inductor import (
    KEEP_HOST_COPIES,
    CustomPartitionerFn,
    aot_autograd,
    compile_without_code,
    compiles_nothing,
    decompositions_for,
    has_activation_budget,
    options_of_plans,
)
from ..consensus.plan_consensus import PlanConsensus
from ..cost.device_memory import FRAGMENTED
from ..errors import BackendError
from ..planning.saving import (
    PARTS,
    NothingFitsError,
    Saving,
    SavingChoice,
    TriedSaving,
    saves_enough,
    savings,
    without_repeats,
)
from ..planning.search import BudgetError
from ..planning.simulate import simulate
from ..show.dump_folder import DumpWriter
from ..show.saving_table import saving_table
from .partition import Partitioner
from .settings import CompileSettings
from .traced_graph import TracedGraph

RESERVED = 0.1
"""Part of the budget that ways leave free by Inductor, whose own passes come behind the partition.

Measured: they added 10 % to the peak of a GPT of one layer, and nothing by ATen. If it is larger,
less is saved than could be; if smaller, the way that is taken may exceed the budget in the end.
"""

STEP = 0.02
"""Part of a GPU's memory, to a multiple of which what is free is rounded down.

It is in the keys of caches, and no two starts have the same number of bytes free. Judged: with
smaller steps a restart compiles anew more often, with larger ones more memory is left unused.
"""


def choose_saving(
    traced: TracedGraph, settings: CompileSettings, consensus: PlanConsensus, writer: DumpWriter
) -> tuple[CompileSettings, str]:
    """Return settings with what all ranks save, and the table of what was tried.

    Where the policy does not ask for it, or nothing is differentiated, settings stay as they are.
    A later graph of the same parameters saves what was chosen for an earlier one where it keeps the
    budget so. A rank may compile such a graph while its peers do not, and has to gather as they do.

    Raises:
        ValueError: there is no budget, and the device does not say how much memory it has.
        NothingFitsError: no way keeps the budget.
        BackendError: the first rank has raised an error.
    """
    if not settings.schedule.auto or not _trains(traced.inputs):
        return settings, ""
    _check_budget(settings)
    names = sorted(name for name in traced.fqns if name)
    chooser = _Chooser(traced, settings)
    text = consensus.common_choice(
        "\n".join(["what forward saves for backward", *names, settings.fingerprint()]),
        chooser.choose,
        traced.groups,
        serves=chooser.serves,
    )
    if chooser.raised is not None:
        raise chooser.raised
    if not text:  # the first rank has raised; the compile raises the same on this one
        return settings, ""
    choice = SavingChoice.from_json(text)
    if choice.error:
        raise BackendError(f"the first rank could not plan what forward saves: {choice.error}")
    if not choice.tried:
        return settings, ""
    writer.write_saving(choice)
    table = saving_table(choice)
    if choice.best is None:
        raise NothingFitsError(choice, table)
    return _with_saving(settings, choice.best.saving, choice.budget_gb), table


@dataclass
class _Chooser:
    """Chooses for a graph, on the first rank.

    Attributes:
        raised: what was raised on this rank: also to have Dynamo trace the frame anew. All ranks
            have to raise that, and AOTAutograd raises it once on each of them.
        budget_gb: of earlier choices: what a GPU had free before there were gradients and an
            optimizer's state.
    """

    traced: TracedGraph
    settings: CompileSettings
    raised: Exception | None = None
    budget_gb: float | None = None

    def choose(self) -> str:
        """Return a ``SavingChoice``; "" where the frame is traced anew.

        An error is no fault of the call log, behind which nobody could try a smaller batch.
        """
        try:
            return _try_all(self.traced, self.settings, self.budget_gb).to_json()
        except Restart as error:
            self.raised = error
            return ""
        except Exception as error:
            self.raised = error
            return SavingChoice(0.0, (), error=repr(error)).to_json()

    def serves(self, text: str) -> bool:
        """Return whether this rank's graph keeps the budget by an earlier choice."""
        choice = SavingChoice.from_json(text)
        if choice.error:
            return False
        self.budget_gb = choice.budget_gb
        if choice.best is None:
            return not choice.tried and not self._plan([Saving(None, False, False)])
        return not any(tried.refused for tried in self._plan([choice.best.saving]))

    def _plan(self, ways: Sequence[Saving]) -> Sequence[TriedSaving]:
        assert self.budget_gb is not None
        within_gb = _within_gb(self.settings, self.budget_gb)
        return _plan_ways(self.traced, self.settings, ways, within_gb)


def _trains(inputs: Sequence[object]) -> bool:
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check_budget(settings: CompileSettings) -> None:
    """
    Raises:
        ValueError: there is neither a budget nor a device with memory of its own.
    """
    if settings.schedule.memory_budget_gb is None and settings.device.type != "cuda":
        raise ValueError(
            f"schedule.auto=True without memory_budget_gb: a {settings.device.type} does not say "
            "what a rank may take of its memory; set schedule.memory_budget_gb"
        )


def _with_saving(settings: CompileSettings, saving: Saving, budget_gb: float) -> CompileSettings:
    """Return settings as of a user who asks for ``saving`` himself."""
    schedule = dataclasses.replace(
        settings.schedule,
        auto=False,
        activation_memory_budget=saving.activations,
        memory_budget_gb=budget_gb,
    )
    return dataclasses.replace(settings, schedule=schedule, saving=saving)


def _try_all(
    traced: TracedGraph, settings: CompileSettings, budget_gb: float | None
) -> SavingChoice:
    """Plan every way on this rank."""
    budget_gb = settings.schedule.memory_budget_gb or budget_gb
    if budget_gb is None:
        budget_gb = _free_gb(traced, settings.device)
    parts, notes = _parts_to_try(settings)
    may_stow = settings.device.type != "cpu"
    ways, within_gb = savings(parts, may_stow=may_stow), _within_gb(settings, budget_gb)
    if within_gb < budget_gb:
        notes.append(
            f"Ways have to fit into {within_gb:.3g} GB: Inductor's own passes may add some."
        )
    tried = _plan_ways(traced, settings, ways, within_gb)
    notes = [*_notes_of_sizes(traced), *notes, *_notes_of_parts(ways, tried)]
    notes += _notes_of_params(traced)
    if not may_stow:
        notes.append("Not tried: activations on the host, which a CPU has no copy of.")
    return SavingChoice(budget_gb, without_repeats(tried), tuple(notes))


def _within_gb(settings: CompileSettings, budget_gb: float) -> float:
    return budget_gb * (1 - RESERVED if settings.compiler == "inductor" else 1)


def _notes_of_sizes(traced: TracedGraph) -> list[str]:
    sizes, varies = traced.batch_sizes()
    if not sizes:
        return []
    others = "; the graph takes other sizes, too, and larger ones need more" if varies else ""
    return [f"Planned for inputs of {sizes}, as on the first rank{others}."]


def _parts_to_try(settings: CompileSettings) -> tuple[Sequence[float | None], list[str]]:
    given = settings.schedule.activation_memory_budget
    if given is not None:
        return [given], [f"Not tried: other parts of the activations than {given:g}, as given."]
    if has_activation_budget():
        note = "Not tried: other parts of the activations than torch._functorch.config says."
        return [None], [note]
    return PARTS, []


def _notes_of_parts(ways: Sequence[Saving], tried: Sequence[TriedSaving]) -> list[str]:
    if not tried or len(tried) == len(ways):
        return []
    least = tried[-1].saving.activations
    return [
        f"Not tried: to save less than {least:.0%} of the activations; that was slower already."
    ]


def _notes_of_params(traced: TracedGraph) -> list[str]:
    if not traced.regathered:
        return []
    return [
        f"Not kept by 'all': {len(traced.regathered)} parameters for which overrides say "
        "reshard_after_forward."
    ]


def _free_gb(traced: TracedGraph, device: torch.device) -> float:
    """Return the memory that a GPU has for a graph, its inputs among it, in GB, rounded down.

    An optimizer like Adam, which has no state before the first step, will have two numbers for each
    parameter that is trained.
    """
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    inputs = [value for value in traced.inputs if isinstance(value, torch.Tensor)]
    on_device = [tensor for tensor in inputs if tensor.device.type == device.type]
    own = sum(tensor.nbytes for tensor in on_device)
    states = 2 * sum(shard.nbytes for shard in traced.params() if shard.requires_grad)
    left = free + cached + own - states - int(FRAGMENTED * total)
    return max(left // (STEP * total), 1) * STEP * total / 1e9


def _plan_ways(
    traced: TracedGraph, settings: CompileSettings, ways: Sequence[Saving], within_gb: float
) -> Sequence[TriedSaving]:
    """Plan some ways; none where there is no joint graph."""
    trials = _Trials([_with_saving(settings, saving, within_gb) for saving in ways])
    _partition(traced, settings, trials)
    return trials.tried


def _partition(traced: TracedGraph, settings: CompileSettings, trials: _Trials) -> None:
    """Trace a graph up to its joint graph, hand that to ``trials``, and compile nothing."""
    if settings.compiler == "aot_eager":
        aot_autograd(fw_compiler=compiles_nothing, partition_fn=trials)(traced.gm, traced.inputs)
        return
    options: dict[str, Any] = {
        **options_of_plans(settings.device),
        **traced.inductor_options,
        **(KEEP_HOST_COPIES if settings.device.type != "cpu" else {}),
        "custom_partitioner_fn": trials,
    }
    decompositions = decompositions_for(traced.inputs)
    compile_without_code(
        traced.gm, traced.inputs, options, decompositions, inner_compile=compiles_nothing
    )


class _Trials(CustomPartitionerFn):
    """Partitions and plans copies of a joint graph in several ways.

    Attributes:
        tried: the ways, in the order of the settings; none before there was a joint graph.
    """

    def __init__(self, ways: Sequence[CompileSettings]) -> None:
        self._ways = ways
        self.tried: list[TriedSaving] = []

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.tried = []
        for _, ways in itertools.groupby(self._ways, key=_activations):
            planned = []
            for settings, parts in _partitioned(gm, joint_inputs, list(ways), **kwargs):
                planned.append(_plan(parts, settings))
            is_slower = saves_enough(planned, self.tried)
            self.tried += planned
            if is_slower:
                break
        return parts  # some: nothing is compiled

    def uuid(self) -> bytes | None:
        return None


def _activations(settings: CompileSettings) -> float | None:
    return settings.schedule.activation_memory_budget


def _partitioned(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    ways: Sequence[CompileSettings],
    **kwargs: Any,
) -> Iterator[tuple[CompileSettings, tuple[fx.GraphModule, fx.GraphModule]]]:
    """Yield each way with the forward and backward graph that it has of a joint graph.

    To cut takes longest, and what parameters are kept does not matter to it.
    """
    by_stows = itertools.groupby(ways, key=lambda settings: settings.may_offload_activations)
    for _, alike in by_stows:
        cut = None
        for settings in alike:
            partitioner = Partitioner(settings, DumpWriter())
            cut = cut or partitioner.cut(_copy(gm), joint_inputs, **kwargs)
            copied = cut._replace(forward=_copy(cut.forward), backward=_copy(cut.backward))
            yield settings, partitioner.save(copied)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph, as ``copy.deepcopy`` does it, but for how its code takes inputs."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def _plan(parts: tuple[fx.GraphModule, fx.GraphModule], settings: CompileSettings) -> TriedSaving:
    """Plan a forward and a backward graph."""
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
        step_us += timeline.total_us + timeline.lost_us
        peak_bytes = max(peak_bytes, timeline.peak_bytes)
        if timeline.peak_bytes > budget:
            refused = refused or f"{problem.graph} needs {timeline.peak_bytes / 1e9:.3g} GB"
    return TriedSaving(saving, None if refused else step_us, peak_bytes, refused)
