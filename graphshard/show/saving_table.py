"""Show what ``SchedulePolicy(auto=True)`` tried, as text."""

from __future__ import annotations

from tabulate import tabulate

from ..planning.saving import SavingChoice, TriedSaving


def saving_table(choice: SavingChoice) -> str:
    """Return a table of the candidates: the chosen one, and why the others were not chosen."""
    rows = tabulate(saving_rows(choice), headers="keys", disable_numparse=True)
    return "\n".join([saving_title(choice), "", rows, *choice.notes])


def saving_title(choice: SavingChoice) -> str:
    """Return the title of the table."""
    inputs = f" of inputs of {choice.inputs}" if choice.inputs else ""
    return (
        f"what forward saves for backward{inputs}, within {choice.budget_gb:g} GB, by times that "
        "are predicted of forward and backward"
    )


def saving_rows(choice: SavingChoice) -> list[dict[str, str]]:
    """Return the rows of the table, as dictionaries by column name."""
    best, offloads = choice.best, any(tried.saving.offloads for tried in choice.tried)
    rows = [_row(tried, best) for tried in choice.tried]
    if offloads:
        return rows
    return [{name: row[name] for name in row if name != "on the host"} for row in rows]


def _row(tried: TriedSaving, best: TriedSaving | None) -> dict[str, str]:
    saving, part = tried.saving, tried.saving.activations
    return {
        "activations saved": "as configured" if part is None else f"{part:.0%}",
        "parameters kept": "all" if saving.all_params else "those exposed",
        "on the host": "what does not fit" if saving.offloads else "none",
        "ms": "" if tried.step_us is None else f"{tried.step_us / 1e3:.3f}",
        "peak GB": f"{tried.peak_bytes / 1e9:.3g}",
        "": _verdict(tried, best),
    }


def _verdict(tried: TriedSaving, best: TriedSaving | None) -> str:
    if tried.refused:
        return f"refused: {tried.refused}"
    if tried is best or best is None or best.step_us is None or tried.step_us is None:
        return "taken"
    slower = tried.step_us / best.step_us - 1
    return f"{slower:.1%} slower" if slower > 0 else "as quick, with more memory"
