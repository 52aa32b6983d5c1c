"""The report of ``forecast_cpu``.

It has a table of predicted and measured steps, the number of accurate predictions, and the
prediction intervals fitted to the errors.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import common
from graphshard.forecast.estimate import ErrorInterval

COVERAGE = 0.9
"""Fraction of measurements that an interval covers."""
TIME_WITHIN, MEMORY_WITHIN = 0.15, 0.05
DIFFERENT = 1.1
"""Ratio of two step times above which the strategies count as different."""
MB = 1e6


@dataclass
class Row:
    """A training run, measured and predicted; predicted fields are None until it is predicted.

    Attributes:
        link: link between ranks: "alone", "loopback", or milliseconds and GB/s as in "4,1".
        processor_ms: measured CPU time of a rank, over all its threads.
        exposed_ms: predicted time that communication adds to compute.
        others: load from other processes during the measurement, as a fraction of one core.
    """

    model: str
    ranks: int
    link: str
    dtype: str
    strategy: str
    measured_ms: float
    measured_optimizer_ms: float
    processor_ms: float
    measured_bytes: int
    others: float
    predicted_ms: float | None = None
    compute_ms: float | None = None
    exposed_ms: float | None = None
    optimizer_ms: float | None = None
    predicted_bytes: int | None = None

    @property
    def time_ratio(self) -> float:
        assert self.predicted_ms is not None
        return self.measured_ms / self.predicted_ms

    @property
    def memory_ratio(self) -> float:
        assert self.predicted_bytes is not None
        return self.measured_bytes / self.predicted_bytes

    @property
    def group(self) -> tuple[str, ...]:
        return (f"{self.ranks}", self.link, self.dtype)


def paragraphs(rows: Sequence[Row]) -> list[str]:
    busiest = max(row.others for row in rows)
    return [
        common.table([_cells(row) for row in rows]),
        _summary(rows),
        _interval("step time", rows, lambda row: row.time_ratio),
        _interval("memory", rows, lambda row: row.memory_ratio),
        f"Error: predicted relative to measured. Links: gloo over loopback, or the milliseconds "
        f"and GB/s of a modelled wire. Compute, communication (exposed, or slowing compute down) "
        f"and optimizer are predicted. Memory: peak of allocated bytes. Order: pairs of strategies "
        f"whose measured times differ by more than {DIFFERENT - 1:.0%} and that are predicted in "
        f"the right order. Other processes used up to {busiest:.0%} of a core meanwhile.",
    ]


def _cells(row: Row) -> dict[str, str]:
    assert row.predicted_ms is not None and row.predicted_bytes is not None
    times_ms = {
        "compute ms": row.compute_ms,
        "communication ms": row.exposed_ms,
        "optimizer ms": row.optimizer_ms,
        "measured optimizer ms": row.measured_optimizer_ms,
        "processor ms": row.processor_ms,
    }
    return {
        "training": f"{row.model}, {row.ranks} ranks, {row.link}, {row.dtype}, {row.strategy}",
        "predicted ms": f"{row.predicted_ms:.1f}",
        "measured ms": f"{row.measured_ms:.1f}",
        "error": f"{1 / row.time_ratio - 1:+.1%}",
        **{heading: f"{ms:.1f}" for heading, ms in times_ms.items()},
        "predicted MB": f"{row.predicted_bytes / MB:.1f}",
        "measured MB": f"{row.measured_bytes / MB:.1f}",
        "memory error": f"{1 / row.memory_ratio - 1:+.1%}",
        "others": f"{row.others:.0%}",
    }


def _summary(rows: Sequence[Row]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(row.group), []).append(row)
    groups |= {model: [r for r in rows if r.model == model] for model in _models(rows)}
    groups["all"] = list(rows)
    lines = []
    for name, members in groups.items():
        time = sum(abs(1 / row.time_ratio - 1) <= TIME_WITHIN for row in members)
        memory = sum(abs(1 / row.memory_ratio - 1) <= MEMORY_WITHIN for row in members)
        right, pairs = orders(members)
        lines.append(
            {
                "ranks, link, dtype; model": name,
                f"time within {TIME_WITHIN:.0%}": f"{time} of {len(members)}",
                f"memory within {MEMORY_WITHIN:.0%}": f"{memory} of {len(members)}",
                "order right": f"{right} of {pairs}",
            }
        )
    return common.table(lines)


def _models(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.model for row in rows))


def orders(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the number of pairs of runs predicted in the right order, and the number of pairs.

    A pair has equal model, ranks, link and dtype, and measured times whose ratio exceeds
    ``DIFFERENT``.
    """
    right = pairs = 0
    for one, other in itertools.combinations(rows, 2):
        if (one.model, *one.group) != (other.model, *other.group):
            continue
        less, more = sorted((one, other), key=lambda row: row.measured_ms)
        if more.measured_ms > DIFFERENT * less.measured_ms:
            assert less.predicted_ms is not None and more.predicted_ms is not None
            pairs += 1
            right += less.predicted_ms < more.predicted_ms
    return right, pairs


def error_interval(ratios: Iterable[float]) -> ErrorInterval:
    """Return the narrowest interval, by ``high / low``, that covers ``COVERAGE`` of ``ratios``."""
    ordered = sorted(ratios)
    num_covered = math.ceil(COVERAGE * len(ordered))
    intervals = zip(ordered, ordered[num_covered - 1 :])
    low, high = min(intervals, key=lambda ends: ends[1] / ends[0])
    return ErrorInterval(low, statistics.median(ordered), high)


def covers(errors: ErrorInterval, ratio: float) -> bool:
    return errors.low <= ratio <= errors.high


def _interval(what: str, rows: Sequence[Row], ratio_of: Callable[[Row], float]) -> str:
    errors = error_interval(map(ratio_of, rows))
    covered = sum(covers(errors, ratio_of(row)) for row in rows)
    text = (
        f"Interval of {what}: {errors.low:.2f} to {errors.high:.2f} times the modelled one, "
        f"{errors.likely:.2f} in the median, which covers {covered} of {len(rows)}"
    )
    if len(_models(rows)) < 2:
        return f"{text}."
    unseen = sum(_without(model, rows, ratio_of) for model in _models(rows))
    return f"{text}. If fitted to all other models, it covers {unseen}."


def _without(model: str, rows: Sequence[Row], ratio_of: Callable[[Row], float]) -> int:
    others = error_interval(ratio_of(row) for row in rows if row.model != model)
    return sum(covers(others, ratio_of(row)) for row in rows if row.model == model)
