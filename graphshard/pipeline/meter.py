"""Measure how long a compiled graph runs, and how long it waits for collectives and host copies.

Waits are timed in one run out of ``EVERY``: by the host's clock on CPUs, where a wait blocks the
host, and by events on GPUs, where it blocks the stream.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._torch.autograd import call_and_find_nodes, current_backward, on_backward_end, saves_unpacked
from .._torch.distributed import replace_wait, restore_wait, wait_tensor
from .._torch.dynamo import run_with_callees_as_python
from .traced_graph import Runnable

# A timed wait costs a GPU's host two events, about 10 us: with 100 waits in a step of 10 ms, 0.1 %
# of the step on average. The first runs are left out, because they warm up. The number is prime,
# because recomputations count as runs: otherwise, every timed run could be of the same layer.
EVERY, FIRST = 101, 3


class Measured(NamedTuple):
    """Times of a run of a graph, or of its forward and backward, in microseconds."""

    total_us: float
    exposed_us: float  # time in waits


class _HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def us(self, start: float, end: float) -> float:
        return (end - start) * 1e6

    def has_passed(self, time_s: float) -> bool:
        return True


class _DeviceClock:
    """A clock whose times are events on the current CUDA stream; it never waits for the device."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def has_passed(self, event: torch.cuda.Event) -> bool:
        return event.query()


class _TimedRun:
    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._waits: list[tuple[Any, Any]] = []
        self._start = self._end = None

    @run_with_callees_as_python
    def begin(self, *_: object) -> None:
        self._waits.clear()  # times of an earlier backward through the same graph
        self._end, self._start = None, self._clock.now()
        replace_wait(self._wait)
        on_backward_end(restore_wait)  # ``end`` is not called if the graph raises

    @run_with_callees_as_python
    def end(self, *_: object) -> None:
        restore_wait()
        self._end = self._clock.now()

    def _wait(self, launched: torch.Tensor) -> torch.Tensor:
        start = self._clock.now()
        result = wait_tensor(launched)
        self._waits.append((start, self._clock.now()))
        return result

    @property
    def num_waits(self) -> int:
        return len(self._waits)

    def measured(self) -> Measured | None:
        if self._end is None or not self._clock.has_passed(self._end):
            return None
        exposed_us = sum(self._clock.us(*wait) for wait in self._waits)
        return Measured(self._clock.us(self._start, self._end), exposed_us)


class Meter:
    """Meter of a compiled graph: counts all of its runs, and times one in ``EVERY``.

    A meter does not keep its graph alive.

    Args:
        waits: whether the graph waits for collectives or host copies.

    Attributes:
        num_runs: number of calls so far; a call runs forward and, in training, later backward.
        num_forwards: number of calls whose forward is not a recomputation by a checkpoint.
        num_backwards: number of calls whose backward runs, if the graph has one.
    """

    def __init__(self, device: torch.device, *, waits: bool) -> None:
        self._waits, self._on_gpu = waits, device.type == "cuda"
        self._timed: list[_TimedRun] = []  # the runs that were timed last: forward, backward
        self._last: Measured | None = None
        self.num_runs = self.num_forwards = self.num_backwards = 0

    def metered(self, compiled: Runnable) -> Runnable:
        return functools.partial(self._run, compiled)

    def _run(self, compiled: Runnable, *args: object) -> Any:
        self._count()
        if self.num_runs % EVERY != FIRST:
            return compiled(*args)
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return compiled(*args)  # events of a CUDA graph cannot be read
        self.measured()  # stores the last times before this run replaces them
        return self._run_timed(compiled, args)

    def _count(self) -> None:
        # A checkpoint that calls the graph calls it again during backward. If it is reentrant, only
        # the second call's backward runs. Otherwise, only the first one's does, and a hook takes
        # the tensors that the second call saves.
        is_recomputed = current_backward() >= 0
        self.num_runs += 1
        self.num_forwards += not is_recomputed
        self.num_backwards += not is_recomputed or saves_unpacked()

    def _run_timed(self, compiled: Runnable, args: Sequence[object]) -> Any:
        clock = _DeviceClock() if self._on_gpu else _HostClock()
        forward, backward = _TimedRun(clock), _TimedRun(clock)
        forward.begin()
        try:
            outputs, nodes = call_and_find_nodes(compiled, args)
        finally:
            forward.end()
        for node in nodes:
            node.register_prehook(backward.begin)
            node.register_hook(backward.end)
        self._timed = [forward, backward] if nodes else [forward]
        return outputs

    def measured(self) -> Measured | None:
        """Return the times of the last run that was timed and has ended, or None."""
        runs = [run.measured() for run in self._timed]
        # Code that does not look up the wait, such as C++, cannot be timed.
        is_timed = not self._waits or any(run.num_waits for run in self._timed)
        if runs and is_timed and None not in runs:
            self._last = _sum(filter(None, runs))
        return self._last


def _sum(times: Iterable[Measured]) -> Measured:
    return Measured(*map(sum, zip(*times)))


def measured_metrics(meters: Sequence[Meter]) -> dict[str, float]:
    """Return the measured times, summed over the graphs timed so far, and CUDA's peak memory."""
    found: dict[str, float] = {}
    if timed := [times for meter in meters if (times := meter.measured()) is not None]:
        total_us, exposed_us = _sum(timed)
        found |= {"measured_us": total_us, "measured_exposed_us": exposed_us}
        found["measured_exposure"] = exposed_us / total_us
    if torch.cuda.is_initialized():
        found["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
    return found


class _Sample(NamedTuple):
    time_s: float
    compile_s: float  # time of all compiles so far
    peak_us: float  # time of all runs so far at peak rates


class Interval:
    """The time since the last call to ``metrics`` with ``steps``."""

    def __init__(self) -> None:
        self._start: _Sample | None = None

    def metrics(
        self, steps: int | None, tokens: int | None, compile_s: float, peak_us: float
    ) -> dict[str, float]:
        """Return metrics of the interval that ends now, and start the next one.

        Return {} on the first call with ``steps``, or if ``steps`` and ``tokens`` are None, in
        which case the interval goes on.

        Args:
            compile_s: time of all compiles so far.
            peak_us: ``CompiledGraph.peak_us``, summed over all runs so far.

        Raises:
            ValueError: as :meth:`graphshard.Backend.metrics`.
        """
        if steps is None and tokens is None:
            return {}
        if steps is None or steps < 1:
            raise ValueError(
                f"steps={steps!r}: pass the number of steps since the last call, 1 or more"
            )
        before, now = self._start, _Sample(time.perf_counter(), compile_s, peak_us)
        self._start = now
        if before is None:
            return {}
        seconds = now.time_s - before.time_s - (now.compile_s - before.compile_s)
        found = {"step_s": seconds / steps, "mfu": (now.peak_us - before.peak_us) / seconds / 1e6}
        return found | ({} if tokens is None else {"tokens_per_s": tokens / seconds})
