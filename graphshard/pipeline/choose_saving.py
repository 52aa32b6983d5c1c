"""Implement ``SchedulePolicy.auto``: choose what forward saves for backward.

    Dynamo graph ─► AOTAutograd ─► joint graph ─► each candidate: passes, partition, plan ─► best

The first rank chooses for all ranks: they must run the same all-gathers and therefore keep the same
parameters unsharded. How many activations a rank saves does not affect its collectives, so a rank
that would exceed the budget, because its batch is larger or because it recompiles while its peers
do not, saves fewer activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch.dynamo import Restart
from .._torch.inductor import (
    KEEP_HOST_COPIES,
    CustomPartitionerFn,
    aot_autograd,
    has_activation_budget,
    options_of_plans,
    read_partitioned,
)
from ..cost.devices import FRAGMENTATION
from ..errors import BackendError
from ..passes.inline_layers import LayersDiffer
from ..passes.saving import read_partition
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
from ..progress import report
from ..ranks.plan_consensus import PlanConsensus
from ..show.dump_folder import DumpWriter
from ..show.table import saving_table
from .partition import CutGraphs, Partitioner
from .settings import CompileSettings
from .traced_graph import TracedGraph

# Fraction of the budget reserved for Inductor's own passes, which run after the partitioner.
# Measured: they added 10 % to the peak of a GPT of one layer; compiler="aot_eager" added nothing. A
# larger value saves less than would fit; with a smaller one, the chosen candidate may exceed the
# budget.
RESERVED_FRACTION = 0.1

# Free memory is rounded down to a multiple of this fraction of a GPU's memory, because it is part
# of cache keys and varies slightly between runs. Judgement call: with a smaller step, more
# restarts recompile; with a larger one, more memory stays unused.
STEP = 0.02

# Results of ``_Chooser.excess``. ``MAY_FIT``: the rank may fit if fewer parameters are kept.
FITS, MAY_FIT, NOTHING_FITS = range(3)


class ChosenSaving(NamedTuple):
    """This rank's choice of values to save for backward."""

    settings: CompileSettings  # settings that include the choice
    tried: str  # table of all candidates, or ""
    context: str  # settings and choice as text, on which common plans depend
    is_latest: Callable[[], bool] | None = None  # as in ``CommonChoice``; None without a choice


def choose_saving(
    traced: TracedGraph, settings: CompileSettings, consensus: PlanConsensus, writer: DumpWriter
) -> ChosenSaving:
    """Choose what this rank saves if ``SchedulePolicy.auto`` is set and the graph has a backward.

    Raises:
        ValueError: there is no budget, and the device does not report its memory.
        NothingFitsError: no candidate fits the budget.
        BackendError: the first rank raised an error, or no candidate fits on another rank.
    """
    unchosen = ChosenSaving(settings, "", settings.fingerprint())
    if not settings.schedule.auto or not traced.trains():
        return unchosen
    if settings.schedule.memory_budget_gb is None and settings.device.type != "cuda":
        raise ValueError(
            f"schedule.auto=True: device {settings.device.type!r} does not report its free memory; "
            "also set schedule.memory_budget_gb"
        )
    names = sorted(name for name in traced.fqns if name)
    report("comparing what to save for backward")
    chooser = _Chooser(traced, settings)
    text, is_latest = consensus.common_choice(
        "\n".join(["what forward saves for backward", *names, unchosen.context]),
        chooser.choose,
        traced.groups,
        serves=chooser.fits_earlier_choice,
        excess=chooser.excess,
        failed=lambda text: SavingChoice.from_json(text).failed,
    )
    if chooser.raised is not None:
        raise chooser.raised
    if not text:  # the first rank raised an error that the compile raises on this rank, too
        return unchosen
    common = SavingChoice.from_json(text)
    if common.failed:
        raise chooser.error_of(common)
    choice = chooser.own or common
    if choice.best is None:
        return unchosen
    writer.write_saving(choice)
    saving = choice.best.saving
    # As if the user had set this choice in the schedule: caches and plans need no special case.
    settings = settings.with_saving(saving, choice.budget_gb)
    # Plans depend on the choice: a later one, for a larger batch, must not reuse earlier plans.
    return ChosenSaving(settings, saving_table(choice), f"{unchosen.context} {text}", is_latest)


@dataclass
class _Chooser:
    """Chooser of what a graph saves: on the first rank for all; on another, only to save less.

    Attributes:
        raised: error of this rank, ``Restart`` if Dynamo has to trace the frame again,
            ``LayersDiffer`` if the shared layers have to be inlined, or None.
        budget_gb: budget in use, or None if not known yet. An earlier choice's budget is kept:
            gradients and optimizer states may have reduced the GPU's free memory since.
        own: candidates that this rank tried, or None if it follows the first rank.
    """

    traced: TracedGraph
    settings: CompileSettings
    raised: Exception | None = None
    budget_gb: float | None = None
    own: SavingChoice | None = None

    def choose(self, excess: int) -> str:
        """Return a ``SavingChoice`` as JSON, or "" if the graph or its frame is traced again.

        Keeps an error in ``raised`` instead of raising it.

        Args:
            excess: largest value that ``excess`` returned on any rank for the last choice.
        """
        # Errors are part of the choice. If raised, they would be posted in the call log, after
        # which no rank could try a smaller batch.
        if excess == NOTHING_FITS:
            error = (
                "schedule.auto=True: on another rank, with a larger batch, nothing fits into the "
                "budget; use smaller batches, or set a larger schedule.memory_budget_gb"
            )
            return SavingChoice(0.0, (), error=error).to_json()
        try:
            return self._try_all(False if excess == MAY_FIT else None).to_json()
        except (Restart, LayersDiffer) as error:
            # All ranks must raise it: this one after the choice, the others in their own compile.
            self.raised = error
            return ""
        except Exception as error:
            self.raised = error
            what = "schedule.auto=True: the first rank could not plan what forward saves"
            return SavingChoice(0.0, (), error=f"{what}: {error!r}").to_json()

    def fits_earlier_choice(self, text: str) -> bool:
        """Return whether this rank fits the budget with the parameters that a choice keeps.

        If there was no backward graph to choose for, return whether this rank has none either.
        Adopts the budget of the choice, and sets ``own`` if this rank cannot save as many
        activations as the first rank.
        """
        choice, self.own = SavingChoice.from_json(text), None
        self.budget_gb = choice.budget_gb or None
        if choice.best is None:
            return not choice.failed and not self._plan([Saving(None, False, False)])
        saving = choice.best.saving
        if not any(tried.refused for tried in self._plan([saving])):
            return True
        self.own = self._try_all(saving.all_params)
        return self.own.best is not None

    def excess(self, text: str) -> int:
        """Return ``FITS``, ``MAY_FIT`` or ``NOTHING_FITS`` for this rank under a new choice.

        Keeps an error in ``raised`` instead of raising it, and returns ``FITS``.
        """
        choice = SavingChoice.from_json(text)
        if choice.best is None:
            return FITS
        self.own = None  # discard the result for the last choice
        try:
            if choice.inputs == self.traced.batch_sizes()[0] or self.fits_earlier_choice(text):
                return FITS
        except Exception as error:
            self.raised = error  # raised later, because the other ranks wait for the answer
            return FITS
        return MAY_FIT if choice.best.saving.all_params else NOTHING_FITS

    def error_of(self, common: SavingChoice) -> BackendError:
        """Return the first rank's error or, if nothing fits, a ``NothingFitsError``."""
        failed = self.own if self.own is not None and self.own.best is None else common
        if failed.error:
            return BackendError(failed.error)
        return NothingFitsError(failed, saving_table(failed))

    def _try_all(self, all_params: bool | None) -> SavingChoice:
        """Plan the candidates on this rank, or only those with the given ``all_params``."""
        settings, budget_gb, within_gb = self.settings, self._budget_gb(), self._within_gb()
        parts, notes = _parts_to_try(settings)
        may_offload = settings.device.type != "cpu"
        candidates = savings(parts, may_offload=may_offload)
        candidates = [c for c in candidates if all_params in (None, c.all_params)]
        inputs, varies = self.traced.batch_sizes()
        tried = self._plan(candidates)
        if within_gb < budget_gb:
            notes.append(
                f"Candidates must fit into {within_gb:.3g} GB; the rest of the budget is reserved "
                "for Inductor's own passes."
            )
        if varies:
            notes.append("The graph accepts other input sizes; larger inputs need more memory.")
        if all_params is not None:
            notes.append("Not tried: kept parameters that differ from those of the first rank.")
        if tried and len(tried) < len(candidates):
            least = tried[-1].saving.activations
            notes.append(
                f"Not tried: saving less than {least:.0%} of the activations, since {least:.0%} "
                "was already slower."
            )
        if settings.regathered:
            notes.append(
                f"Not kept by 'all': {len(settings.regathered)} parameters whose overrides set "
                "reshard_after_forward."
            )
        if not may_offload:
            notes.append("Not tried: offloading activations, which are already in host memory.")
        return SavingChoice(budget_gb, without_repeats(tried), inputs, tuple(notes))

    def _plan(self, candidates: Sequence[Saving]) -> Sequence[TriedSaving]:
        return _plan_candidates(self.traced, self.settings, candidates, self._within_gb())

    def _budget_gb(self) -> float:
        self.budget_gb = self.settings.schedule.memory_budget_gb or self.budget_gb
        if self.budget_gb is None:
            self.budget_gb = _free_gb(self.traced, self.settings.device)
        return self.budget_gb

    def _within_gb(self) -> float:
        reserved = RESERVED_FRACTION if self.settings.compiler == "inductor" else 0
        return self._budget_gb() * (1 - reserved)


def _parts_to_try(settings: CompileSettings) -> tuple[Sequence[float | None], list[str]]:
    """Return the fractions of activations to try saving, and notes for the table.

    If the user has set a fraction, only that is tried; None stands for torch's own setting.
    """
    budget = settings.schedule.activation_memory_budget
    if budget is not None:
        return [budget], [f"Tried only the given activation_memory_budget, {budget:g}."]
    if has_activation_budget():
        return [None], ["Tried only the activation budget in torch._functorch.config."]
    return PARTS, []


def _free_gb(traced: TracedGraph, device: torch.device) -> float:
    """Return the GPU memory available to a graph and its inputs, in GB, rounded down."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    own = sum(tensor.nbytes for tensor in traced.tensors if tensor.device.type == device.type)
    states = traced.future_state_bytes(device)
    left = free + cached + own - states - int(FRAGMENTATION * total)
    return max(left // (STEP * total), 1) * STEP * total / 1e9


# --- planning candidates on one rank --------------------------------------------------------------


def _plan_candidates(
    traced: TracedGraph, settings: CompileSettings, candidates: Sequence[Saving], within_gb: float
) -> Sequence[TriedSaving]:
    """Trace a graph up to its joint graph, and plan candidates until saving less is slower.

    Return [] if there is no joint graph.
    """
    trials = _Trials([settings.with_saving(saving, within_gb) for saving in candidates])
    if settings.compiler == "aot_eager":
        trace = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=trials)
        trace(traced.gm, traced.inputs)
        return trials.tried
    options = {
        **options_of_plans(settings.device),
        **traced.inductor_options,
        **(KEEP_HOST_COPIES if settings.device.type != "cpu" else {}),
        "custom_partitioner_fn": trials,
    }
    read_partitioned(traced.gm, traced.inputs, None, options)
    return trials.tried


class _Trials(CustomPartitionerFn):
    """Partitioner that plans a copy of a joint graph per candidate, until saving less is slower."""

    def __init__(self, candidates: Sequence[CompileSettings]) -> None:
        self._candidates = candidates
        self.tried: list[TriedSaving] = []

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.tried = []
        for _, candidates in itertools.groupby(
            self._candidates, key=lambda c: c.schedule.activation_memory_budget
        ):
            planned = []
            # Cutting takes longest, and does not depend on which parameters are kept.
            cuts: dict[bool, CutGraphs] = {}
            for settings in candidates:
                partitioner = Partitioner(settings, DumpWriter())
                offloads = settings.may_offload_activations
                if offloads not in cuts:
                    cuts[offloads] = partitioner.cut(_copy(gm), joint_inputs, **kwargs)
                cut = cuts[offloads]
                copied = cut._replace(forward=_copy(cut.forward), backward=_copy(cut.backward))
                parts = partitioner.save(copied)
                planned.append(_plan(parts, settings))
            is_slower = saves_enough(planned, self.tried)
            self.tried += planned
            if is_slower:
                break
        return parts  # any pair will do: nothing is compiled

    def uuid(self) -> bytes | None:
        return None


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph like ``copy.deepcopy``, but without its ``CodeGen``."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def _plan(parts: tuple[fx.GraphModule, fx.GraphModule], settings: CompileSettings) -> TriedSaving:
    saving, budget = settings.saving, settings.schedule.limits().peak
    assert saving is not None and budget is not None
    context, cost_model = settings.pass_context(), settings.cost_model()
    forward, context.backward = parts
    step_us, peak_bytes, refused = 0.0, 0, ""
    for read in read_partition(forward, context):
        problem = read.problem
        try:
            buckets = settings.plan_buckets(problem, (), cost_model, refine=False)
        except BudgetError as error:
            needed = error.needed
        else:
            timeline = simulate(problem, buckets, cost_model)
            step_us += timeline.total_us + timeline.slowdown_us
            needed = timeline.peak_bytes
        peak_bytes = max(peak_bytes, needed)
        if needed > budget:
            refused = refused or f"{problem.graph} needs {needed / 1e9:.3g} GB"
    return TriedSaving(saving, None if refused else step_us, peak_bytes, refused)
