"""ErrorInterval of past forecasts, and the prediction intervals that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ..cost.hardware import CALIBRATED, DATASHEET

COVERAGE = 0.9
"""Fraction of past measurements that an interval covers."""


@dataclass(frozen=True)
class ErrorInterval:
    """Ratios of measured to modelled values.

    Attributes:
        low: lower end of the prediction interval.
        likely: median of past ratios.
        high: upper end of the prediction interval.
    """

    low: float
    likely: float
    high: float

    def covers(self, ratio: float) -> bool:
        """Return whether ``ratio``, of a measured to a modelled value, is in the interval."""
        return self.low <= ratio <= self.high


def error_interval(ratios: Iterable[float]) -> ErrorInterval:
    """Return the median of ratios and the narrowest interval that covers ``COVERAGE`` of them.

    Args:
        ratios: ratios of measured to modelled values; at least one.
    """
    ordered = sorted(ratios)
    held = math.ceil(COVERAGE * len(ordered))
    intervals = zip(ordered, ordered[held - 1 :])
    low, high = min(intervals, key=lambda ends: ends[1] / ends[0])
    return ErrorInterval(low, statistics.median(ordered), high)


STEP_TIME = {
    # benchmarks/results/forecast_cpu.md: steps of six models on CPU ranks.
    CALIBRATED: ErrorInterval(1.00, 1.11, 1.64),
    # benchmarks/results/forecast.md: compiled models on A100, H100 and H200.
    DATASHEET: ErrorInterval(1.13, 1.30, 1.55),
}
"""Ratios of measured to modelled step times, by the source of the machine's rates."""

MEMORY = ErrorInterval(1.00, 1.04, 1.18)
"""Ratios of allocated to planned bytes of a step: benchmarks/results/forecast_cpu.md."""
