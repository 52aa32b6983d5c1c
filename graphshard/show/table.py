"""A plan as text: totals, exposed collectives with reasons, and the schedule of its buckets.

``saving_table`` shows the candidates of ``SchedulePolicy(auto=True)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from ..cost.model import CostModel
from ..kinds import HOST_COPIES, TransferKind
from ..planning.bucketing import compare_reductions
from ..planning.buckets import may_exchange
from ..planning.live_bytes import footprint
from ..planning.plan import Bucket
from ..planning.saving import SavingChoice, TriedSaving
from ..planning.simulate import COLLECTIVE, COPY_IN, USER
from .dump import TRANSFER_SLOWDOWN, Dump, Totals, param_name

MAX_LISTED_EXPOSED = 10
MAX_LISTED_BUCKETS = 24  # limit unless all buckets are requested

_Row = Mapping[str, object]  # keyed by header


def summary(dumps: Sequence[Dump], *, all_buckets: bool = False) -> str:
    """Return the tables of several graphs; ``all_buckets`` as in ``table``."""
    if not dumps:
        return "no graph has been compiled yet"
    return "\n\n\n".join(table(dump, all_buckets=all_buckets) for dump in dumps)


def table(dump: Dump, *, all_buckets: bool = False) -> str:
    """Return all tables of one graph. Times are predicted, in ms; MB and GB are powers of ten.

    Args:
        all_buckets: whether to list all buckets; if not, a long list shows only the first and last.
    """
    parts = [
        _title(dump),
        _kinds_table(dump),
        _totals(dump),
        _kept_params(dump),
        _dtype_reasons(dump),
        _regions(dump),
    ]
    if dump.plan.buckets:
        parts += [_exposed_table(dump), _buckets_table(dump, all_buckets)]
    return "\n\n".join(part for part in parts if part)


def _title(dump: Dump) -> str:
    plan = dump.plan
    name = f"{plan.graph} {dump.compiled}".rstrip()
    ranks = f", ranks: {', '.join(map(str, dump.worlds))}" if dump.worlds else ""
    return (
        f"{name}: {len(plan.params)} parameters, {plan.problem.num_steps} steps{ranks}; "
        f"predicted for {dump.hardware.name}"
    )


def _kinds_table(dump: Dump) -> str:
    plan, users, rows = dump.plan, dump.plan.problem.user_collectives, list[_Row]()
    for kind in TransferKind:
        positions = [i for i, bucket in enumerate(plan.buckets) if bucket.kind == kind]
        if positions:
            num_transfers = sum(len(plan.buckets[i].transfers) for i in positions)
            count = f"{num_transfers} -> {len(positions)}"  # before and after bucketing
            num_bytes, dtypes = plan.num_bytes(kind), _dtypes(dump, positions)
            rows.append(_kind_row(dump, kind, count, num_bytes, dtypes, positions))
    for op in dict.fromkeys(user.op for user in users):
        numbered = enumerate(users, len(plan.buckets))
        positions = [i for i, user in numbered if user.op == op]
        num_bytes = sum(user.num_bytes for user in users if user.op == op)
        rows.append(_kind_row(dump, f"user {op}", len(positions), num_bytes, "", positions))
    return _tabulate(rows) if rows else ""


def _kind_row(
    dump: Dump, kind: str, count: object, num_bytes: int, dtypes: str, positions: Sequence[int]
) -> _Row:
    exposed_us = (*dump.timeline.exposed_us, *dump.timeline.user_exposed_us)
    return {
        "collective": kind,
        "count": count,
        "MB": num_bytes / 1e6,
        "wire dtype": dtypes,
        "predicted ms": sum(_collective_ms(dump, i) for i in positions),
        "exposed ms": sum(exposed_us[i] for i in positions) / 1e3,
    }


def _dtypes(dump: Dump, positions: Sequence[int]) -> str:
    plan = dump.plan
    dtypes = (plan.wire_dtypes(plan.buckets[i]) for i in positions)
    return ", ".join(dict.fromkeys(itertools.chain.from_iterable(dtypes)))


def _totals(dump: Dump) -> str:
    totals, alive_bytes = dump.totals, dump.timeline.alive_bytes
    total_ms, compute_ms = totals.total_us / 1e3, totals.compute_us / 1e3
    copies = [bucket.kind in HOST_COPIES for bucket in dump.plan.buckets]
    copies_us = sum(dump.timeline.busy_us(lane) for lane in HOST_COPIES)
    traffic = f"communication {_hidden(dump, totals.communication_us, [not c for c in copies])}"
    if copies_us:
        traffic += f"; host copies {_hidden(dump, copies_us, copies)}"
    users = (
        f" + {totals.user_exposed_us / 1e3:.3f} user collectives"
        if totals.user_collectives_us
        else ""
    )
    peak_step = ""
    if alive_bytes:
        peak_step = f" in step {dump.step_label(alive_bytes.index(max(alive_bytes)))}"
    return (
        "predicted\n"
        f"time    {total_ms:.3f} ms = {compute_ms:.3f} compute"
        f" + {_exposed(totals)}{users}; {traffic};"
        f" slowdown of compute {totals.lost_us / 1e3:.3f}\n"
        f"memory  peak {_size(totals.peak_bytes)}{peak_step};"
        f" at most {_size(totals.in_flight_bytes)} in flight"
    )


def _exposed(totals: Totals) -> str:
    exposed_ms, slow_ms = totals.exposed_us / 1e3, totals.slow_exposed_us / 1e3
    slow = (
        f" ({slow_ms:.3f} with links {TRANSFER_SLOWDOWN:g} times slower)"
        if totals.communication_us
        else ""
    )
    return f"{exposed_ms:.3f} exposed{slow}"


def _hidden(dump: Dump, busy_us: float, counts: Sequence[bool]) -> str:
    """Format the busy time of the buckets marked in ``counts``, and its hidden fraction."""
    if not busy_us:
        return f"{busy_us:.3f}"
    exposed_us = sum(us for us, counted in zip(dump.timeline.exposed_us, counts) if counted)
    fraction = max(0.0, 1 - exposed_us / busy_us)  # rounding could give -0%
    return f"{busy_us / 1e3:.3f}, {fraction:.0%} hidden"


def _kept_params(dump: Dump) -> str:
    names = [param_name(dump.plan.params[i]) for i in dump.plan.kept]
    return f"parameters kept unsharded for backward: {', '.join(names)}" if names else ""


def _dtype_reasons(dump: Dump) -> str:
    # One line for each parameter that cannot use a smaller wire dtype.
    return "\n".join(f"{param_name(dump.plan.params[i])} {why}" for i, why in dump.plan.reasons)


def _regions(dump: Dump) -> str:
    regions = dump.plan.regions
    if not regions.num_calls:
        return ""
    return (
        f"repeated layers: {regions.num_compiled_regions} compiled regions, called "
        f"{regions.num_calls} times; {regions.num_compiled} of {regions.num_nodes} nodes compiled; "
        f"{regions.num_lost_fusions} fusions lost at region boundaries"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3f} MB"


def is_notable(exposed_us: float) -> bool:
    """Return whether a time would show as more than 0.000 ms."""
    return exposed_us >= 0.5


def _exposed_table(dump: Dump) -> str:
    exposed_us = dump.timeline.exposed_us
    worst = sorted(range(len(exposed_us)), key=lambda i: -exposed_us[i])[:MAX_LISTED_EXPOSED]
    rows: list[_Row] = [
        {
            "bucket": i,
            "collective": dump.plan.buckets[i].kind,
            "predicted ms": _collective_ms(dump, i),
            "exposed ms": exposed_us[i] / 1e3,
            "reason": exposed_reason(dump, i),
        }
        for i in worst
        if is_notable(exposed_us[i])
    ]
    if not rows:
        return "predicted: no bucket is exposed"
    return f"most exposed (predicted)\n{_tabulate(rows)}"


def _buckets_table(dump: Dump, all_buckets: bool) -> str:
    positions = range(len(dump.plan.buckets))
    rows = [_bucket_row(dump, i) for i in positions]
    reduced_by = [_reduced_by(dump, i) for i in positions]
    if any(reduced_by):
        rows = [{**row, "reduced by": text} for row, text in zip(rows, reduced_by)]
    if len(rows) > MAX_LISTED_BUCKETS and not all_buckets:
        half = MAX_LISTED_BUCKETS // 2
        omitted = positions[half:-half]  # summarized in one row
        summary_row = dict.fromkeys(rows[0]) | {
            "parameters": f"... {len(omitted)} more buckets",
            "MB": sum(dump.plan.buckets[i].num_bytes for i in omitted) / 1e6,
            "wire dtype": "",
            "predicted ms": sum(_collective_ms(dump, i) for i in omitted),
        }
        rows = [*rows[:half], summary_row, *rows[-half:]]
    return f"buckets, in order of launch\n{_tabulate(rows)}"


def _bucket_row(dump: Dump, i: int) -> _Row:
    bucket = dump.plan.buckets[i]
    return {
        "bucket": i,
        "collective": bucket.kind,
        "parameters": dump.bucket_label(bucket),
        "MB": bucket.num_bytes / 1e6,
        "wire dtype": _dtypes(dump, [i]),
        "predicted ms": _collective_ms(dump, i),
        "launch before": dump.step_label(bucket.launch),
        "wait before": dump.step_label(bucket.wait),
    }


def _reduced_by(dump: Dump, i: int) -> str:
    """Return "ring" or "exchange", and the time of the other; "" if a bucket has no choice."""
    problem, bucket = dump.plan.problem, dump.plan.buckets[i]
    members = sorted(bucket.transfers)
    if bucket.kind != TransferKind.REDUCE_SCATTER or not may_exchange(problem, members):
        return ""
    choice = compare_reductions(
        problem, members, CostModel(dump.hardware), bucket.launch, bucket.wait
    )
    if bucket.exchanges:
        return f"exchange (ring {choice.ring_cost.lane_us / 1e3:.3f} ms)"
    why = choice.why_ring if dump.limits.reduce == "auto" else ""
    return f"ring (exchange {choice.exchange_cost.lane_us / 1e3:.3f} ms{why and ', '}{why})"


def _tabulate(rows: Sequence[_Row]) -> str:
    return tabulate(rows, headers="keys", floatfmt=".3f")


def _collective_ms(dump: Dump, i: int) -> float:
    return dump.slots[COLLECTIVE, i].duration_us / 1e3


def exposed_reason(dump: Dump, i: int) -> str:
    """Return why compute waits for bucket ``i``, from the timeline and the limits."""
    bucket, problem = dump.plan.buckets[i], dump.plan.problem
    fetches = bucket.kind.is_fetch  # hidden by an earlier launch; other kinds by a later wait
    if fetches and not sum(problem.compute_us[: bucket.wait]):
        return "first: no compute before it"
    if not fetches and not sum(problem.compute_us[bucket.launch :]):
        return "last: no compute after it"
    collective = dump.slots[COLLECTIVE, i]
    launched_us = dump.slots[COPY_IN, i].end_us
    wait_begins_us = collective.end_us - dump.timeline.exposed_us[i]
    if collective.duration_us <= wait_begins_us - launched_us:
        for slot in dump.timeline.slots:
            on_link = slot.kind == COLLECTIVE and slot.lane in (collective.lane, USER)
            if on_link and slot is not collective and slot.end_us == collective.start_us:
                if slot.lane == USER:
                    return f"link is busy with user {dump.user_collective(slot).op}"
                return f"link is busy with bucket {slot.index}"
    limit = _blocking_limit(dump, bucket)
    if limit is not None:
        return limit
    return f"compute {'before' if fetches else 'after'} it is too short"


def _blocking_limit(dump: Dump, bucket: Bucket) -> str | None:
    """Return the limit that stops ``bucket`` from staying in flight one step longer, if any."""
    problem, memory = dump.plan.problem, dump.free_memory
    taken = footprint(problem, bucket)
    if bucket.kind.is_fetch:
        return memory.limit_before(taken, bucket.launch) if bucket.launch > 0 else None
    return memory.limit_after(taken, bucket.wait) if bucket.wait < problem.num_steps else None


# --- candidates of SchedulePolicy(auto=True) -----------------------------------------------------


def saving_table(choice: SavingChoice) -> str:
    """Return a titled table of the strategies that ``choice`` tried, with a verdict on each."""
    rows = tabulate(saving_rows(choice), headers="keys", disable_numparse=True)
    return "\n".join([saving_title(choice), "", rows, *choice.notes])


def saving_title(choice: SavingChoice) -> str:
    """Return the title of ``saving_table``."""
    inputs = f" for inputs of {choice.inputs}" if choice.inputs else ""
    return (
        f"values saved for backward{inputs}, within {choice.budget_gb:g} GB; predicted times of "
        "forward and backward"
    )


def saving_rows(choice: SavingChoice) -> list[dict[str, str]]:
    """Return the rows of ``saving_table``, keyed by column name."""
    best, offloads = choice.best, any(tried.saving.offloads for tried in choice.tried)
    rows = [_row(tried, best) for tried in choice.tried]
    if offloads:
        return rows
    return [{name: row[name] for name in row if name != "offloaded"} for row in rows]


def _row(tried: TriedSaving, best: TriedSaving | None) -> dict[str, str]:
    saving, part = tried.saving, tried.saving.activations
    return {
        "activations saved": "as configured" if part is None else f"{part:.0%}",
        "parameters kept": "all" if saving.all_params else "if exposed",
        "offloaded": "what does not fit" if saving.offloads else "none",
        "ms": "" if tried.step_us is None else f"{tried.step_us / 1e3:.3f}",
        "peak GB": f"{tried.peak_bytes / 1e9:.3g}",
        "": _verdict(tried, best),
    }


def _verdict(tried: TriedSaving, best: TriedSaving | None) -> str:
    if tried.refused:
        return f"refused: {tried.refused}"
    if tried is best or best is None or best.step_us is None or tried.step_us is None:
        return "chosen"
    slower = tried.step_us / best.step_us - 1
    return f"{slower:.1%} slower" if slower > 0 else "as fast, with more memory"
