"""Strategies for saving activations and parameters: which are tried, and which is chosen."""

from __future__ import annotations

import dataclasses

from graphshard.planning.saving import (
    PARTS,
    Saving,
    SavingChoice,
    TriedSaving,
    saves_enough,
    savings,
    without_repeats,
)
from graphshard.show.table import saving_table

ALL, HALF, OFFLOADED = Saving(1.0, True, False), Saving(0.5, False, False), Saving(1.0, False, True)
FITS = TriedSaving(HALF, 2e3, 3_000_000_000)
TOO_LARGE = TriedSaving(ALL, None, 9_000_000_000, "backward needs 9 GB")


def test_savings_are_all_combinations() -> None:
    on_gpu, on_cpu = savings(PARTS, may_offload=True), savings(PARTS, may_offload=False)
    assert len({*on_gpu}) == len(on_gpu) == 4 * len(PARTS) == 2 * len(on_cpu)
    assert [s.activations for s in on_cpu] == [part for part in PARTS for _ in range(2)]
    assert not any(s.offloads for s in on_cpu)


def test_fastest_strategy_that_fits_is_chosen() -> None:
    quicker = dataclasses.replace(FITS, step_us=1e3)
    smaller = dataclasses.replace(quicker, peak_bytes=1)
    assert SavingChoice(5, (TOO_LARGE, FITS, quicker)).best is quicker
    assert SavingChoice(5, (quicker, smaller, FITS)).best is smaller
    assert SavingChoice(5, (TOO_LARGE,)).best is None


def test_choice_survives_json() -> None:
    choice = SavingChoice(5.5, (TOO_LARGE, FITS), "16x24", ("Not tried: this.",))
    assert SavingChoice.from_json(choice.to_json()) == choice


def test_strategies_with_same_result_are_shown_once() -> None:
    as_quick = TriedSaving(dataclasses.replace(HALF, all_params=True), FITS.step_us, 3_000_000_000)
    recomputed = TriedSaving(dataclasses.replace(HALF, activations=0.0), 2e3, 3_000_000_000)
    assert without_repeats([FITS, as_quick, recomputed]) == (FITS, recomputed)


def test_search_ends_once_recomputing_more_is_slower() -> None:
    slower, quicker = (dataclasses.replace(FITS, step_us=us) for us in (3e3, 1e3))
    offloaded = dataclasses.replace(FITS, saving=OFFLOADED)
    assert saves_enough([slower, TOO_LARGE], [FITS])
    assert not saves_enough([slower, quicker], [FITS])
    assert not saves_enough([slower], [TOO_LARGE])  # no earlier strategy fits
    assert not saves_enough([TOO_LARGE], [FITS])
    assert not saves_enough([slower], [offloaded])  # without offloading it may still be faster


def test_table_gives_reasons() -> None:
    slower = TriedSaving(OFFLOADED, 3e3, 4_000_000_000)
    table = saving_table(SavingChoice(5, (TOO_LARGE, FITS, slower), "4x8", ("Not tried: this.",)))
    title, _, head, _, *rows, note = table.splitlines()
    assert "for inputs of 4x8, within 5 GB" in title and "offloaded" in head
    assert note == "Not tried: this."
    assert rows[0].split()[-5:] == ["refused:", "backward", "needs", "9", "GB"]
    assert rows[1].split() == ["50%", "if", "exposed", "none", "2.000", "3", "chosen"]
    assert rows[2].endswith("50.0% slower")
    assert "offloaded" not in saving_table(SavingChoice(5, (FITS,)))
