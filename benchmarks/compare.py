"""How fast is a training step, beside DDP and all forms of FSDP2, over the same links?

    python -m benchmarks.compare                     2 gloo ranks on this machine
    python -m benchmarks.compare --wire 4,1          over a modelled wire: 4 ms and 1 GB/s
    python -m benchmarks.compare --link-gbit 4       between network namespaces (root, Linux)
    python -m benchmarks.compare --mixed             in bfloat16, with a row in fp8
    torchrun --nproc-per-node 8 -m benchmarks.compare        NCCL, where there are GPUs

The same GPT, batch and SGD in every way, in one run: each round runs every way once, in a rotated
order. On a modelled wire (tests/recording.py) a collective takes its latency and its bytes' time,
one collective after the other. Each round then runs every way once more without the wire; the time
that the wire adds to a step is the exposed communication. The same group counts what a step sends.

On a CPU, FSDP2 waits for every gather at once unless it is told not to: "async" is its fair form
there. On GPUs --mixed has torchao's fp8 under FSDP2, too, if torchao is installed. Compiling is
timed with empty caches.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import common
from benchmarks.common import DDP, GRAPHSHARD, GRAPHSHARD_FP8
from benchmarks.gpt import GPT
from benchmarks.links import Wire, behind_wire, between_namespaces, parse_wire, positive
from benchmarks.memory import peak_is_known, peak_of
from benchmarks.models import parameter_bytes
from benchmarks.ways import Build, add_hooks, ddp, mixed_dtypes, mp_policy, sharded, sharding
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import Hardware
from graphshard.cost.model import CostModel
from graphshard.planning.plan import Plan
from graphshard.planning.simulate import simulate
from tests import ranks, recording

VOCAB, HEAD_DIM = 256, 64
MMAP_ENV = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # see benchmarks.memory


@dataclass(frozen=True)
class Job:
    """What every rank has to do.

    Attributes:
        rows: sequences in a batch of one rank.
        wire: the modelled wire; None: the links that there are.
        hardware: the planner's option.
        mixed: in bfloat16 and fp8, as ``benchmarks.ways.sharded`` does it.
    """

    dim: int
    layers: int
    context: int
    rows: int
    steps: int
    warm_up: int
    wire: Wire | None
    hardware: str
    mixed: bool

    def model(self) -> GPT:
        """Make the model on the CPU, with the same parameters in every call."""
        return GPT.seeded(
            torch.device("cpu"),
            dim=self.dim,
            layers=self.layers,
            head_dim=HEAD_DIM,
            vocab=VOCAB,
            context=self.context,
        )


class Prediction(NamedTuple):
    """The planner's forecast of a step without the optimizer."""

    total_us: float
    exposed_us: float


@dataclass(frozen=True)
class Result:
    """Measurements of one way to train on one rank; None where this machine cannot tell.

    Attributes:
        steps_s: seconds of each step, with the optimizer's.
        alone_s: the same without the modelled wire.
        first_s: seconds of the first step, which compiles.
        peak_bytes: memory of a GPU that one step adds to what was there before.
    """

    steps_s: list[float]
    alone_s: list[float]
    first_s: float
    predicted: Prediction | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Sent:
    """One step of a rank that trains in one way alone, on a CPU.

    Attributes:
        peak_bytes: the most resident memory.
        num_collectives: collectives of the step; ``num_bytes`` of their full buffers.
        max_in_flight: most collectives at once.
    """

    peak_bytes: int
    num_collectives: int
    num_bytes: int
    max_in_flight: int


# --- on a rank -----------------------------------------------------------------------------------


def ways(job: Job, device_type: str) -> dict[str, Build]:
    """Return all ways to train, graphshard last."""
    return {DDP: ddp, **sharded(device_type, mixed=job.mixed, hardware=job.hardware)}


class _Training:
    """A training of a copy of the model, in one way."""

    def __init__(self, job: Job, name: str, build: Build, mesh: DeviceMesh) -> None:
        self._device = torch.device(mesh.device_type)
        model = job.model().to(self._device)
        torch.manual_seed(dist.get_rank())
        self._ids = model.batch(job.rows, self._device)
        self._model = build(model, mesh)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        add_hooks(name, model, self._optimizer)

    def step(self) -> float:
        """Train one step, and return its seconds."""
        return common.timed(self.train, self._device).done_s

    def train(self) -> None:
        """Train one step."""
        self._model(self._ids).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(job: Job, device_type: str) -> dict[str, Result]:
    """Return the measurements of this rank by way to train, graphshard last."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    builds = ways(job, device_type)
    backend = sharding(mesh, hardware=job.hardware, mp_policy=mp_policy(job.mixed))
    builds[GRAPHSHARD] = lambda model, _: torch.compile(model, backend=backend)
    trainings = {name: _Training(job, name, build, mesh) for name, build in builds.items()}
    first_s = {name: training.step() for name, training in trainings.items()}
    alone_s: dict[str, list[float]] = {name: [] for name in trainings}

    def steps(name: str) -> float:
        alone_s[name].append(trainings[name].step())
        if job.wire is None:
            return alone_s[name][-1]
        recording.wire(*job.wire)
        try:
            return trainings[name].step()
        finally:
            recording.wire()

    runs = {name: functools.partial(steps, name) for name in trainings}
    steps_s = common.interleave(runs, job.steps, job.warm_up)
    cost_model = backend.options.schedule.cost_model(torch.device(device_type))
    return {
        name: Result(
            steps_s=steps_s[name],
            alone_s=alone_s[name][job.warm_up :],
            first_s=first_s[name],
            predicted=_predict(backend.plans, cost_model) if name == GRAPHSHARD else None,
            peak_bytes=_peak(training) if device_type == "cuda" else None,
        )
        for name, training in trainings.items()
    }


def _predict(plans: Sequence[Plan], cost_model: CostModel) -> Prediction:
    """Return the planner's forecast for the graphs of a step."""
    timelines = [simulate(plan.problem, plan.buckets, cost_model) for plan in plans]
    return Prediction(
        total_us=sum(timeline.total_us + timeline.lost_us for timeline in timelines),
        exposed_us=sum(sum(timeline.exposed_us) for timeline in timelines),
    )


def _peak(training: _Training) -> int:
    """Return what a step adds to the memory of the GPU, at most."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated() - before


def alone(job: Job, name: str) -> Sent:
    """Measure the way called ``name`` in a process that does nothing else."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training = _Training(job, name, ways(job, "cpu")[name], mesh)
    training.step()
    training.step()
    recording.clear()
    peak = peak_of(training.train, 0).peak
    collectives = recording.collectives()
    return Sent(
        peak_bytes=peak,
        num_collectives=len(collectives),
        num_bytes=sum(event.bytes for event in collectives),
        max_in_flight=recording.max_in_flight(),
    )


# --- in the parent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """All that was measured, by way to train.

    Attributes:
        results: of rank 0.
        sent: of the rank that needs most memory; empty where it was not measured.
        setting: the ranks and their links, in words.
    """

    results: dict[str, Result]
    sent: dict[str, Sent]
    setting: str


def on_this_machine(job: Job, world: int, with_sent: bool) -> Report:
    """Measure with ``world`` ranks on this machine."""
    with tempfile.TemporaryDirectory() as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        run = functools.partial(ranks.run_fresh, world, timeout_s=600.0)
        backend = recording.BACKEND if job.wire else "gloo"
        results = run(measure, job, "cpu", env={**ranks.RANK_ENV, **env}, backend=backend)[0]
        sent = {}
        if with_sent and peak_is_known():
            for name in results:
                for _ in range(2):  # the second finds its graphs compiled
                    each = run(alone, job, name, env={**env, **MMAP_ENV}, backend=recording.BACKEND)
                sent[name] = max(each, key=lambda of_rank: of_rank.peak_bytes)
    setting = f"{world} gloo ranks"
    if job.wire:
        alpha_ms, gb_per_s = job.wire.alpha_s * 1e3, job.wire.bytes_per_s / 1e9
        setting += f" on a modelled wire of {alpha_ms:g} ms and {gb_per_s:g} GB/s"
    return Report(results, sent, setting)


# --- output --------------------------------------------------------------------------------------


def paragraphs(job: Job, report: Report) -> list[str]:
    """Return the report as paragraphs of Markdown."""
    results = report.results
    halves = {name: median(result.steps_s) for name, result in results.items()}
    peers = {name: half for name, half in halves.items() if GRAPHSHARD not in name}
    forms = {name: half for name, half in peers.items() if name != DDP}
    best, form = min(peers, key=peers.__getitem__), min(forms, key=forms.__getitem__)
    predicted = results[GRAPHSHARD].predicted
    rows = [
        _row(job, name, halves[best], result, report.sent.get(name))
        for name, result in results.items()
    ]
    size = parameter_bytes(job.model()) / 4e6
    dtypes = mixed_dtypes(DDP) if job.mixed else "float32"
    work = (
        f"GPT of {job.layers} layers, d={job.dim}, {size:.1f} M parameters; {job.rows} × "
        f"{job.context} tokens on each rank, {dtypes}, SGD; {job.steps} steps; {report.setting}. "
        "Ratio: of medians, to the best other way. Exposed: time that the modelled wire adds to a "
        "step. First step: it compiles. Peak: resident, of a rank that does nothing else, or on a "
        "GPU what a step adds."
    )
    parts = [common.table(HEADERS, rows), work]
    if predicted is not None:
        total, exposed = (f"{us / 1e3:.1f} ms" for us in predicted)
        parts.append(f"predicted: forward and backward {total}, of which exposed {exposed}")
    ratios = [
        f"{name} {halves[name] / halves[best]:.2f} × {best}, "
        f"{halves[name] / halves[form]:.2f} × {form}"
        for name in (GRAPHSHARD, GRAPHSHARD_FP8)
        if name in halves
    ]
    return [*parts, f"step: {'; '.join(ratios)}"]


HEADERS = (
    *("training step", "tokens/s", "median ms", "quartiles", "ratio", "exposed ms", "peak MB"),
    *("collectives", "in flight", "MB sent", "first step s"),
)


def _row(job: Job, name: str, best_s: float, result: Result, sent: Sent | None) -> list[str]:
    """Return the cells of one way to train.

    Args:
        best_s: median step of the best other way.
    """
    half = median(result.steps_s)
    low, _, high = statistics.quantiles(result.steps_s, n=4)
    peak = sent.peak_bytes if sent else result.peak_bytes
    pairs = zip(result.steps_s, result.alone_s)
    added = None if job.wire is None else median([on - off for on, off in pairs]) * 1e3
    return [
        name,
        f"{job.rows * job.context / half:,.0f}",
        f"{half * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{half / best_s:.2f}",
        _or_dash(added),
        _or_dash(None if peak is None else peak / 1e6, 0),
        _or_dash(sent and sent.num_collectives, 0),
        _or_dash(sent and sent.max_in_flight, 0),
        _or_dash(sent and sent.num_bytes / 1e6),
        _or_dash(result.first_s),
    ]


def _or_dash(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def publish(job: Job, report: Report, out: Path) -> None:
    """Print the report, and write it with a chart to ``out``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = [common.heading("benchmarks.compare", device), *paragraphs(job, report)]
    out.parent.mkdir(parents=True, exist_ok=True)
    steps_s = {name: result.steps_s for name, result in report.results.items()}
    parts.insert(2, common.chart(steps_s, out.with_suffix(".svg")))
    common.show(*parts)
    common.write_report(out, parts)


def main() -> None:
    """Measure on this machine, between namespaces, or as a rank of torchrun."""
    args = _arguments()
    hardware = str(args.calibrated or "auto")
    if args.link_gbit is not None and "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.compare", *sys.argv[1:]]
        between_namespaces(command, args.link_gbit)
    elif "RANK" in os.environ:
        if args.wire:
            sys.exit("--wire: only without torchrun, which joins ranks that have real links")
        _under_torchrun(_job(args, hardware), args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if args.wire:
                base = Hardware.load(args.calibrated) if args.calibrated else HARDWARE["cpu"]
                path = Path(folder, "wire.json")
                path.write_text(behind_wire(base, args.wire, args.ranks).to_json())
                hardware = str(path)
            job = _job(args, hardware)
            report = on_this_machine(job, args.ranks, args.sent)
        publish(job, report, args.out)


def _job(args: argparse.Namespace, hardware: str) -> Job:
    return Job(
        dim=args.dim,
        layers=args.layers,
        context=args.context,
        rows=args.rows,
        steps=args.steps,
        warm_up=args.warm_up,
        wire=args.wire,
        hardware=hardware,
        mixed=args.mixed,
    )


def _under_torchrun(job: Job, args: argparse.Namespace) -> None:
    """Measure as one rank of a group that torchrun or :func:`between_namespaces` has started."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    results = measure(job, device_type)
    setting = f"{dist.get_world_size()} {dist.get_backend()} ranks"
    if args.link_gbit is not None:
        setting += f", between namespaces, {args.link_gbit:g} Gb/s"
    if dist.get_rank() == 0:
        publish(job, Report(results, {}, setting), args.out)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, ranks=2, dim=256, layers=6, context=64, rows=4, steps=20, warm_up=3)
    links = parser.add_mutually_exclusive_group()
    links.add_argument(
        "--wire", type=parse_wire, metavar="ALPHA_MS,GB_PER_S", help="a modelled wire"
    )
    links.add_argument("--link-gbit", type=positive, help="Gb/s between two network namespaces")
    parser.add_argument("--calibrated", type=Path, help="what `graphshard calibrate` wrote here")
    parser.add_argument("--mixed", action="store_true", help="in bfloat16 and in fp8")
    parser.add_argument("--brief", dest="sent", action="store_false", help="no memory, no counts")
    common.add_out(parser, "benchmarks/results/compare.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
