"""What changed between two plans of a graph, as text.

Buckets that share a parameter belong together, so each group of them is one line:

    merged     2 all_gather -> 1: norm.weight, up.weight -> norm.weight .. up.weight (2)
    split, regrouped, moved, added, removed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from networkx.utils import UnionFind
from tabulate import tabulate

from ..kinds import TransferKind
from ..planning.plan import Bucket, PlanParam
from .dump import Dump, param_name

_UNITS = {"us": (1e3, "ms"), "bytes": (1e9, "GB")}


def diff(one: Dump, other: Dump) -> str:
    """A report of what differs, ``other`` being the newer; "" if nothing does."""
    lines = [*_settings(one, other), *_params(one, other), *_buckets(one, other)]
    lines += _totals(one, other)
    if lines:
        return "\n".join(lines)
    return "" if _same(one, other) else "\n".join(_details(one, other))


def _same(one: Dump, other: Dump) -> bool:
    """Whatever Dynamo calls the compilation."""
    return dataclasses.replace(one, compiled="") == dataclasses.replace(other, compiled="")


def _settings(one: Dump, other: Dump) -> Iterator[str]:
    def told(dump: Dump) -> dict[str, object]:
        problem, limits = dump.plan.problem, dataclasses.asdict(dump.limits)
        return {
            "graph": problem.graph,
            "steps": problem.num_steps,
            "hardware": dump.hardware.name,
            **{f"limit of {name}": value for name, value in limits.items()},
        }

    before, after = told(one), told(other)
    for name, value in before.items():
        if value != after[name]:
            yield f"{name}: {value} -> {after[name]}"


def _params(one: Dump, other: Dump) -> Iterator[str]:
    before, after = ({param_name(p): p for p in dump.plan.params} for dump in (one, other))
    for name, param in before.items():
        if name not in after:
            yield f"parameter removed: {name} {_shape(param)}"
        elif _shape(param) != _shape(after[name]):
            yield f"parameter changed: {name} {_shape(param)} -> {_shape(after[name])}"
    for name, param in after.items():
        if name not in before:
            yield f"parameter added: {name} {_shape(param)}"


def _shape(param: PlanParam) -> str:
    return f"{list(param.shape)} {param.dtype.removeprefix('torch.')}"


@dataclass(frozen=True)
class _Group:
    """Buckets of one kind that have to do with each other."""

    kind: TransferKind
    before: tuple[Bucket, ...]
    after: tuple[Bucket, ...]


def _buckets(one: Dump, other: Dump) -> Iterator[str]:
    for group in _groups(one, other):
        before, after = group.before, group.after
        if len(before) == len(after) == 1 and _members(one, *before) == _members(other, *after):
            yield from _moved(one, before[0], other, after[0])
        else:
            yield _regrouped(one, other, group)


def _regrouped(one: Dump, other: Dump, group: _Group) -> str:
    what = "changed" if len(group.before) == len(group.after) == 1 else "regrouped"
    if min(len(group.before), len(group.after)) == 0:
        what = "added" if group.after else "removed"
    elif len(group.before) != len(group.after) and min(len(group.before), len(group.after)) == 1:
        what = "merged" if group.before[1:] else "split"
    names = [
        ", ".join(dump.range_of(bucket) for bucket in buckets)
        for dump, buckets in ((one, group.before), (other, group.after))
    ]
    count = f"{len(group.before)} {group.kind} -> {len(group.after)}"
    return f"{what}: {count}: {' -> '.join(filter(None, names))}"


def _moved(one: Dump, before: Bucket, other: Dump, after: Bucket) -> Iterator[str]:
    name = f"{before.kind} of {one.range_of(before)}"
    for what in ("launch", "wait"):
        was, now = getattr(before, what), getattr(after, what)
        labels = one.step(was), other.step(now)
        # Where the graph has other steps, a step is the same by its number or by its first node.
        if was != now and labels[0].split()[-1] != labels[1].split()[-1]:
            yield f"moved: {name}: {what} before {labels[0]} -> before {labels[1]}"
    if before.num_bytes != after.num_bytes or before.world != after.world:
        sizes = [f"{b.num_bytes / 1e6:.3f} MB on {b.world} ranks" for b in (before, after)]
        yield f"resized: {name}: {sizes[0]} -> {sizes[1]}"
    if _parcels(one, before) != _parcels(other, after):
        counts = [f"{len(bucket.buffers)} buffers" for bucket in (before, after)]
        yield f"packed differently: {name}: {counts[0]} -> {counts[1]}"


def _groups(one: Dump, other: Dump) -> list[_Group]:
    """In the order of their first bucket."""
    joined: UnionFind[tuple[TransferKind, str]] = UnionFind()
    for dump in (one, other):
        for bucket in dump.plan.buckets:
            joined.union(*((bucket.kind, name) for name in dump.names(bucket)))
    buckets: dict[tuple[TransferKind, str], tuple[list[Bucket], list[Bucket]]] = {}
    for side, dump in enumerate((one, other)):
        for bucket in dump.plan.buckets:
            root = joined[bucket.kind, dump.names(bucket)[0]]
            buckets.setdefault(root, ([], []))[side].append(bucket)
    return [_Group(root[0], tuple(b), tuple(a)) for root, (b, a) in buckets.items()]


def _members(dump: Dump, bucket: Bucket) -> set[str]:
    return set(dump.names(bucket))


def _parcels(dump: Dump, bucket: Bucket) -> set[frozenset[str]]:
    parts = (dataclasses.replace(bucket, buffers=(parcel,)) for parcel in bucket.buffers)
    return {frozenset(dump.names(part)) for part in parts}


def _totals(one: Dump, other: Dump) -> list[str]:
    """A table of those that differ."""
    rows = []
    for name, was in one.totals.items():
        now = other.totals[name]
        if was != now:
            what, _, unit = name.rpartition("_")
            scale, shown = _UNITS[unit]
            change = f"{now / was - 1:+.1%}" if was else ""
            rows.append([f"{what.replace('_', ' ')} {shown}", was / scale, now / scale, change])
    return [tabulate(rows, ["", "before", "after", ""], floatfmt=".3f")] if rows else []


def _details(one: Dump, other: Dump) -> list[str]:
    """Fields that differ, where nothing above does."""
    pairs: list[tuple[str, Any, Any]] = [
        ("plan.params", one.plan.params, other.plan.params),
        ("plan.kept", one.plan.kept, other.plan.kept),
        ("plan.buckets", one.plan.buckets, other.plan.buckets),
        ("hardware", one.hardware, other.hardware),
    ]
    for field in dataclasses.fields(one.plan.problem):
        values = [getattr(dump.plan.problem, field.name) for dump in (one, other)]
        pairs.append((f"plan.problem.{field.name}", *values))
    return [f"differs in detail: {name}" for name, was, now in pairs if was != now]
