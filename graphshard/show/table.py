"""A plan as text: totals, what is exposed and why, what travels together and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from ..kinds import HOST_COPIES, TransferKind
from ..planning.plan import Bucket
from ..planning.simulate import COLLECTIVE, COPY_IN
from .dump import Dump, param_name

KINDS = (
    TransferKind.ALL_GATHER,
    TransferKind.REDUCE_SCATTER,
    TransferKind.ALL_REDUCE_SHARDS,
    TransferKind.ALL_REDUCE,
    TransferKind.ALL_REDUCE_MAX,
    *HOST_COPIES,
)
NUM_EXPOSED = 10  # collectives that are listed with a reason
NUM_BUCKETS = 24  # more than so many are not all listed


def summary(dumps: Sequence[Dump]) -> str:
    """The tables of several graphs."""
    if not dumps:
        return "no graph with collectives was compiled yet"
    return "\n\n\n".join(map(table, dumps))


def table(dump: Dump, *, all_buckets: bool = False) -> str:
    """Everything about one graph. Times are predicted, and in ms; MB and GB are powers of ten.

    Args:
        all_buckets: list them all; else only the first and the last ones of many.
    """
    parts = [_title(dump), _collectives(dump), _totals(dump), _kept(dump), _reasons(dump)]
    if dump.plan.buckets:
        parts += [_exposed(dump), _buckets(dump, all_buckets)]
    return "\n\n".join(part for part in parts if part)


def _title(dump: Dump) -> str:
    plan = dump.plan
    name = f"{plan.graph} {dump.compiled}".rstrip()
    worlds = sorted({bucket.world for bucket in plan.buckets})
    ranks = f", ranks: {', '.join(map(str, worlds))}" if worlds else ""
    return (
        f"{name}: {len(plan.params)} parameters, {plan.problem.num_steps} steps{ranks}; "
        f"predicted for {dump.hardware.name}"
    )


def _collectives(dump: Dump) -> str:
    plan, rows = dump.plan, []
    for kind in KINDS:
        of_kind = [i for i, bucket in enumerate(plan.buckets) if bucket.kind == kind]
        if of_kind:
            before = sum(len(plan.buckets[i].transfers) for i in of_kind)
            ms = sum(_ms(dump, i) for i in of_kind)
            exposed_us = sum(dump.timeline.exposed_us[i] for i in of_kind)
            count = f"{before} -> {len(of_kind)}"
            rows.append([kind, count, plan.num_bytes(kind) / 1e6, ms, exposed_us / 1e3])
    return _tabulate(rows, ["collective", "count", "MB", "ms", "exposed ms"]) if rows else ""


def _totals(dump: Dump) -> str:
    totals, alive = dump.totals, dump.timeline.alive_bytes
    total_ms, compute_ms, wire_ms, exposed_ms, lost_ms = (
        totals[f"{name}_us"] / 1e3
        for name in ("total", "compute", "communication", "exposed", "lost")
    )
    share = max(0.0, 1 - exposed_ms / wire_ms) if wire_ms else 0.0  # -0% by rounding
    hidden = f", {share:.0%} of it hidden" if wire_ms else ""
    at = f" in step {dump.step(alive.index(max(alive)))}" if alive else ""
    return (
        f"time    {total_ms:.3f} ms = {compute_ms:.3f} compute + {exposed_ms:.3f} exposed;"
        f" communication {wire_ms:.3f}{hidden};"
        f" compute loses {lost_ms:.3f} to it\n"
        f"memory  peak {_size(totals['peak_bytes'])}{at};"
        f" at most {_size(totals['in_flight_bytes'])} in flight"
    )


def _kept(dump: Dump) -> str:
    names = [param_name(dump.plan.params[i]) for i in dump.plan.kept]
    return f"gathered parameters kept for backward: {', '.join(names)}" if names else ""


def _reasons(dump: Dump) -> str:
    return "\n".join(f"{param_name(dump.plan.params[i])} {why}" for i, why in dump.plan.reasons)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3f} MB"


def _exposed(dump: Dump) -> str:
    """The most exposed collectives; what prints as 0.000 ms is not."""
    exposed_us = dump.timeline.exposed_us
    worst = sorted(range(len(exposed_us)), key=lambda i: -exposed_us[i])[:NUM_EXPOSED]
    rows = [
        [i, dump.plan.buckets[i].kind, _ms(dump, i), exposed_us[i] / 1e3, reason(dump, i)]
        for i in worst
        if exposed_us[i] >= 0.5
    ]
    headers = ["bucket", "collective", "ms", "exposed ms", "because"]
    return f"most exposed\n{_tabulate(rows, headers)}" if rows else "nothing is exposed"


def _buckets(dump: Dump, all_buckets: bool) -> str:
    rows = [_bucket_row(dump, i) for i in range(len(dump.plan.buckets))]
    if len(rows) > NUM_BUCKETS and not all_buckets:
        half = NUM_BUCKETS // 2
        left_out = rows[half:-half]
        mb, ms = (sum(row[column] for row in left_out) for column in (3, 4))
        between = [None, None, f"... {len(left_out)} buckets more", mb, ms, None, None]
        rows = [*rows[:half], between, *rows[-half:]]
    headers = ["bucket", "collective", "parameters", "MB", "ms", "launch before", "wait before"]
    return f"buckets, in order of launch\n{_tabulate(rows, headers)}"


def _bucket_row(dump: Dump, i: int) -> list[Any]:
    bucket = dump.plan.buckets[i]
    at = (dump.step(bucket.launch), dump.step(bucket.wait))
    return [i, bucket.kind, dump.range_of(bucket), bucket.num_bytes / 1e6, _ms(dump, i), *at]


def _tabulate(rows: list[list[Any]], headers: list[str]) -> str:
    return tabulate(rows, headers, floatfmt=".3f")


def _ms(dump: Dump, i: int) -> float:
    return dump.slots[COLLECTIVE, i].duration_us / 1e3


def reason(dump: Dump, i: int) -> str:
    """Why compute stands still for bucket ``i``, as far as the timeline and the limits tell."""
    bucket, problem = dump.plan.buckets[i], dump.plan.problem
    gathers = bucket.kind in (TransferKind.ALL_GATHER, TransferKind.COPY_TO_DEVICE)
    if gathers and not sum(problem.compute_us[: bucket.wait]):
        return "first: nothing to hide behind"
    if not gathers and not sum(problem.compute_us[bucket.launch :]):
        return "last: no compute follows"
    collective = dump.slots[COLLECTIVE, i]
    launched_us = dump.slots[COPY_IN, i].end_us
    waited_us = collective.end_us - dump.timeline.exposed_us[i]
    same = [j for j in range(i) if dump.slots[COLLECTIVE, j].lane == collective.lane]
    if same and collective.duration_us <= waited_us - launched_us:
        return f"wire is busy with bucket {same[-1]}"
    limit = _limit(dump, bucket)
    if limit:
        return limit
    return f"compute {'before' if gathers else 'after'} it is too short"


def _limit(dump: Dump, bucket: Bucket) -> str:
    """What keeps ``bucket`` from being in flight for one more step; "" if that is no limit."""
    timeline, limits = dump.timeline, dump.limits
    step = bucket.launch - 1 if bucket.kind == TransferKind.ALL_GATHER else bucket.wait
    if not 0 <= step < dump.plan.problem.num_steps:
        return ""
    if limits.peak is not None and timeline.alive_bytes[step] + bucket.num_bytes > limits.peak:
        return "memory budget"
    in_flight = timeline.in_flight_bytes[step] + bucket.num_bytes
    if limits.in_flight is not None and in_flight > limits.in_flight:
        return "in-flight limit"
    return ""
