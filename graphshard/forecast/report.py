"""Show a forecast as text and as an HTML page, and other results as tables of that page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from ..cost.hardware import CALIBRATED, DATASHEET
from ..show.page import BytesData, GraphData, TableData, graph_data, page, page_data
from .estimate import PlannedGraph, bytes_by_kind, other_graph_bytes, outside_of_graphs

if TYPE_CHECKING:
    from .forecast import Forecast

GB = 1e9


def forecast_text(forecast: Forecast) -> str:
    """Return a forecast as text."""
    rows = list(summary_rows(forecast))
    width = max(len(name) for name, _ in rows)
    exposed = [[one.us / 1e3, one.what, one.why] for one in forecast.exposed]
    headers = ["exposed ms", "collective", "reason"]
    parts = [
        "\n".join(f"{name:{width}}  {value}" for name, value in rows),
        tabulate(_memory_rows(forecast), ["memory", "GB"], floatfmt=".2f"),
        tabulate(exposed, headers, floatfmt=".2f") if exposed else "",
        tabulate(_change_rows(forecast), ["what would help", *_CHANGE_HEADERS], floatfmt=".1f"),
        "Code:\n\n" + "\n".join(f"    {line}" for line in forecast.code().splitlines()),
        *(f"Assumed: {note}." for note in forecast.notes),
    ]
    return "\n\n".join(part for part in parts if part)


_INTERVALS = {
    DATASHEET: "measured steps of compiled models were within it",
    CALIBRATED: "measured steps on calibrated machines were within it",
}


def summary_rows(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Yield the most important results, as pairs of name and text."""
    recipe, time, memory = forecast.recipe, forecast.time, forecast.memory
    yield "model", f"{forecast.model}, {forecast.num_params / 1e9:.2f} billion parameters"
    yield "cluster", f"{forecast.cluster}, {memory.device / GB:.1f} GB each"
    yield "recipe", _recipe_text(forecast)
    per_gpu = forecast.tokens_per_s / forecast.cluster.num_gpus
    yield (
        "step",
        f"{time.step_us / 1e3:,.1f} ms for {forecast.tokens:,} {forecast.unit}: "
        f"{forecast.tokens_per_s:,.0f} a second, {per_gpu:,.0f} on each GPU; "
        f"MFU {forecast.mfu:.1%}",
    )
    yield (
        "interval",
        f"{time.low_us / 1e3:,.1f} to {time.high_us / 1e3:,.1f} ms, "
        f"{memory.low / GB:.1f} to {memory.high / GB:.1f} GB: nine of ten "
        f"{_INTERVALS[forecast.cluster.hardware.source]}",
    )
    yield (
        "breakdown",
        f"compute {time.compute_us / 1e3:,.1f} ms, exposed communication "
        f"{time.exposed_us / 1e3:,.1f} ms, slowdown by hidden communication "
        f"{time.lost_us / 1e3:,.1f} ms, optimizer {time.optimizer_us / 1e3:,.1f} ms, "
        f"not modelled {time.unmodelled_us / 1e3:,.1f} ms",
    )
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield (
        "peak memory",
        f"{memory.total / GB:.1f} of {memory.device / GB:.1f} GB, in {memory.when}: {verdict}",
    )
    if memory.activations:
        # Activations have as many bytes for each token: traces with symbolic sizes show it.
        tokens = forecast.tokens // (recipe.accumulate * forecast.cluster.num_gpus)
        yield (
            "activations",
            f"{memory.activations / tokens / 1e3:,.1f} KB x {tokens:,} {forecast.unit} of a "
            f"microbatch = {memory.activations / GB:.2f} GB",
        )
    if recipe.offload:
        yield "host", f"{forecast.host_bytes / GB:.1f} GB of each node's memory"
    if padding := forecast.padding:
        yield "padding", padding
    yield "bottleneck", forecast.binds


def _recipe_text(forecast: Forecast) -> str:
    recipe = forecast.recipe
    parts = [recipe.strategy, recipe.dtype, recipe.optimizer]
    if recipe.offload:
        parts.append("offloaded to the host")
    if recipe.recompute == 1:
        parts.append("all layers recomputed")
    elif forecast.recomputed:
        parts.append(f"{' and '.join(forecast.recomputed)} recomputed")
    if recipe.accumulate > 1:
        parts.append(f"{recipe.accumulate} microbatches")
    return ", ".join(parts)


def _memory_rows(forecast: Forecast) -> list[tuple[str, float]]:
    memory = forecast.memory
    kinds = {**memory.kinds, "margin": memory.margin, "total": memory.total}
    return [(name, num_bytes / GB) for name, num_bytes in kinds.items()]


_CHANGE_HEADERS = ["saves", "GB", ""]


def _change_rows(forecast: Forecast) -> list[tuple[str, str, float, str]]:
    return [
        (
            change.what,
            f"{change.gain:+.1%}",
            change.memory_bytes / GB,
            "" if change.fits else "does not fit",
        )
        for change in forecast.changes
    ]


# --- as an HTML page -----------------------------------------------------------------------------


def forecast_page(forecast: Forecast, others: Sequence[TableData] = ()) -> str:
    """Return a forecast as an HTML page: the page of its dumps, plus memory by kind and tables.

    Args:
        others: further tables, such as the results of a search.
    """
    graphs = [_graph(forecast, number, graph) for number, graph in enumerate(forecast.graphs)]
    changes = [(what, gain, f"{gb:.1f}", fits) for what, gain, gb, fits in _change_rows(forecast)]
    tables = [
        text_table("forecast", ["", ""], list(summary_rows(forecast))),
        text_table(
            f"memory of a rank in {forecast.memory.when}",
            ["kind", "GB"],
            [(name, f"{gb:.2f}") for name, gb in _memory_rows(forecast)],
        ),
        text_table("what would help", ["change", *_CHANGE_HEADERS], changes),
        text_table("code", [""], [(line,) for line in forecast.code().splitlines()]),
        *others,
    ]
    notes = [f"assumed: {note}" for note in forecast.notes]
    return page(page_data(f"graphshard plan: {forecast.model}", graphs, notes, tables))


def _graph(forecast: Forecast, number: int, graph: PlannedGraph) -> GraphData:
    """Return the page data of one graph; its memory chart shows all that the rank holds."""
    data = graph_data(forecast.dumps[number])
    outside = outside_of_graphs(forecast.held, forecast.recipe, forecast.memory.device)
    others = other_graph_bytes(forecast.graphs)[number]
    earlier = outside.gradients if forecast.recipe.accumulate > 1 else 0
    constant = {
        "parameters": outside.parameters,
        "optimizer": outside.optimizer + outside.buffers,
        "of other graphs": others.saved + others.gradients + earlier,
    }
    kinds = bytes_by_kind(graph)
    alive = list(map(sum, zip(*kinds.values())))
    steps = range(graph.problem.num_steps)
    # A step has three points in time; the chart shows the one with the most memory.
    peaks = [max(range(3 * step, 3 * step + 3), key=alive.__getitem__) for step in steps]
    areas = [BytesData(name=name, bytes=[value] * len(steps)) for name, value in constant.items()]
    areas += [
        BytesData(name=name, bytes=[num_bytes[peak] for peak in peaks])
        for name, num_bytes in kinds.items()
    ]
    data["memory"]["areas"] = areas
    data["memory"]["limits"] = [{"name": "device", "bytes": forecast.memory.device}]
    data["predicted"]["peak_bytes"] = max(map(sum, zip(*(area["bytes"] for area in areas))))
    return data


def text_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> TableData:
    """Return a table of strings; columns after the first are numeric if all their cells are."""
    cells = [[str(cell) for cell in row] for row in rows]
    numbers = [
        column
        for column in range(1, len(headers))
        if all(row[column].strip("+-%").replace(".", "").isdigit() for row in cells)
    ]
    return TableData(title=title, headers=list(headers), numbers=numbers, rows=cells)
