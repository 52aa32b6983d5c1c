"""Report the changes between two plans of a graph, as text or as a page.

Buckets of one kind that share a parameter are related, directly or through other buckets. A set of
related buckets yields one line if their number, order or parameters changed. The line starts with
"merged", "split", "regrouped", "changed", "added" or "removed":

    merged: 2 all_gather -> 1: norm.weight, up.weight -> norm.weight .. up.weight (2)

Otherwise, each change of a bucket yields a line that starts with "moved", "resized" or "packed
differently". Other lines show changes of settings, parameters and totals.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter

import networkx as nx
from tabulate import tabulate

from ..kinds import TransferKind
from ..planning.plan import Bucket, PlanParam
from .dump import Dump, param_name
from .page import graph_data, page, step_data, table_data
from .step import Phase

# Divisor and displayed unit for each unit in a field's name.
_DISPLAY_UNITS = {"us": (1e3, "ms"), "bytes": (1e9, "GB")}
_HEADERS = ["", "before", "after", ""]


def diff(before: Dump, after: Dump) -> str:
    """Return a report of the changes, or "" if there are none."""
    rows = _total_rows(before, after)
    table = [tabulate(rows, _HEADERS, floatfmt=".3f")] if rows else []
    return "\n".join([*_changes(before, after), *table])


def diff_page(before: Dump, after: Dump) -> str:
    """Return an HTML page of the changes and both plans, with one timeline above the other."""
    graphs = [graph_data(before, "before"), graph_data(after, "after")]
    steps = [step_data(graph["name"], [Phase(i)], graphs) for i, graph in enumerate(graphs)]
    totals = [
        [what, *(f"{total:.3f}" for total in pair), change]
        for what, *pair, change in _total_rows(before, after)
    ]
    changes = [[line] for line in _changes(before, after)] or [["no difference"]]
    tables = [
        table_data("totals", _HEADERS, totals),
        table_data("changes", [""], changes),
    ]
    title = f"graphshard diff: {before.plan.graph}"
    return page(title, graphs, steps, tables=tables if totals else tables[1:], compares=True)


def _changes(before: Dump, after: Dump) -> list[str]:
    lines = [
        *_setting_changes(before, after),
        *_param_changes(before, after),
        *_bucket_changes(before, after),
    ]
    if not lines and not _total_rows(before, after):
        lines = _changed_fields(before, after)
    return lines


def _setting_changes(before: Dump, after: Dump) -> Iterator[str]:
    new_values = _settings(after)
    for name, value in _settings(before).items():
        if value != new_values[name]:
            yield f"{name}: {value} -> {new_values[name]}"


def _settings(dump: Dump) -> Mapping[str, object]:
    limits = dataclasses.asdict(dump.limits)
    return {
        "graph": dump.plan.problem.graph,
        "steps": dump.plan.problem.num_steps,
        "hardware": dump.hardware.name,
        **{f"limit of {name}": value for name, value in limits.items()},
    }


def _param_changes(before: Dump, after: Dump) -> Iterator[str]:
    old, new = (
        {param_name(param): _shape(param) for param in dump.plan.params} for dump in (before, after)
    )
    for name, shape in old.items():
        if name not in new:
            yield f"parameter removed: {name} {shape}"
        elif shape != new[name]:
            yield f"parameter changed: {name} {shape} -> {new[name]}"
    for name, shape in new.items():
        if name not in old:
            yield f"parameter added: {name} {shape}"


def _shape(param: PlanParam) -> str:
    return f"{list(param.shape)} {param.dtype.removeprefix('torch.')}"


def _bucket_changes(before: Dump, after: Dump) -> Iterator[str]:
    for old, new in _related_buckets(before, after):
        names = [
            [set(dump.param_names(bucket)) for bucket in buckets]
            for dump, buckets in ((before, old), (after, new))
        ]
        if names[0] == names[1]:
            for old_bucket, new_bucket in zip(old, new):
                yield from _moves(before, old_bucket, after, new_bucket)
        else:
            yield _regrouping(before, old, after, new)


def _related_buckets(before: Dump, after: Dump) -> list[tuple[list[Bucket], list[Bucket]]]:
    """Group buckets of one kind that share parameters, directly or through other buckets."""
    graph: nx.Graph[tuple[object, object]] = nx.Graph()
    for side, dump in enumerate((before, after)):
        num_nameless: Counter[TransferKind] = Counter()
        for i, bucket in enumerate(dump.plan.buckets):
            names: list[str | int] = [*dump.param_names(bucket)]
            if not names:  # match buckets without names by their order
                names = [num_nameless[bucket.kind]]
                num_nameless[bucket.kind] += 1
            graph.add_edges_from(((side, i), (bucket.kind, name)) for name in names)
    sides = [dump.plan.buckets for dump in (before, after)]
    return [
        (
            [bucket for i, bucket in enumerate(sides[0]) if (0, i) in component],
            [bucket for i, bucket in enumerate(sides[1]) if (1, i) in component],
        )
        for component in nx.connected_components(graph)  # in the order of their first buckets
    ]


def _regrouping(before: Dump, old: list[Bucket], after: Dump, new: list[Bucket]) -> str:
    if not old:
        change = "added"
    elif not new:
        change = "removed"
    elif len(old) == len(new):
        change = "changed" if len(old) == 1 else "regrouped"
    elif min(len(old), len(new)) == 1:
        change = "merged" if len(old) > 1 else "split"
    else:
        change = "regrouped"
    labels = [
        ", ".join(before.bucket_label(bucket) for bucket in old),
        ", ".join(after.bucket_label(bucket) for bucket in new),
    ]
    count = f"{len(old)} {(old or new)[0].kind} -> {len(new)}"
    return f"{change}: {count}: {' -> '.join(filter(None, labels))}"


def _moves(before: Dump, old: Bucket, after: Dump, new: Bucket) -> Iterator[str]:
    name = f"{old.kind} of {before.bucket_label(old)}"
    for what, old_step, new_step in (
        ("launch", old.launch, new.launch),
        ("wait", old.wait, new.wait),
    ):
        old_label, new_label = before.step_label(old_step), after.step_label(new_step)
        # If the graph's steps changed, treat steps with equal numbers or first nodes as equal.
        if old_step != new_step and old_label.split()[-1] != new_label.split()[-1]:
            yield f"moved: {name}: {what} before {old_label} -> before {new_label}"
    if old.num_bytes != new.num_bytes or old.world != new.world:
        sizes = [f"{b.num_bytes / 1e6:.3f} MB on {b.world} ranks" for b in (old, new)]
        yield f"resized: {name}: {sizes[0]} -> {sizes[1]}"
    if _buffer_params(before, old) != _buffer_params(after, new):
        counts = [f"{len(bucket.buffers)} buffers" for bucket in (old, new)]
        yield f"packed differently: {name}: {counts[0]} -> {counts[1]}"


def _buffer_params(dump: Dump, bucket: Bucket) -> set[frozenset[str]]:
    parts = (dataclasses.replace(bucket, buffers=(buffer,)) for buffer in bucket.buffers)
    return {frozenset(dump.param_names(part)) for part in parts}


def _total_rows(before: Dump, after: Dump) -> list[tuple[str, float, float, str]]:
    old_totals, new_totals = dataclasses.asdict(before.totals), dataclasses.asdict(after.totals)
    rows = []
    for name, old in old_totals.items():
        new = new_totals[name]
        if old != new:
            what, _, unit = name.rpartition("_")
            scale, shown_unit = _DISPLAY_UNITS[unit]
            change = f"{new / old - 1:+.1%}" if old else ""
            rows.append(
                (f"{what.replace('_', ' ')} {shown_unit}", old / scale, new / scale, change)
            )
    return rows


def _changed_fields(before: Dump, after: Dump) -> list[str]:
    # List differences that the rest of the report does not show, except ``compiled``, Dynamo's name
    # for the compilation.
    paths = [field.name for field in dataclasses.fields(before)]
    paths += [f"plan.{field.name}" for field in dataclasses.fields(before.plan)]
    paths += [f"plan.problem.{field.name}" for field in dataclasses.fields(before.plan.problem)]
    whole = ("compiled", "plan", "plan.problem")
    getters = {path: attrgetter(path) for path in paths if path not in whole}
    return [f"differs in detail: {p}" for p, get in getters.items() if get(before) != get(after)]
