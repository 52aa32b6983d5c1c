"""Measure the time and memory of training steps on CPU ranks, for ``forecast_cpu``.

Peak memory is what model, optimizer and batch hold between two steps, plus the most that the
profiler sees a step allocate in addition. Memory that libraries take from the system directly
(oneDNN's scratch space, gloo's buffers) does not count, as it would not with CUDA's allocator.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from benchmarks import common
from benchmarks.forecast_models import MODELS
from benchmarks.links import Wire
from benchmarks.modelled_links import modelled_group
from graphshard.forecast.recipe import Recipe
from graphshard.params.memory_report import memory_report
from graphshard.scripts import loss_of

WARM_UP = 3


@dataclass(frozen=True)
class Job:
    """Training runs of one model that are measured together, step by step in turns.

    Attributes:
        model: key of ``MODELS``.
        recipes: recipe of each run, with the path of its ``hardware`` file (``SchedulePolicy``).
        num_ranks: number of ranks of each run.
        wire: modelled wire, on which only the first rank exists; None: real gloo ranks.
        steps: number of measured steps of each run.
    """

    model: str
    recipes: tuple[tuple[Recipe, str], ...]
    num_ranks: int
    wire: Wire | None
    steps: int


@dataclass(frozen=True)
class Measured:
    """Measurements of a training run on one rank.

    Attributes:
        step_s: median time of a step.
        optimizer_s: median time of the optimizer in a step.
        processor_s: median CPU time of this process in a step, over all its threads.
        peak_bytes: largest number of bytes allocated at once.
        others: load by other processes meanwhile, as a fraction of one core.
    """

    step_s: float
    optimizer_s: float
    processor_s: float
    peak_bytes: int
    others: float


class Step(NamedTuple):
    """Seconds of one step; the fields are as in ``Measured``."""

    step_s: float
    optimizer_s: float
    processor_s: float


def measure(job: Job) -> list[Measured]:
    """Return the measurements of this rank for each recipe."""
    torch.set_num_threads(1)
    trainings = [_Training(job, recipe, file) for recipe, file in job.recipes]
    runs = {str(i): training.step for i, training in enumerate(trainings)}
    busy_before, own_before, start = _busy_s(), time.process_time(), time.perf_counter()
    times = common.interleave(runs, job.steps, WARM_UP)
    elapsed_s = time.perf_counter() - start
    own_s = (time.process_time() - own_before) * (1 if job.wire else job.num_ranks)
    others = max(0.0, _busy_s() - busy_before - own_s) / elapsed_s
    return [
        Measured(
            **{
                name: statistics.median(getattr(step, name) for step in times[str(i)])
                for name in Step._fields
            },
            peak_bytes=training.peak_bytes(),
            others=others,
        )
        for i, training in enumerate(trainings)
    ]


def measure_with_wire(job: Job) -> list[Measured]:
    """Return the measurements of the first rank; the process must not have a process group yet."""
    assert job.wire is not None
    with modelled_group(job.wire, job.num_ranks, torch.device("cpu")):
        return measure(job)


class _Training:
    """A training run with its own model."""

    def __init__(self, job: Job, recipe: Recipe, hardware_file: str) -> None:
        torch.manual_seed(0)
        model, self._inputs = MODELS[job.model]()
        self._model = model.train()
        schedule = graphshard.SchedulePolicy(hardware=hardware_file)
        backend = graphshard.backend(
            _mesh(recipe, job.num_ranks), schedule=schedule, **recipe.options()
        )
        self._compiled = torch.compile(self._model, backend=backend, dynamic=False)
        self._run()  # shards the parameters, before the optimizer takes them
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.step()

    def _run(self) -> None:
        inputs = self._inputs
        called = self._compiled(**inputs) if isinstance(inputs, dict) else self._compiled(*inputs)
        loss_of(called).backward()

    def step(self) -> Step:
        """Train one step and return its times."""
        dist.barrier()
        processor, start = time.process_time(), time.perf_counter()
        self._run()
        middle = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        end = time.perf_counter()
        return Step(end - start, end - middle, time.process_time() - processor)

    def peak_bytes(self) -> int:
        """Return the largest number of bytes allocated at once in a step."""
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            self.step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        allocations = [event for event in events if event.get("name") == "[memory]"]
        allocations.sort(key=lambda event: event["ts"])
        alive = itertools.accumulate(event["args"]["Bytes"] for event in allocations)
        return self._held_bytes() + max(0, *alive)

    def _held_bytes(self) -> int:
        """Return the bytes allocated between two steps."""
        report = memory_report(self._model, self._optimizer)
        inputs = self._inputs
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        batch = {id(value): value.nbytes for value in values}
        held = (report.parameters, report.buffers, report.optimizer)
        return sum(part.rank for part in held) + sum(batch.values())


@functools.cache
def _mesh(recipe: Recipe, num_ranks: int) -> DeviceMesh:
    replicas, shards = recipe.ranks(num_ranks)
    shape: Any = (replicas, shards) if replicas > 1 else (shards,)
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _busy_s() -> float:
    """Return the busy seconds of all cores together since the machine booted."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    idle = int(fields[3]) + int(fields[4])
    return (sum(map(int, fields[:8])) - idle) / os.sysconf("SC_CLK_TCK")
