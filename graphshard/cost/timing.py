"""Time work on a device: medians of samples, with operands that no cache holds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

COLD_BYTES = 256 << 20
"""Bytes that operands rotate through: more than caches hold (a B200 caches 126 MB)."""
SAMPLE_US = 2000.0
"""Duration of a sample, in which short work is repeated."""
_MAX_CALLS = 200  # per sample
_MAX_OPERANDS = 256


@dataclass(frozen=True)
class Timer:
    """A timer for work on ``device``, by medians of ``num_samples`` samples."""

    device: torch.device
    num_samples: int

    def median_us(
        self,
        work: Callable[[], object],
        *,
        num_calls: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> float:
        """Return the median time of one call of ``work``, in microseconds.

        Args:
            num_calls: number of calls in a sample; None: as many as fit into ``SAMPLE_US``.
            group: ranks that start each sample together; None: this rank alone.
        """
        first_us = min(self._sample_us(work, 1) for _ in range(3))
        if num_calls is None:
            num_calls = max(1, min(_MAX_CALLS, int(SAMPLE_US / first_us)))
        samples_us = []
        for _ in range(self.num_samples):
            if group is not None:
                dist.barrier(group)
            samples_us.append(self._sample_us(work, num_calls))
        return statistics.median(samples_us)

    def _sample_us(self, work: Callable[[], object], num_calls: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            work()
        self._synchronize()
        return (time.perf_counter() - start) / num_calls * 1e6

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def num_cold(num_bytes: int) -> int:
    """Return a number of operands of ``num_bytes`` that together exceed the caches."""
    return max(1, min(_MAX_OPERANDS, COLD_BYTES // num_bytes))


def rotating(work: Callable[[Tensor], object], operands: Sequence[Tensor]) -> Callable[[], object]:
    """Return a function that calls ``work`` with the next of ``operands``, over and over."""
    cycle = itertools.cycle(operands)
    return lambda: work(next(cycle))
