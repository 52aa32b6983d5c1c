"""How fast is a training step, beside DDP and all forms of FSDP2, over the same links?

    python -m benchmarks.compare                     2 gloo ranks on this machine
    python -m benchmarks.compare --wire 4,1          over a modelled wire: 4 ms and 1 GB/s
    python -m benchmarks.compare --link-gbit 4       between network namespaces (root, Linux)
    python -m benchmarks.compare --mixed             in bfloat16, with a row in fp8
    torchrun --nproc-per-node 8 -m benchmarks.compare        NCCL, where there are GPUs

The same GPT, batch and SGD in every way, in one run: each round runs every way once, in a rotated
order. On a modelled wire (tests/recording.py) a collective takes its latency and its bytes' time, one
after the other; each round then runs every way once more without it, and what the wire adds to the
step is the communication that was not hidden. What a step sends is counted on the same group. FSDP2
waits for every gather at once on a CPU, unless it is told not to: "async" is its fair form there. On
GPUs --mixed has torchao's fp8 under FSDP2, too, where torchao is installed. Compiling is timed with
empty caches.
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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.common import (
    DDP,
    GRAPHSHARD,
    GRAPHSHARD_FP8,
    chart,
    count,
    heading,
    interleave,
    median,
    show,
    table,
    timed,
)
from benchmarks.links import behind_wire, between_namespaces, positive, wire_of
from benchmarks.memory import peak_is_known, peak_of
from benchmarks.models import GPT, parameter_bytes
from benchmarks.ways import Build, add_hooks, ddp, mixed_dtypes, mp_policy, sharded, sharding
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import Hardware
from tests import ranks, recording

VOCAB, HEAD_DIM = 256, 64
MMAP_ENV = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # see benchmarks.memory


@dataclass(frozen=True)
class Job:
    """What every rank is told; ``wire`` is seconds and bytes/s, ``hardware`` the planner's; ``mixed``:
    in bfloat16 and fp8 as ``benchmarks.ways.sharded`` has it."""

    dim: int
    layers: int
    context: int
    rows: int
    steps: int
    warm_up: int
    wire: tuple[float, float] | None
    hardware: str
    mixed: bool

    def model(self) -> GPT:
        torch.manual_seed(0)
        heads = max(1, self.dim // HEAD_DIM)
        sizes = {"dim": self.dim, "layers": self.layers, "heads": heads}
        return GPT(**sizes, vocab=VOCAB, context=self.context)


@dataclass(frozen=True)
class Result:
    """Of one way to train, on one rank; None where this machine cannot tell.

    Attributes:
        steps_s: each step, with the optimizer's; ``alone_s`` without the modelled wire.
        first_s: the first step, which compiles.
        predicted_us: the planner's step without the optimizer, and how much of it is exposed.
        peak_bytes: of one step above what was there before, on a GPU.
    """

    steps_s: list[float]
    alone_s: list[float]
    first_s: float
    predicted_us: tuple[float, float] | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Sent:
    """In a step of a rank that trains in one way alone, on a CPU.

    Attributes:
        peak_bytes: resident.
        collectives, num_bytes, in_flight: how many, of full buffers, most at once.
    """

    peak_bytes: int
    collectives: int
    num_bytes: int
    in_flight: int


# --- on a rank -----------------------------------------------------------------------------------


def ways(job: Job, device_type: str) -> dict[str, Build]:
    """All there are, ours last."""
    return {DDP: ddp, **sharded(device_type, mixed=job.mixed, hardware=job.hardware)}


class _Training:
    """One way to train a copy of the model."""

    def __init__(self, job: Job, name: str, build: Build, mesh: DeviceMesh) -> None:
        self._device = torch.device(mesh.device_type)
        model = job.model().to(self._device)
        torch.manual_seed(dist.get_rank())
        self._ids = model.batch(job.rows, self._device)
        self._model = build(model, mesh)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        add_hooks(name, model, self._optimizer)

    def step(self) -> float:
        return timed(self.train, self._device).done_s

    def train(self) -> None:
        self._model(self._ids).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(job: Job, device_type: str) -> dict[str, Result]:
    """By way to train, ours last."""
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
    steps_s = interleave(runs, job.steps, job.warm_up)
    costs = backend.options.schedule.cost_model(torch.device(device_type))
    return {
        name: Result(
            steps_s[name],
            alone_s[name][job.warm_up :],
            first_s[name],
            _predicted(backend.plans, costs) if name == GRAPHSHARD else None,
            _peak(training) if device_type == "cuda" else None,
        )
        for name, training in trainings.items()
    }


def _predicted(plans: Sequence[Any], costs: Any) -> tuple[float, float]:
    from graphshard.planning.simulate import simulate

    lines = [simulate(plan.problem, plan.buckets, costs) for plan in plans]
    total_us = sum(line.total_us + line.lost_us for line in lines)
    return total_us, sum(sum(line.exposed_us) for line in lines)


def _peak(training: _Training) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated() - before


def alone(job: Job, name: str) -> Sent:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training = _Training(job, name, ways(job, "cpu")[name], mesh)
    training.step()
    training.step()
    recording.clear()
    peak = peak_of(training.train, 0).peak
    sent = recording.collectives()
    num_bytes = sum(event.bytes for event in sent)
    return Sent(peak, len(sent), num_bytes, recording.max_in_flight())


# --- where it runs -------------------------------------------------------------------------------


def on_this_machine(
    job: Job, world: int, with_sent: bool
) -> tuple[dict[str, Result], dict[str, Sent]]:
    """What rank 0 measured, and by way what the rank holds and sends that holds most."""
    with tempfile.TemporaryDirectory() as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        run = functools.partial(ranks.run_fresh, world, timeout_s=600.0)
        backend = recording.BACKEND if job.wire else "gloo"
        found = run(measure, job, "cpu", env={**ranks.RANK_ENV, **env}, backend=backend)
        sent = {}
        if with_sent and peak_is_known():
            for name in found[0]:
                for _ in range(2):  # the second finds its graphs compiled
                    each = run(alone, job, name, env={**env, **MMAP_ENV}, backend=recording.BACKEND)
                sent[name] = max(each, key=lambda one: one.peak_bytes)
    return found[0], sent


# --- what is printed -----------------------------------------------------------------------------


def report(job: Job, found: dict[str, Result], sent: dict[str, Sent], where: str) -> list[str]:
    """Paragraphs of Markdown."""
    halves = {name: median(result.steps_s) for name, result in found.items()}
    peers = {name: half for name, half in halves.items() if GRAPHSHARD not in name}
    forms = {name: half for name, half in peers.items() if name != DDP}
    best, form = min(peers, key=peers.__getitem__), min(forms, key=forms.__getitem__)
    ours = found[GRAPHSHARD]
    lines = [_row(job, name, halves[best], it, sent.get(name)) for name, it in found.items()]
    size = parameter_bytes(job.model()) / 4e6
    dtypes = mixed_dtypes(DDP) if job.mixed else "float32"
    work = (
        f"GPT of {job.layers} layers, d={job.dim}, {size:.1f} M parameters; {job.rows} × "
        f"{job.context} tokens on each rank, {dtypes}, SGD; {job.steps} steps; {where}. Ratio: of "
        "medians, to the best other way. Exposed: what the modelled wire adds to a step. First "
        "step: it compiles. Peak: resident, of a rank that does nothing else, or on a GPU what a "
        "step adds."
    )
    parts = [table(HEADERS, lines), work]
    if ours.predicted_us is not None:
        total, exposed = (f"{us / 1e3:.1f} ms" for us in ours.predicted_us)
        parts.append(f"predicted: forward and backward {total}, of which exposed {exposed}")
    ratios = [
        f"{name} {halves[name] / halves[best]:.2f} × {best}, {halves[name] / halves[form]:.2f} × {form}"
        for name in (GRAPHSHARD, GRAPHSHARD_FP8)
        if name in halves
    ]
    return [*parts, f"step: {'; '.join(ratios)}"]


HEADERS = (
    *("training step", "tokens/s", "median ms", "quartiles", "ratio", "exposed ms", "peak MB"),
    *("collectives", "in flight", "MB sent", "first step s"),
)


def _row(job: Job, name: str, best_s: float, it: Result, sent: Sent | None) -> list[str]:
    half = median(it.steps_s)
    low, _, high = statistics.quantiles(it.steps_s, n=4)
    peak = sent.peak_bytes if sent else it.peak_bytes
    pairs = zip(it.steps_s, it.alone_s)
    added = None if job.wire is None else median([on - off for on, off in pairs]) * 1e3
    return [
        name,
        f"{job.rows * job.context / half:,.0f}",
        f"{half * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{half / best_s:.2f}",
        _or_dash(added),
        _or_dash(None if peak is None else peak / 1e6, 0),
        _or_dash(sent and sent.collectives, 0),
        _or_dash(sent and sent.in_flight, 0),
        _or_dash(sent and sent.num_bytes / 1e6),
        _or_dash(it.first_s),
    ]


def _or_dash(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def publish(
    job: Job, found: dict[str, Result], sent: dict[str, Sent], where: str, out: Path
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = [heading("benchmarks.compare", device), *report(job, found, sent, where)]
    out.parent.mkdir(parents=True, exist_ok=True)
    parts.insert(
        2, chart({name: it.steps_s for name, it in found.items()}, out.with_suffix(".svg"))
    )
    show(*parts)
    out.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    args = _arguments()
    sizes = (args.dim, args.layers, args.context, args.rows, args.steps, args.warm_up)
    hardware = str(args.calibrated or "auto")
    if args.link_gbit is not None and "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.compare", *sys.argv[1:]]
        between_namespaces(command, args.link_gbit)
    elif "RANK" in os.environ:
        if args.wire:
            sys.exit("--wire: only without torchrun, which joins ranks that have real links")
        _under_torchrun(Job(*sizes, None, hardware, args.mixed), args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if args.wire:
                base = Hardware.load(args.calibrated) if args.calibrated else HARDWARE["cpu"]
                linked = behind_wire(base, *args.wire, args.ranks)
                path = Path(folder, "wire.json")
                path.write_text(linked.to_json())
                hardware = str(path)
            job = Job(*sizes, args.wire, hardware, args.mixed)
            found, sent = on_this_machine(job, args.ranks, args.sent)
        where = f"{args.ranks} gloo ranks"
        if args.wire:
            where += (
                f" on a modelled wire of {args.wire[0] * 1e3:g} ms and {args.wire[1] / 1e9:g} GB/s"
            )
        publish(job, found, sent, where, args.out)


def _under_torchrun(job: Job, args: argparse.Namespace) -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    found = measure(job, device_type)
    where = f"{dist.get_world_size()} {dist.get_backend()} ranks"
    if args.link_gbit is not None:
        where += f", between namespaces, {args.link_gbit:g} Gb/s"
    if dist.get_rank() == 0:
        publish(job, found, {}, where, args.out)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    defaults = {"ranks": 2, "dim": 256, "layers": 6, "context": 64, "rows": 4}
    for name, value in (defaults | {"steps": 20, "warm-up": 3}).items():
        options.add_argument(f"--{name}", type=count, default=value, help="default: %(default)s")
    links = options.add_mutually_exclusive_group()
    links.add_argument("--wire", type=wire_of, metavar="ALPHA_MS,GB_PER_S", help="a modelled wire")
    links.add_argument("--link-gbit", type=positive, help="Gb/s between two network namespaces")
    options.add_argument("--calibrated", type=Path, help="what `graphshard calibrate` wrote here")
    options.add_argument("--mixed", action="store_true", help="in bfloat16 and in fp8")
    options.add_argument("--brief", dest="sent", action="store_false", help="no memory, no counts")
    results = Path("benchmarks/results/compare.md")
    options.add_argument("--out", type=Path, default=results, help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
