"""Render a forecast as an HTML page: the page of its dumps, plus memory by kind and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..show.page import (
    BarData,
    BarsData,
    BytesData,
    GraphData,
    TableData,
    graph_data,
    page,
    page_data,
)
from .forecast import Forecast, summary_rows
from .largest import HEADERS as LARGEST_HEADERS
from .largest import LargestResult, largest_row
from .peak import PlannedGraph, bytes_by_kind, other_graph_bytes, outside_of_graphs
from .search import HEADERS, SearchResult, candidate_row

GB = 1e9


def forecast_page(forecast: Forecast, others: Sequence[TableData] = ()) -> str:
    """Return a forecast as an HTML page.

    Args:
        others: further tables, such as the results of a search.
    """
    graphs = [_graph(forecast, number, graph) for number, graph in enumerate(forecast.graphs)]
    notes = [f"assumed: {note}" for note in forecast.notes]
    tables = [*_tables(forecast), *others]
    return page(page_data(f"graphshard plan: {forecast.model}", graphs, notes, tables))


def _graph(forecast: Forecast, number: int, graph: PlannedGraph) -> GraphData:
    """Return the page data of one graph; its memory chart shows all that the rank holds."""
    data = graph_data(forecast.dumps[number])
    outside = outside_of_graphs(forecast.held, forecast.recipe, forecast.memory.device)
    steps = range(graph.problem.num_steps)
    held = {"parameters": outside.parameters, "optimizer": outside.optimizer + outside.buffers}
    beside = other_graph_bytes(forecast.graphs)[number]
    earlier = outside.gradients if forecast.recipe.accumulate > 1 else 0
    held["of other graphs"] = beside.saved + beside.gradients + earlier
    parts = bytes_by_kind(graph)
    alive = list(map(sum, zip(*parts.values())))
    points = [max(range(3 * step, 3 * step + 3), key=alive.__getitem__) for step in steps]
    areas = [BytesData(name=name, bytes=[value] * len(steps)) for name, value in held.items()]
    areas += [
        BytesData(name=name, bytes=[by_point[point] for point in points])
        for name, by_point in parts.items()
    ]
    data["memory"]["areas"] = areas
    data["memory"]["limits"] = [{"name": "device", "bytes": forecast.memory.device}]
    data["predicted"]["peak_bytes"] = max(map(sum, zip(*(area["bytes"] for area in areas))))
    return data


def _tables(forecast: Forecast) -> list[TableData]:
    memory = forecast.memory
    kinds = {**memory.kinds, "margin": memory.margin, "total": memory.total}
    return [
        text_table("forecast", ["", ""], list(summary_rows(forecast))),
        text_table(
            f"memory of a rank in {memory.when}",
            ["kind", "GB"],
            [(name, f"{value / GB:.2f}") for name, value in kinds.items()],
        ),
        text_table(
            "what would help",
            ["change", "saves", "GB", ""],
            [
                (
                    change.what,
                    f"{change.gain:+.1%}",
                    f"{change.memory_bytes / GB:.1f}",
                    "" if change.fits else "does not fit",
                )
                for change in forecast.changes
            ],
        ),
        text_table("to train so", [""], [(line,) for line in forecast.code().splitlines()]),
    ]


def largest_page(found: LargestResult, title: str) -> str:
    """Return an HTML page of the largest models: bar charts by strategy, and a table."""
    charts = []
    for grown in dict.fromkeys(one.grown for one in found.found if one.grown != "samples"):
        bars = [
            BarData(
                name=one.strategy,
                value=one.num_params / 1e9,
                text=f"{one.num_params / 1e9:,.1f} billion: {one.what}",
            )
            for one in found.found
            if one.grown == grown
        ]
        charts.append(BarsData(title=f"largest model, by more {grown}", bars=bars))
    rows = [
        [cell if isinstance(cell, str) else f"{cell:.1f}" for cell in largest_row(one)]
        for one in found.found
    ]
    tables = [text_table("the largest that fits", LARGEST_HEADERS, rows)]
    return page(page_data(title, [], tables=tables, charts=charts))


def search_table(found: SearchResult) -> TableData:
    """Return a table of all candidates that fit, fastest first."""
    rows = []
    for candidate in filter(lambda candidate: candidate.fits, found.candidates):
        *names, step_ms, gigabytes = candidate_row(candidate)
        rows.append([*names, f"{step_ms:.1f}", f"{gigabytes:.1f}"])
    return text_table("recipes that fit", HEADERS, rows)


def text_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> TableData:
    """Return a table of strings; columns after the first are numeric if all their cells are."""
    cells = [[str(cell) for cell in row] for row in rows]
    numbers = [
        column
        for column in range(1, len(headers))
        if all(row[column].strip("+-%").replace(".", "").isdigit() for row in cells)
    ]
    return TableData(title=title, headers=list(headers), numbers=numbers, rows=cells)
