"""Chooses what forward saves for backward, before a graph is compiled: ``SchedulePolicy.auto``.

    Dynamo graph ─► AOTAutograd ─► joint graph ─► each way: joint passes, partition, plan ─► best

The first rank tries, and all ranks follow: it depends on a rank's batch and prices. The graph is
then compiled as if the user had asked for what was chosen, so no cache and no plan knows of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    return with_saving(settings, choice.best.saving, choice.budget_gb), table


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
        return plan_ways(self.traced, self.settings, ways, within_gb)


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
    tried = plan_ways(traced, settings, ways, within_gb)
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
