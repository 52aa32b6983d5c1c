"""Chooses what forward saves for backward, before a graph is compiled: ``SchedulePolicy.auto``.

    Dynamo graph ─► AOTAutograd ─► joint graph ─► each way: joint passes, partition, plan ─► best

The first rank chooses for all ranks. They have to gather alike, so all keep the parameters that it
keeps. How much of the activations is saved shows in no collective: a rank with a larger batch, or
that compiles again while its peers do not, saves less of them where it would exceed the budget.

The graph is then compiled as if the user had asked for what was chosen, so no cache and no plan
knows of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._torch.dynamo import Restart
from .._torch.inductor import has_activation_budget
from ..consensus.plan_consensus import PlanConsensus
from ..cost.device_memory import FRAGMENTED
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
from ..show.dump_folder import DumpWriter
from ..show.saving_table import saving_table
from .plan_savings import plan_ways, with_saving
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

FITS, MAY_FIT, NOTHING_FITS = range(3)
"""Whether a rank keeps the budget: by what was chosen, where fewer parameters are kept, or not."""


class ChosenSaving(NamedTuple):
    """How this rank saves things.

    Attributes:
        settings: with what it saves.
        tried: the table of what was tried; "" if nothing.
        context: what ranks have chosen; plans that they share depend on it.
    """

    settings: CompileSettings
    tried: str
    context: str


def choose_saving(
    traced: TracedGraph, settings: CompileSettings, consensus: PlanConsensus, writer: DumpWriter
) -> ChosenSaving:
    """Choose what this rank saves.

    Where the policy does not ask for it, or nothing is differentiated, settings stay as they are.

    Raises:
        ValueError: there is no budget, and the device does not say how much memory it has.
        NothingFitsError: no way keeps the budget.
        BackendError: an error was raised on the first rank, or no way keeps the budget on another.
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
        serves=chooser.serves,
        excess=chooser.excess,
    )
    if chooser.raised is not None:
        raise chooser.raised
    if not text:  # the first rank has raised; the compile raises the same on this one
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
    # A later choice is for a larger batch, and is no reason to follow the plans of an earlier one.
    return ChosenSaving(settings, saving_table(choice), f"{unchosen.context} {text}")


@dataclass
class _Chooser:
    """Chooses for one graph: on the first rank for all, on others what they save less.

    Attributes:
        raised: what was raised on this rank: also to have Dynamo trace the frame anew. All ranks
            have to raise that, and AOTAutograd raises it once on each of them.
        budget_gb: of earlier choices: what a GPU had free before there were gradients and an
            optimizer's state.
        own: what this rank has tried for itself; None: it saves what the first rank does.
    """

    traced: TracedGraph
    settings: CompileSettings
    raised: Exception | None = None
    budget_gb: float | None = None
    own: SavingChoice | None = None

    def choose(self, excess: int) -> str:
        """Return a ``SavingChoice``; "" where the frame is traced anew.

        An error is no fault of the call log, behind which nobody could try a smaller batch.

        Args:
            excess: what ``excess`` has returned of the last choice, the largest of all ranks.
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

    def serves(self, text: str) -> bool:
        """Return whether this rank keeps the budget with the parameters of an earlier choice."""
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
        """Return ``FITS`` where this rank keeps the budget by a new choice, or else what may help.

        An error must not leave the other ranks alone in what they do next.
        """
        choice = SavingChoice.from_json(text)
        if choice.best is None:
            return FITS
        self.own = None  # what it was by the last choice
        try:
            if choice.inputs == self.traced.batch_sizes()[0] or self.serves(text):
                return FITS
        except Exception as error:
            self.raised = error
            return FITS
        return MAY_FIT if choice.best.saving.all_params else NOTHING_FITS

    def error_of(self, common: SavingChoice) -> BackendError:
        """Return the error where nothing fits, with the table of the rank where nothing does."""
        failed = self.own if self.own is not None and self.own.best is None else common
        if failed.error:
            return BackendError(failed.error)
        return NothingFitsError(failed, saving_table(failed))

    def _try_all(self, all_params: bool | None) -> SavingChoice:
        """Plan every way on this rank.

        Args:
            all_params: of the ways; None: both.
        """
        traced, settings, budget_gb = self.traced, self.settings, self._budget_gb()
        parts, notes = _parts_to_try(settings)
        may_stow = settings.device.type != "cpu"
        ways = savings(parts, may_stow=may_stow)
        ways = [way for way in ways if all_params in (None, way.all_params)]
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
        tried = self._plan(ways)
        notes += [*_notes_of_parts(ways, tried), *_notes_of_params(traced)]
        if not may_stow:
            notes.append("Not tried: activations on the host, which a CPU has no copy of.")
        return SavingChoice(budget_gb, without_repeats(tried), inputs, tuple(notes))

    def _plan(self, ways: Sequence[Saving]) -> Sequence[TriedSaving]:
        within_gb = _within_gb(self.settings, self._budget_gb())
        return plan_ways(self.traced, self.settings, ways, within_gb)

    def _budget_gb(self) -> float:
        self.budget_gb = self.settings.schedule.memory_budget_gb or self.budget_gb
        if self.budget_gb is None:
            self.budget_gb = _free_gb(self.traced, self.settings.device)
        return self.budget_gb


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


def _within_gb(settings: CompileSettings, budget_gb: float) -> float:
    return budget_gb * (1 - RESERVED if settings.compiler == "inductor" else 1)


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
    states = 2 * sum(shard.nbytes for shard in traced.shards if shard.requires_grad)
    left = free + cached + own - states - int(FRAGMENTED * total)
    return max(left // (STEP * total), 1) * STEP * total / 1e9
