"""Render a forecast as an HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..show.page import Json, graph_data, named_bytes, page, steps_data, table_data
from ..show.step import graph_names
from .estimate import PlannedGraph, bytes_by_kind, other_graph_bytes, outside_of_graphs
from .forecast import CHANGE_HEADERS, Forecast, change_rows, memory_rows, summary_rows


class ShownForecast(Forecast):
    """A forecast that notebooks show as the page of ``plan --html``."""

    def _repr_html_(self) -> str:
        shown = html.escape(forecast_page(self))
        return f'<iframe srcdoc="{shown}" width="100%" height="900"></iframe>'


def forecast_page(forecast: Forecast, others: Sequence[Json] = ()) -> str:
    """Return an HTML page of a forecast, with the tables ``others`` after its own."""
    names = graph_names(forecast.dumps)
    graphs = [_graph(forecast, i, names[i], graph) for i, graph in enumerate(forecast.graphs)]
    time = forecast.time
    steps = steps_data(
        forecast.dumps,
        graphs,
        microbatches=forecast.recipe.accumulate,
        optimizer_us=time.optimizer_us,
        note=f"expected measurement: {time.step_us / 1e3:,.1f} ms "
        f"({time.low_us / 1e3:,.1f} to {time.high_us / 1e3:,.1f})",
    )
    changes = [(what, gain, f"{gb:.1f}") for what, gain, gb in change_rows(forecast)]
    tables = [
        table_data("forecast", ["", ""], list(summary_rows(forecast))),
        table_data(
            f"memory of a rank in {forecast.memory.when}",
            ["kind", "GB"],
            [(name, f"{gb:.2f}") for name, gb in memory_rows(forecast)],
        ),
        table_data("what would help", ["change", *CHANGE_HEADERS], changes),
        table_data("code", [""], [(line,) for line in forecast.code().splitlines()]),
        *others,
    ]
    notes = [f"assumed: {note}" for note in forecast.notes]
    return page(f"graphshard plan: {forecast.model}", graphs, steps, notes, tables)


def _graph(forecast: Forecast, number: int, name: str, graph: PlannedGraph) -> Json:
    # A dump counts only the memory of its graph; this chart shows all memory that the rank holds.
    data = graph_data(forecast.dumps[number], name)
    outside = outside_of_graphs(forecast.held, forecast.recipe, forecast.memory.device)
    others = other_graph_bytes(forecast.graphs)[number]
    gradients = others.held_gradients(outside, accumulate=forecast.recipe.accumulate)
    constant = {
        "parameters": outside.parameters,
        "optimizer": outside.optimizer + outside.buffers,
        "held for other graphs": others.saved + others.kept + gradients,
    }
    areas = {name: [num_bytes] * graph.problem.num_steps for name, num_bytes in constant.items()}
    areas |= bytes_by_step(graph)
    data["memory"]["areas"] = named_bytes(areas)
    data["memory"]["limits"] = named_bytes({"device": forecast.memory.device})
    data["predicted"]["peak_bytes"] = max(map(sum, zip(*areas.values())))
    return data


def bytes_by_step(graph: PlannedGraph) -> dict[str, list[int]]:
    """Return a graph's live bytes at the peak of each step, by kind."""
    kinds = bytes_by_kind(graph)
    alive = list(map(sum, zip(*kinds.values())))
    # Each step has three points in time; the last step also has those of the graph's end.
    starts = range(0, 3 * graph.problem.num_steps, 3)
    peaks = [
        max(range(start, end), key=alive.__getitem__)
        for start, end in zip(starts, [*starts[1:], len(alive)])
    ]
    return {name: [at[peak] for peak in peaks] for name, at in kinds.items()}
