"""A self-contained HTML page that draws a training step and its graphs from embedded JSON.

    dumps ─► graph_data, steps_data ─► page: JSON in the page ─► page.html draws it

Times are in microseconds; unknown values are null.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..cost.devices import MEMORY_BYTES
from ..kinds import HOST_COPIES, GraphKind, TransferKind
from ..planning.live_bytes import gathered_bytes
from ..planning.simulate import COLLECTIVE, COPY_IN, COPY_OUT, LANES, STEP
from .dump import Dump, param_name
from .step import Phase, training_step
from .table import exposed_reason, is_notable

# Page template; HTML comments are placeholders for the title and the data.
TEMPLATE = Path(__file__).with_name("page.html")

Json: TypeAlias = dict[str, Any]  # an object of the page's JSON


def page(
    title: str,
    graphs: Sequence[Json],
    steps: Sequence[Json] = (),
    notes: Sequence[str] = (),
    tables: Sequence[Json] = (),
    *,
    compares: bool = False,
) -> str:
    """Return an HTML page.

    Args:
        graphs: results of ``graph_data``.
        steps: results of ``step_data`` and ``steps_data``.
        notes: lines of text, such as assumptions, or missing parts with reasons.
        tables: results of ``table_data``.
        compares: whether all steps have a chart, on one time axis, instead of only the first.
    """
    data = {
        "title": title,
        "steps": steps,
        "compares": compares,
        "notes": notes,
        "tables": tables,
        "graphs": graphs,
    }
    # Escape "<", so that names are never interpreted as HTML.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": html.escape(title), "data": text}
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("<!--(title|data)-->", lambda match: parts[match[1]], template)


def table_data(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Json:
    """Return a table's data; columns after the first are numeric if their nonempty cells are."""
    cells = [[str(cell) for cell in row] for row in rows]
    numbers = [
        column
        for column in range(1, len(headers))
        if all(re.fullmatch(r"[-+\d.%]*", row[column]) for row in cells)
    ]
    return {"title": title, "headers": headers, "numbers": numbers, "rows": cells}


def steps_data(
    dumps: Sequence[Dump],
    graphs: Sequence[Json],
    *,
    microbatches: int = 1,
    optimizer_us: float | None = None,
    note: str = "",
) -> list[Json]:
    """Return data of the training step and of the evaluation, each only if it has graphs.

    Args:
        graphs: data of each dump.
        microbatches: number of microbatches in a step that reduce gradients.
        optimizer_us: time of the optimizer (default: that of a fused AdamW).
        note: text to show with the training step.
    """
    runs = [graph["measured"]["runs"] if graph["measured"] else 0 for graph in graphs]
    trained = training_step(dumps, runs, microbatches)
    steps = []
    if trained:
        name = "optimizer"
        if optimizer_us is None:
            name = "optimizer (a fused AdamW)"
            optimizer_us = sum(graphs[phase.graph]["optimizer_us"] for phase in trained)
        steps.append(step_data("training step", trained, graphs, note))
        if optimizer_us > 0:
            phase = {"name": name, "graph": None, "count": 1, "us": _rounded(optimizer_us)}
            steps[0]["phases"].append(phase)
            steps[0]["predicted"]["total_us"] += optimizer_us
    evaluated = [Phase(i) for i, g in enumerate(graphs) if g["kind"] == GraphKind.INFERENCE]
    if evaluated:
        steps.append(step_data("evaluation", evaluated, graphs))
    return steps


def step_data(name: str, phases: Sequence[Phase], graphs: Sequence[Json], note: str = "") -> Json:
    """Return the data of a step that runs ``phases``: summed times and maximum sizes."""
    run = [(graphs[phase.graph], phase.runs) for phase in phases]
    measured = [count * m["median_us"] for graph, count in run if (m := graph["measured"])]
    predicted = {
        key: max(graph["predicted"][key] for graph, _ in run)
        if key.endswith("_bytes")
        else sum(count * graph["predicted"][key] for graph, count in run)
        for key in run[0][0]["predicted"]
    }
    parts = [
        {"name": g["name"], "graph": p.graph, "count": p.runs, "us": g["predicted"]["total_us"]}
        for (g, _), p in zip(run, phases)
    ]
    return {
        "name": name,
        "phases": parts,
        "predicted": predicted,
        # Without optimizer; None unless all graphs were measured.
        "measured_us": sum(measured) if len(measured) == len(run) else None,
        "note": note,
    }


def graph_data(dump: Dump, name: str, source: str = "", measured: Json | None = None) -> Json:
    """Return a graph's data for the page.

    Args:
        source: name of the graph's file.
        measured: runs of the graph in a profile, from ``dump_folder``.
    """
    plan = dump.plan
    return {
        "name": name,
        "source": source,
        "kind": plan.graph,
        "hardware": dump.hardware.name,
        "ranks": dump.worlds,
        "predicted": {
            **dataclasses.asdict(dump.totals),
            "exposed_us": dump.totals.all_exposed_us,
            "host_copies_us": sum(dump.timeline.busy_us(lane) for lane in HOST_COPIES),
        },
        "optimizer_us": _rounded(dump.optimizer_us()),
        "measured": measured,
        "lanes": [lane for lane in LANES if any(slot.lane == lane for slot in dump.timeline.slots)],
        "params": _params(dump),
        "kept": list(plan.kept),
        "reasons": list(plan.reasons),
        "steps": _steps(dump),
        "buckets": [_bucket(dump, i) for i in range(len(plan.buckets))],
        "user_collectives": _user_collectives(dump),
        "memory": _memory(dump),
    }


def _params(dump: Dump) -> list[Json]:
    gathers = (t for t in dump.plan.problem.transfers if t.kind == TransferKind.ALL_GATHER)
    used: Mapping[int | None, int] = {t.param: t.due for t in gathers}
    return [
        {
            "name": param_name(param),
            "used": used.get(i),  # first step that uses it unsharded; None if it is not gathered
        }
        for i, param in enumerate(dump.plan.params)
    ]


def _steps(dump: Dump) -> Json:
    names = dump.plan.problem.steps
    slots = [dump.slots[STEP, i] for i in range(len(names))]
    return {  # by column: there may be thousands of steps
        "name": list(names),
        "module": dump.step_modules(),
        "start_us": [_rounded(slot.start_us) for slot in slots],
        "us": [_rounded(slot.duration_us) for slot in slots],
    }


def _bucket(dump: Dump, i: int) -> Json:
    bucket, collective = dump.plan.buckets[i], dump.slots[COLLECTIVE, i]
    return {
        "kind": bucket.kind,
        "label": dump.bucket_label(bucket),
        "params": dump.param_positions(bucket),  # positions in the graph's "params"
        "bytes": bucket.num_bytes,
        "wire_dtypes": list(dump.plan.wire_dtypes(bucket)),
        "ranks": bucket.world,
        "lane": collective.lane,
        "start_us": _rounded(collective.start_us),
        "us": _rounded(collective.duration_us),
        "copy_in": _copy(dump, COPY_IN, i),
        "copy_out": _copy(dump, COPY_OUT, i),
        "exposed_us": _rounded(dump.timeline.exposed_us[i]),
        "reason": exposed_reason(dump, i) if is_notable(dump.timeline.exposed_us[i]) else None,
        "launch": bucket.launch,  # before this step; the number of steps means the end
        "wait": bucket.wait,
    }


def _user_collectives(dump: Dump) -> list[Json]:
    users, num_buckets = dump.plan.problem.user_collectives, len(dump.plan.buckets)
    slots = [dump.slots[COLLECTIVE, num_buckets + i] for i in range(len(users))]
    return [
        {
            "op": user.op,
            "bytes": user.num_bytes,
            "ranks": user.world,
            "start_us": _rounded(slot.start_us),
            "us": _rounded(slot.duration_us),
            "exposed_us": _rounded(exposed_us),
        }
        for user, slot, exposed_us in zip(users, slots, dump.timeline.user_exposed_us)
    ]


def _copy(dump: Dump, kind: str, i: int) -> tuple[float, float]:
    slot = dump.slots[kind, i]
    return _rounded(slot.start_us), _rounded(slot.duration_us)


def _memory(dump: Dump) -> Json:
    timeline, problem = dump.timeline, dump.plan.problem
    gathered = gathered_bytes(problem, dump.plan.buckets)
    others = [alive - part for alive, part in zip(timeline.alive_bytes, gathered)]
    areas = {"everything except optimizer state": others, "gathered parameters": gathered}
    limits = {
        "device": MEMORY_BYTES.get(dump.hardware.name),
        "memory budget": dump.limits.peak,
        "in-flight limit": dump.limits.in_flight,
    }
    ends = (dump.slots[STEP, i].end_us for i in range(problem.num_steps))
    return {
        "until_us": [_rounded(us) for us in ends],
        "areas": named_bytes(areas),  # add up to the live memory
        "lines": named_bytes({"in flight": timeline.in_flight_bytes}),
        "limits": named_bytes({name: limit for name, limit in limits.items() if limit is not None}),
    }


def named_bytes(sizes: Mapping[str, int | Sequence[int]]) -> list[Json]:
    """Return JSON objects that pair each name with its size in bytes, or its size in each step."""
    return [{"name": name, "bytes": num_bytes} for name, num_bytes in sizes.items()]


def _rounded(us: float) -> float:
    return round(us, 3)
