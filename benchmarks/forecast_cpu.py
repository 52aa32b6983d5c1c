"""How accurate are forecasts on this machine? Steps on CPU ranks, predicted and measured.

    python -m benchmarks.forecast_cpu                       everything, on 2 idle cores
    python -m benchmarks.forecast_cpu --models GPT --ranks 2 --dtypes float32 --steps 5

Calibrates the machine (``graphshard calibrate``) with as many busy processes as will train at once,
then measures steps of six models, compiled by Inductor, with AdamW:

    1 rank     alone
    2 ranks    gloo over loopback, one thread each
    4 ranks    over modelled wires (``links``); only the first rank exists, because four
               ranks would share two cores

Predictions are made as by ``graphshard.plan``, for the calibrated machine. A JSON file (--rows)
keeps calibrations and measurements: an interrupted run continues where it stopped, and a complete
one only predicts again. Most of the time is spent compiling, unless Inductor's cache is warm.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common, forecast_report
from benchmarks.forecast_ranks import MODELS, Job, Measured, measure, measure_with_wire
from benchmarks.forecast_report import Row
from benchmarks.links import Wire, parse_wire, with_wire
from graphshard.cost.hardware import Hardware
from graphshard.files import write_whole
from graphshard.forecast.cluster import cluster
from graphshard.forecast.derive import trace_step
from graphshard.forecast.planned_step import plan_step
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import TracedStep
from graphshard.forecast.workload import module_workload
from tests import ranks

ALONE, LOOPBACK = "alone", "loopback"
SLOW, FAST = "4,1", "1,4"
LINKS = {1: (ALONE,), 2: (LOOPBACK,), 4: (SLOW, FAST)}
"""Links for each number of ranks; a modelled wire is written as milliseconds and GB/s."""
STRATEGIES = {1: ("zero3",), 2: ("zero3", "zero2", "ddp"), 4: ("zero3", "zero2", "hsdp:2", "ddp")}
MEMORY_GB = 16.0


class Case(NamedTuple):
    """Training runs of one model that are measured together."""

    model: str
    ranks: int
    link: str
    dtype: str

    @property
    def wire(self) -> Wire | None:
        return None if self.link in (ALONE, LOOPBACK) else parse_wire(self.link)

    @property
    def busy(self) -> int:
        """Number of processes that compute at once."""
        return 1 if self.wire else self.ranks

    @property
    def recipes(self) -> list[Recipe]:
        names = STRATEGIES[self.ranks][: None if self.dtype == "float32" else 1]
        return [Recipe(name, self.dtype) for name in names]


def cases(models: Iterable[str], num_ranks: Iterable[int], dtypes: Iterable[str]) -> list[Case]:
    return [
        Case(model, world, link, dtype)
        for model in models
        for world in num_ranks
        for dtype in dtypes
        for link in LINKS[world]
        if dtype == "float32" or link in (ALONE, LOOPBACK)
    ]


@dataclass
class Store:
    """Calibrations and measurements, kept in a file.

    Attributes:
        calibrated: calibrated machines, keyed by number of busy processes.
        rows: one row per training run.
    """

    path: Path
    calibrated: dict[int, Hardware] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Store:
        if not path.exists():
            return cls(path)
        raw = json.loads(path.read_text())
        machines = {int(n): Hardware.from_json(json.dumps(h)) for n, h in raw["calibrated"].items()}
        return cls(path, machines, [Row(**row) for row in raw["rows"]])

    def save(self) -> None:
        machines = {n: json.loads(h.to_json()) for n, h in self.calibrated.items()}
        rows = [json.dumps(dataclasses.asdict(row)) for row in self.rows]
        head = json.dumps({"calibrated": machines})[:-1]
        write_whole(self.path, f'{head}, "rows": [\n' + ",\n".join(rows) + "\n]}\n")

    def of_case(self, case: Case) -> list[Row]:
        return [r for r in self.rows if (r.model, r.ranks, r.link, r.dtype) == tuple(case)]


# --- measuring -----------------------------------------------------------------------------------


def calibrate(busy: int) -> Hardware:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(busy)]
        command = [sys.executable, *(launcher if busy > 1 else [])]
        command += ["-m", "graphshard", "calibrate", "--device", "cpu", "--out", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        return Hardware.load(path)


def machine_of(case: Case, recipe: Recipe, calibrated: Hardware) -> Hardware:
    """Return the machine that a recipe is planned for.

    On a modelled wire, a collective delays compute only by its launch, and by a copy of its bytes
    at the memory bandwidth.
    """
    if case.wire is None:
        return calibrated
    replicas, shards, *_ = recipe.ranks(case.ranks)
    assert replicas in (1, shards), (
        "a wire has one rate: groups of shards and of replicas must be equal"
    )
    machine = with_wire(calibrated, case.wire, shards)
    copied = 2 * case.wire.bytes_per_s / calibrated.memory.largest
    return dataclasses.replace(machine, issue_us=calibrated.launch_us, contention=copied)


def measured(case: Case, calibrated: Hardware, steps: int) -> list[Measured]:
    """Measure a case; return the slowest rank's measurements for each recipe."""
    with tempfile.TemporaryDirectory() as folder:
        recipes = []
        for number, recipe in enumerate(case.recipes):
            path = Path(folder, f"machine-{number}.json")
            path.write_text(machine_of(case, recipe, calibrated).to_json())
            recipes.append((recipe, str(path)))
        job = Job(case.model, tuple(recipes), case.ranks, case.wire, steps)
        if case.wire is None:
            by_rank = ranks.run(case.ranks, measure, job, timeout_s=900.0)
        else:
            by_rank = [_in_new_process(job)]
    return [max(of_ranks, key=lambda found: found.step_s) for of_ranks in zip(*by_rank)]


def _in_new_process(job: Job) -> list[Measured]:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(measure_with_wire, job).result(timeout=900.0)


# --- predicting ----------------------------------------------------------------------------------


@functools.cache
def _traced(model: str, num_ranks: int, recipe: Recipe, hardware_json: str) -> TracedStep:
    """Trace a step with times of the calibrated machine; the trace does not depend on links."""
    hardware = Hardware.from_json(hardware_json)
    machine = cluster(hardware, num_ranks, memory_gb=MEMORY_GB)
    made = MODELS[model]()
    return trace_step(module_workload(made.model.train(), made.inputs), recipe, machine)


def predicted(case: Case, recipe: Recipe, calibrated: Hardware) -> dict[str, Any]:
    traced = _traced(case.model, case.ranks, recipe, calibrated.to_json())
    hardware = machine_of(case, recipe, calibrated)
    step = plan_step(traced, recipe, cluster(hardware, case.ranks, memory_gb=MEMORY_GB))
    time = step.time
    return {
        "predicted_ms": time.modelled_us / 1e3,
        "compute_ms": time.compute_us / 1e3,
        "exposed_ms": (time.exposed_us + time.lost_us) / 1e3,
        "optimizer_ms": time.optimizer_us / 1e3,
        "predicted_bytes": step.memory.allocated,
    }


# --- the command ---------------------------------------------------------------------------------


def measured_rows(case: Case, calibrated: Hardware, steps: int) -> Iterator[Row]:
    for recipe, found in zip(case.recipes, measured(case, calibrated, steps), strict=True):
        yield Row(
            *case,
            strategy=recipe.strategy,
            measured_ms=found.step_s * 1e3,
            measured_optimizer_ms=found.optimizer_s * 1e3,
            processor_ms=found.processor_s * 1e3,
            measured_bytes=found.peak_bytes,
            others=found.others,
        )


def main() -> None:
    args = _arguments()
    os.environ.update({name: os.environ.get(name, v) for name, v in ranks.RANK_ENV.items()})
    store = Store.load(args.rows)
    wanted = cases(args.models, args.ranks, args.dtypes)
    _calibrate(store, wanted)
    _measure(store, wanted, args.steps)
    _predict(store, wanted)
    rows = [row for case in wanted for row in store.of_case(case)]
    heading = common.heading("benchmarks.forecast_cpu", torch.device("cpu"))
    common.write_report(args.out, [heading, *forecast_report.paragraphs(rows)])
    common.show(*forecast_report.paragraphs(rows))


def _calibrate(store: Store, wanted: list[Case]) -> None:
    for busy in sorted({case.busy for case in wanted} - set(store.calibrated)):
        print(f"calibrating with {busy} busy processes", flush=True)
        store.calibrated[busy] = calibrate(busy)
        store.save()


def _measure(store: Store, wanted: list[Case], steps: int) -> None:
    for case in wanted:
        if not store.of_case(case):
            print("measuring", *case, flush=True)
            store.rows += measured_rows(case, store.calibrated[case.busy], steps)
            store.save()


def _predict(store: Store, wanted: list[Case]) -> None:
    for case in wanted:
        for row, recipe in zip(store.of_case(case), case.recipes):
            print("predicting", *case, recipe.strategy, flush=True)
            for name, value in predicted(case, recipe, store.calibrated[case.busy]).items():
                setattr(row, name, value)
        store.save()


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=LINKS, default=list(LINKS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"]
    )
    parser.add_argument(
        "--rows",
        type=Path,
        default=Path("benchmarks/results/forecast_cpu.json"),
        help="file of calibrations and measurements; default: %(default)s",
    )
    common.add_counts(parser, steps=10)
    common.add_out(parser, "benchmarks/results/forecast_cpu.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
