"""Lists the ways to save things for backward, and picks the quickest that fits.

saved       of activations      ├ all ┤ 3/4 ┤ 1/2 ┤ 1/4 ┤ none ┤   the rest is recomputed
            of parameters       those whose second gather is exposed │ all that are gathered
            on a GPU, on the    what else does not fit │ nothing
            host
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..errors import BackendError

PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Parts of the activations that are saved, in this order; each costs a partition of the graph.

Judged: with fewer, what fits may recompute much more than it has to.
"""


@dataclass(frozen=True)
class Saving:
    """Says what forward saves for backward.

    Attributes:
        activations: the part of them, from 0 to 1; None: as torch's config says.
        all_params: every parameter that both graphs gather stays gathered; False: those that
            ``keep_unsharded`` chooses.
        stows: on a GPU, activations may wait on the host.
    """

    activations: float | None
    all_params: bool
    stows: bool


@dataclass(frozen=True)
class TriedSaving:
    """A way that was planned.

    Attributes:
        step_us: predicted time of forward and backward; None: there is no schedule.
        peak_bytes: of the graph that needs more; where there is no schedule, the least it needs.
        refused: why it cannot be; "": it fits.
    """

    saving: Saving
    step_us: float | None
    peak_bytes: int
    refused: str = ""


@dataclass(frozen=True)
class SavingChoice:
    """The ways that one rank has planned, for all ranks.

    Attributes:
        budget_gb: peak of a graph on one rank.
        tried: in order; none where nothing is differentiated.
        inputs: sizes of the first rank's inputs.
        notes: what was not tried, and why.
        error: why nothing could be planned; "": it could.
    """

    budget_gb: float
    tried: tuple[TriedSaving, ...]
    inputs: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def best(self) -> TriedSaving | None:
        """The quickest that fits, and of those the one with the least memory; None: none does."""
        fitting = [t for t in self.tried if not t.refused]
        return min(fitting, key=lambda t: (t.step_us or 0.0, t.peak_bytes), default=None)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SavingChoice:
        raw = json.loads(text)
        tried = (TriedSaving(**{**t, "saving": Saving(**t["saving"])}) for t in raw["tried"])
        return cls(**{**raw, "tried": tuple(tried), "notes": tuple(raw["notes"])})


class NothingFitsError(BackendError):
    """No way keeps the budget.

    Args:
        table: of all that were tried.
    """

    def __init__(self, choice: SavingChoice, table: str) -> None:
        least = min(t.peak_bytes for t in choice.tried) / 1e9
        super().__init__(
            f"memory_budget_gb={choice.budget_gb:g}: none of the ways that auto=True tries fits; "
            f"the least needs {least:.3f} GB. Give more, or take a smaller batch or more ranks\n"
            f"{table}"
        )


def savings(activations: Sequence[float | None], *, may_stow: bool) -> list[Saving]:
    """Return the ways to try, those that save most first."""
    ways = product(activations, (False, True) if may_stow else (False,), (False, True))
    return [Saving(part, all_params, stows) for part, stows, all_params in ways]


def saves_enough(planned: Sequence[TriedSaving], earlier: Sequence[TriedSaving]) -> bool:
    """Return whether to recompute more than in ``planned`` is not worth a try.

    It is not once that was slower than to recompute less. Where all that fits has activations on
    the host, it may be: less of them wait for their copies.
    """
    alone = [t.step_us for t in earlier if t.step_us is not None and not t.saving.stows]
    quickest = min(alone, default=None)
    times = [t.step_us for t in planned if t.step_us is not None]
    return quickest is not None and bool(times) and min(times) > quickest


def without_repeats(tried: Sequence[TriedSaving]) -> tuple[TriedSaving, ...]:
    """Return those that differ in what they take from the ones before them.

    To allow more is to do the same where nothing more is worth it, or possible.
    """
    first: dict[object, TriedSaving] = {}
    for t in tried:
        first.setdefault((t.saving.activations, t.step_us, t.peak_bytes, t.refused), t)
    return tuple(first.values())
