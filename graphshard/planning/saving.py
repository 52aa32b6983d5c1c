"""List strategies for saving values for backward, and pick the fastest that fits.

The strategies are all combinations of:

    activations saved        all │ 3/4 │ 1/2 │ 1/4 │ none       the rest is recomputed
    parameters kept          those whose second gather is exposed │ all that both graphs gather
    offloaded, on a GPU      activations that do not fit otherwise │ nothing
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..errors import BackendError

# Fractions of the activations to save, in the order tried; each costs a partition of the graph.
# Judgement call: with fewer, the strategy that fits may recompute much more than necessary.
PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Saving:
    """A strategy for saving values in forward for backward.

    Attributes:
        activations: fraction of the activations to save, from 0 to 1, or None for
            ``torch._functorch.config.activation_memory_budget``.
        all_params: whether all parameters that both graphs gather stay unsharded, instead of only
            those that ``keep_unsharded`` chooses.
        offloads: whether activations that do not fit otherwise are offloaded to the host.
    """

    activations: float | None
    all_params: bool
    offloads: bool


@dataclass(frozen=True)
class TriedSaving:
    """A strategy that was planned.

    Attributes:
        step_us: predicted time of forward and backward, or None if ``refused``.
        peak_bytes: higher peak of the two graphs; a graph that cannot fit the budget counts with
            the smallest peak of any schedule.
        refused: reason why the strategy does not fit, or "".
    """

    saving: Saving
    step_us: float | None
    peak_bytes: int
    refused: str = ""


@dataclass(frozen=True)
class SavingChoice:
    """Strategies for saving values for backward, as planned by one rank for a graph.

    Attributes:
        budget_gb: maximum peak of a graph on one rank; 0 after an error.
        tried: strategies in the order tried, without those that had the same result as an earlier
            one with the same ``activations``; empty after an error or without a backward graph.
        inputs: description of the graph's inputs, for the title of the table.
        notes: remarks for the table, such as which strategies were not tried, and why.
        error: reason why the first rank could not choose, or "".
    """

    budget_gb: float
    tried: tuple[TriedSaving, ...]
    inputs: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def best(self) -> TriedSaving | None:
        """The fastest strategy that fits, ties broken by memory, or None if no strategy fits."""
        fitting = [t for t in self.tried if not t.refused]
        return min(fitting, key=lambda t: (t.step_us or 0.0, t.peak_bytes), default=None)

    @property
    def failed(self) -> bool:
        """Whether no strategy fits, or the first rank raised an error."""
        return self.best is None and bool(self.tried or self.error)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SavingChoice:
        raw = json.loads(text)
        tried = tuple(TriedSaving(**{**t, "saving": Saving(**t["saving"])}) for t in raw["tried"])
        return cls(**{**raw, "tried": tried, "notes": tuple(raw["notes"])})


class NothingFitsError(BackendError):
    """Raised when no strategy fits the memory budget; shows a table of tried strategies."""

    def __init__(self, choice: SavingChoice, table: str) -> None:
        least = min(t.peak_bytes for t in choice.tried) / 1e9
        super().__init__(
            f"memory_budget_gb={choice.budget_gb:g} (if not set, free GPU memory): no strategy "
            f"that auto=True tries fits; the smallest needs {least:.3f} GB. Raise the budget, or "
            f"use a smaller batch or more ranks\n{table}"
        )


def savings(activations: Sequence[float | None], *, may_offload: bool) -> list[Saving]:
    """Return the strategies to try, grouped by the fraction of the activations that they save."""
    offload = (False, True) if may_offload else (False,)
    return [
        Saving(part, all_params, offloads)
        for part, offloads, all_params in product(activations, offload, (False, True))
    ]


def saves_enough(planned: Sequence[TriedSaving], earlier: Sequence[TriedSaving]) -> bool:
    """Return whether strategies that recompute more can be skipped.

    They can if the fastest of ``planned`` is slower than the fastest of ``earlier`` that does not
    offload.
    """
    # Earlier strategies with offloading do not count: there, recomputing more may still be faster,
    # because fewer activations wait for their copies.
    alone = [t.step_us for t in earlier if t.step_us is not None and not t.saving.offloads]
    times = [t.step_us for t in planned if t.step_us is not None]
    return bool(alone and times) and min(times) > min(alone)


def without_repeats(tried: Sequence[TriedSaving]) -> tuple[TriedSaving, ...]:
    """Drop strategies with the same ``activations`` and result as an earlier one."""
    # A strategy that may keep or offload more has the same result if doing so is impossible or
    # saves no time.
    first: dict[object, TriedSaving] = {}
    for t in tried:
        first.setdefault((t.saving.activations, t.step_us, t.peak_bytes, t.refused), t)
    return tuple(first.values())
