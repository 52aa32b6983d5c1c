"""A forecast as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from .changes import Change
from .forecast import Forecast

GB = 1e9


def forecast_text(forecast: Forecast) -> str:
    """Return a forecast, to be read."""
    rows = list(summary_rows(forecast))
    width = max(len(name) for name, _ in rows)
    head = [f"{name:{width}}  {value}" for name, value in rows]
    parts = [
        "\n".join(head),
        _memory_table(forecast),
        _exposed_table(forecast),
        _changes_table(forecast.changes),
        "To train so:\n\n" + "\n".join(f"    {line}" for line in forecast.code().splitlines()),
        *(f"Assumed: {note}." for note in forecast.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def summary_rows(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Yield names and values of what matters most."""
    recipe, time, memory = forecast.recipe, forecast.time, forecast.memory
    yield "model", f"{forecast.model}, {forecast.num_params / 1e9:.2f} billion parameters"
    yield "cluster", f"{forecast.cluster}, {memory.device / GB:.1f} GB each"
    recomputes = ", each layer recomputed" if recipe.recompute else ""
    steps = f", {recipe.accumulate} microbatches" if recipe.accumulate > 1 else ""
    yield "recipe", f"{recipe.strategy}, {recipe.dtype}, {recipe.optimizer}{recomputes}{steps}"
    per_gpu = forecast.tokens_per_s / forecast.cluster.num_gpus
    yield (
        "step",
        f"{time.step_us / 1e3:,.1f} ms for {forecast.tokens:,} {forecast.unit}: "
        f"{forecast.tokens_per_s:,.0f} a second, {per_gpu:,.0f} on each GPU; "
        f"MFU {forecast.mfu:.1%}",
    )
    yield (
        "of it",
        f"compute {time.compute_us / 1e3:,.1f} ms, exposed communication "
        f"{time.exposed_us / 1e3:,.1f} ms, lost to hidden communication "
        f"{time.lost_us / 1e3:,.1f} ms, optimizer {time.optimizer_us / 1e3:,.1f} ms",
    )
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield (
        "memory",
        f"{memory.total / GB:.1f} of {memory.device / GB:.1f} GB, in {memory.when}: {verdict}",
    )
    yield "bound by", forecast.binds


def _memory_table(forecast: Forecast) -> str:
    memory = forecast.memory
    rows = [[name, size / GB] for name, size in memory.kinds.items()]
    rows += [["margin", memory.margin / GB], ["total", memory.total / GB]]
    return tabulate(rows, ["memory", "GB"], floatfmt=".2f")


def _exposed_table(forecast: Forecast) -> str:
    if not forecast.exposed:
        return ""
    rows = [[exposed.us / 1e3, exposed.what, exposed.why] for exposed in forecast.exposed]
    return tabulate(rows, ["exposed ms", "what", "why"], floatfmt=".2f")


def _changes_table(changes: Sequence[Change]) -> str:
    rows = [
        [
            change.what,
            f"{change.gain:+.1%}",
            change.memory_bytes / GB,
            "" if change.fits else "does not fit",
        ]
        for change in changes
    ]
    return tabulate(rows, ["what would help", "saves", "GB", ""], floatfmt=".1f")
