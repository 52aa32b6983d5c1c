"""Choose what forward saves for backward, before a graph is compiled: ``SchedulePolicy.auto``.

    Dynamo graph ─► AOTAutograd ─► joint graph ─► each candidate: joint passes, cut, plan ─► best

The first rank chooses for all ranks. All ranks must run the same all-gathers, so all keep the same
parameters unsharded. How many activations a rank saves does not affect its collectives. A rank that
would exceed the budget, because its batch is larger or because it compiles again while its peers do
not, therefore saves fewer of them.

The graph is then compiled as if the user had asked for the chosen candidate, so caches and plans
need no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._torch.dynamo import Restart
from .._torch.inductor import has_activation_budget
from ..cost.device_memory import FRAGMENTATION
from ..errors import BackendError
from ..planning.saving import (
    PARTS,
    NothingFitsError,
    Saving,
    SavingChoice,
    TriedSaving,
    savings,
    without_repeats,
)
from ..ranks.plan_consensus import PlanConsensus
from ..show.dump_folder import DumpWriter
from ..show.saving_table import saving_table
from .plan_savings import plan_candidates, with_saving
from .settings import CompileSettings
from .traced_graph import TracedGraph

RESERVED_FRACTION = 0.1
"""Fraction of the budget reserved for Inductor's own passes, which run after the partitioner.

Measured: they added 10 % to the peak of a GPT of one layer; ATen added nothing. A larger value
saves less than would fit; with a smaller one, the chosen candidate may exceed the budget.
"""

STEP = 0.02
"""Granularity of free memory, as a fraction of a GPU's memory; free memory is rounded down to it.

Free memory is part of cache keys, and differs by some bytes from start to start. Chosen by
judgement: smaller steps recompile after more restarts, larger ones leave more memory unused.
"""

FITS, MAY_FIT, NOTHING_FITS = range(3)
"""Whether a rank fits the budget: as chosen, only with fewer parameters kept, or not at all."""


class ChosenSaving(NamedTuple):
    """What this rank saves for backward.

    Attributes:
        settings: settings that include the choice.
        tried: table of all candidates; "" if none were tried.
        context: description of the choices of the ranks, on which their common plans depend.
    """

    settings: CompileSettings
    tried: str
    context: str


def choose_saving(
    traced: TracedGraph, settings: CompileSettings, consensus: PlanConsensus, writer: DumpWriter
) -> ChosenSaving:
    """Choose what this rank saves.

    The settings stay unchanged if the policy does not ask for a choice, or nothing is trained.

    Raises:
        ValueError: there is no budget, and the device does not report its memory.
        NothingFitsError: no candidate fits the budget.
        BackendError: the first rank raised an error, or no candidate fits on another rank.
    """
    unchosen = ChosenSaving(settings, "", settings.fingerprint())
    if not settings.schedule.auto or not traced.trains():
        return unchosen
    _check_budget(settings)
    names = sorted(name for name in traced.fqns if name)
    chooser = _Chooser(traced, settings)
    text = consensus.common_choice(
        "\n".join(["what forward saves for backward", *names, unchosen.context]),
        chooser.choose,
        traced.groups,
        serves=chooser.fits_earlier_choice,
        excess=chooser.excess,
    )
    if chooser.raised is not None:
        raise chooser.raised
    if not text:  # the first rank raised a Restart; the compile raises it on this rank, too
        return unchosen
    common = SavingChoice.from_json(text)
    if common.best is None and (common.tried or common.error):
        raise chooser.error_of(common)
    choice = chooser.own or common
    if choice.best is None:
        return unchosen
    writer.write_saving(choice)
    saving = choice.best.saving
    settings = with_saving(settings, saving, choice.budget_gb)
    # Plans depend on the choice: a later one, for a larger batch, must not reuse earlier plans.
    return ChosenSaving(settings, saving_table(choice), f"{unchosen.context} {text}")


@dataclass
class _Chooser:
    """Chooses for one graph: the first rank for all ranks, other ranks only to save less.

    Attributes:
        raised: error raised on this rank, or the ``Restart`` that makes Dynamo trace the frame
            again. All ranks must raise a ``Restart``; AOTAutograd raises it once on each of them.
        budget_gb: budget of an earlier choice, such as a GPU's free memory before gradients and
            optimizer states existed; None: not known yet.
        own: candidates that this rank tried for itself; None if it saves what the first rank does.
    """

    traced: TracedGraph
    settings: CompileSettings
    raised: Exception | None = None
    budget_gb: float | None = None
    own: SavingChoice | None = None

    def choose(self, excess: int) -> str:
        """Return a ``SavingChoice`` as JSON; "" if the frame is traced again.

        Errors are returned in the choice. If raised, they would become a fault of the call log,
        after which no rank could try a smaller batch.

        Args:
            excess: largest value that ``excess`` returned on any rank for the last choice.
        """
        if excess == NOTHING_FITS:
            error = "auto=True: on another rank, with a larger batch, nothing fits into the budget"
            return SavingChoice(0.0, (), error=error).to_json()
        try:
            return self._try_all(False if excess == MAY_FIT else None).to_json()
        except Restart as error:
            self.raised = error
            return ""
        except Exception as error:
            self.raised = error
            what = f"auto=True: the first rank could not plan what forward saves: {error!r}"
            return SavingChoice(0.0, (), error=what).to_json()

    def fits_earlier_choice(self, text: str) -> bool:
        """Return whether this rank fits the budget with the parameters kept by an earlier choice.

        If this rank cannot save as many activations as the first rank, ``own`` is set to what it
        tried instead.
        """
        choice, self.own = SavingChoice.from_json(text), None
        self.budget_gb = choice.budget_gb or None
        if choice.best is None:
            nothing_saved = not choice.tried and not choice.error
            return nothing_saved and not self._plan([Saving(None, False, False)])
        saving = choice.best.saving
        if not any(tried.refused for tried in self._plan([saving])):
            return True
        self.own = self._try_all(saving.all_params)
        return self.own.best is not None

    def excess(self, text: str) -> int:
        """Return ``FITS``, ``MAY_FIT`` or ``NOTHING_FITS`` for a new choice on this rank.

        An error is stored instead of raised, because the other ranks wait for this rank's answer.
        """
        choice = SavingChoice.from_json(text)
        if choice.best is None:
            return FITS
        self.own = None  # discard the result for the last choice
        try:
            if choice.inputs == self.traced.batch_sizes()[0] or self.fits_earlier_choice(text):
                return FITS
        except Exception as error:
            self.raised = error
            return FITS
        return MAY_FIT if choice.best.saving.all_params else NOTHING_FITS

    def error_of(self, common: SavingChoice) -> BackendError:
        """Return the error to raise if nothing fits, with the table of a rank that failed."""
        failed = self.own if self.own is not None and self.own.best is None else common
        if failed.error:
            return BackendError(failed.error)
        return NothingFitsError(failed, saving_table(failed))

    def _try_all(self, all_params: bool | None) -> SavingChoice:
        """Plan all candidates on this rank.

        Args:
            all_params: value of ``Saving.all_params`` to try; None: both.
        """
        traced, settings, budget_gb = self.traced, self.settings, self._budget_gb()
        parts, notes = _parts_to_try(settings)
        may_offload = settings.device.type != "cpu"
        candidates = savings(parts, may_offload=may_offload)
        candidates = [c for c in candidates if all_params in (None, c.all_params)]
        within_gb = _within_gb(settings, budget_gb)
        if within_gb < budget_gb:
            notes.append(
                f"Ways have to fit into {within_gb:.3g} GB: Inductor's own passes may add some."
            )
        inputs, varies = traced.batch_sizes()
        if varies:
            notes.append("The graph takes inputs of other sizes, too; larger ones need more.")
        if all_params is not None:
            notes.append("Not tried: to keep other parameters, in which ranks have to agree.")
        tried = self._plan(candidates)
        notes += [*_notes_of_parts(candidates, tried), *_notes_of_params(traced)]
        if not may_offload:
            notes.append("Not tried: activations on the host, which a CPU has no copy of.")
        return SavingChoice(budget_gb, without_repeats(tried), inputs, tuple(notes))

    def _plan(self, candidates: Sequence[Saving]) -> Sequence[TriedSaving]:
        within_gb = _within_gb(self.settings, self._budget_gb())
        return plan_candidates(self.traced, self.settings, candidates, within_gb)

    def _budget_gb(self) -> float:
        self.budget_gb = self.settings.schedule.memory_budget_gb or self.budget_gb
        if self.budget_gb is None:
            self.budget_gb = _free_gb(self.traced, self.settings.device)
        return self.budget_gb


def _check_budget(settings: CompileSettings) -> None:
    """Check that there is a budget, or a device that reports its free memory.

    Raises:
        ValueError: there is neither.
    """
    if settings.schedule.memory_budget_gb is None and settings.device.type != "cuda":
        raise ValueError(
            f"schedule.auto=True without memory_budget_gb: a {settings.device.type} does not say "
            "what a rank may take of its memory; set schedule.memory_budget_gb"
        )


def _within_gb(settings: CompileSettings, budget_gb: float) -> float:
    return budget_gb * (1 - RESERVED_FRACTION if settings.compiler == "inductor" else 1)


def _parts_to_try(settings: CompileSettings) -> tuple[Sequence[float | None], list[str]]:
    asked_for = settings.schedule.activation_memory_budget
    if asked_for is not None:
        return [asked_for], [
            f"Not tried: other parts of the activations than {asked_for:g}, as given."
        ]
    if has_activation_budget():
        note = "Not tried: other parts of the activations than torch._functorch.config says."
        return [None], [note]
    return PARTS, []


def _notes_of_parts(candidates: Sequence[Saving], tried: Sequence[TriedSaving]) -> list[str]:
    if not tried or len(tried) == len(candidates):
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
    """Return the GPU memory available to a graph and its inputs, in GB, rounded down.

    Two values per trained parameter are reserved for an optimizer like Adam, which has no state
    before the first step.
    """
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    inputs = [value for value in traced.inputs if isinstance(value, torch.Tensor)]
    on_device = [tensor for tensor in inputs if tensor.device.type == device.type]
    own = sum(tensor.nbytes for tensor in on_device)
    states = 2 * sum(shard.nbytes for shard in traced.shards if shard.requires_grad)
    left = free + cached + own - states - int(FRAGMENTATION * total)
    return max(left // (STEP * total), 1) * STEP * total / 1e9
