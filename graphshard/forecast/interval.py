"""How far measured steps were from their forecasts: `Errors`, the width of every interval.

A forecast says where a measurement would be expected: between the forecast times the least and the
largest ratio of past measurements to their forecasts, of which at most one in twenty is left out at
each end. No number of a forecast itself depends on these ratios.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cost.hardware import CALIBRATED, DATASHEET

LEFT_OUT = 0.05
"""Part of past measurements that may lie below an interval, and above it."""


@dataclass(frozen=True)
class Errors:
    """The interval of a forecast, as factors of it.

    Attributes:
        low: at most 1.
        high: at least 1.
    """

    low: float
    high: float

    def covers(self, ratio: float) -> bool:
        """Return whether a measurement of ``ratio`` times its forecast is in the interval."""
        return self.low <= ratio <= self.high


def errors_of(ratios: Iterable[float]) -> Errors:
    """Return the interval that past ratios of measured to forecast make.

    Args:
        ratios: at least one.
    """
    ordered = sorted(ratios)
    left_out = int(LEFT_OUT * len(ordered))
    return Errors(min(1.0, ordered[left_out]), max(1.0, ordered[-1 - left_out]))


STEP_TIME = {
    # benchmarks/results/forecast_cpu.md: steps of six models on CPU ranks.
    CALIBRATED: Errors(1.00, 1.70),
    # benchmarks/results/forecast.md: what others published, on A100, H100 and H200.
    DATASHEET: Errors(1.00, 1.81),
}
"""Of the time of a step, by the source of the machine's rates."""

MEMORY = Errors(1.00, 1.21)
"""Of the bytes that a step allocates: benchmarks/results/forecast_cpu.md."""
