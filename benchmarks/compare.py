"""How fast is a training step, compared with DDP and with all variants of FSDP2?

    python -m benchmarks.compare                     2 gloo ranks on this machine
    python -m benchmarks.compare --wire 4,1          over a modelled wire: 4 ms and 1 GB/s
    python -m benchmarks.compare --wire 6,0.6 --planned-wire 4,1     planned for a faster wire
    python -m benchmarks.compare --link-gbit 4       between network namespaces (root, Linux)
    python -m benchmarks.compare --mixed             in bfloat16, with a row in fp8
    torchrun --nproc-per-node 8 -m benchmarks.compare        over NCCL, if there are GPUs

All variants train the same GPT on the same batch with SGD over the same links, in one run: each
round runs every variant once, in rotating order. On a modelled wire (tests/recording.py) a
collective takes the latency plus the time of its bytes, one collective after the other. Each round
then also runs every variant without the wire, and the difference is the exposed communication. The
process group in tests/recording.py also counts what a step sends.

On CPUs, FSDP2 by default waits for every gather at once; "async" rows avoid that, for a fair
comparison. On GPUs, --mixed includes torchao's fp8 under FSDP2 if torchao is installed. First steps
compile with empty caches, except with --link-gbit and under torchrun.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import common
from benchmarks.common import DDP, GRAPHSHARD
from benchmarks.compare_report import Job, Prediction, Report, Result, Sent, publish
from benchmarks.links import (
    add_planned_wire,
    between_namespaces,
    parse_wire,
    positive,
    write_with_wire,
)
from benchmarks.memory import peak_is_known, peak_of
from benchmarks.variants import Build, add_hooks, ddp, mp_policy, sharded, sharding
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import Hardware
from graphshard.cost.model import CostModel
from graphshard.planning.plan import Plan
from graphshard.planning.simulate import simulate
from tests import ranks, recording

MMAP_ENV = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # see benchmarks.memory


# --- on a rank -----------------------------------------------------------------------------------


def variants(job: Job, device_type: str) -> dict[str, Build]:
    """Return all training variants, graphshard last."""
    return {DDP: ddp, **sharded(device_type, mixed=job.mixed, hardware=job.hardware)}


class _Training:
    """A copy of the model, trained by one variant."""

    def __init__(self, job: Job, name: str, build: Build, mesh: DeviceMesh) -> None:
        self._device = torch.device(mesh.device_type)
        model = job.model().to(self._device)
        torch.manual_seed(dist.get_rank())
        self._ids = model.batch(job.rows, self._device)
        self._model = build(model, mesh)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        add_hooks(name, model, self._optimizer)

    def step(self) -> float:
        """Train one step and return its seconds."""
        return common.timed(self.train, self._device).done_s

    def train(self) -> None:
        """Train one step."""
        self._model(self._ids).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(job: Job, device_type: str) -> dict[str, Result]:
    """Return this rank's measurements of each variant, graphshard last."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    builds = variants(job, device_type)
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
    """Return the planner's prediction for the graphs of a step."""
    timelines = [simulate(plan.problem, plan.buckets, cost_model) for plan in plans]
    return Prediction(
        total_us=sum(timeline.total_us + timeline.slowdown_us for timeline in timelines),
        exposed_us=sum(sum(timeline.exposed_us) for timeline in timelines),
    )


def _peak(training: _Training) -> int:
    """Return the peak GPU memory of a step, minus what was allocated before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated() - before


def alone(job: Job, name: str) -> Sent:
    """Measure variant ``name`` in a process that does nothing else."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training = _Training(job, name, variants(job, "cpu")[name], mesh)
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


def on_this_machine(job: Job, world: int, with_sent: bool) -> Report:
    """Measure with ``world`` ranks on this machine.

    Args:
        with_sent: whether to also measure each variant's memory and what it sends.
    """
    with tempfile.TemporaryDirectory() as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        run = functools.partial(ranks.run_fresh, world, timeout_s=600.0)
        backend = recording.BACKEND if job.wire else "gloo"
        results = run(measure, job, "cpu", env={**ranks.RANK_ENV, **env}, backend=backend)[0]
        sent = {}
        if with_sent and peak_is_known():
            for name in results:
                for _ in range(2):  # the second run finds its graphs in the cache
                    each = run(alone, job, name, env={**env, **MMAP_ENV}, backend=recording.BACKEND)
                sent[name] = max(each, key=lambda of_rank: of_rank.peak_bytes)
    setting = f"{world} gloo ranks"
    if job.wire:
        setting += f" on a modelled wire of {job.wire}"
    if job.planned_wire:
        setting += f", planned for {job.planned_wire}"
    return Report(results, sent, setting)


def main() -> None:
    """Measure on this machine, between namespaces, or as one rank under torchrun."""
    args = _arguments()
    hardware = str(args.calibrated or "auto")
    if args.planned_wire and not args.wire:
        sys.exit("--planned-wire: needs --wire, the wire that steps are run on")
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
                planned_wire = args.planned_wire or args.wire
                hardware = write_with_wire(base, planned_wire, args.ranks, folder)
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
        planned_wire=args.planned_wire,
        hardware=hardware,
        mixed=args.mixed,
    )


def _under_torchrun(job: Job, args: argparse.Namespace) -> None:
    """Measure as one rank of a group that torchrun or :func:`between_namespaces` started."""
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
    add_planned_wire(parser)
    links.add_argument("--link-gbit", type=positive, help="Gb/s between two network namespaces")
    parser.add_argument("--calibrated", type=Path, help="what `graphshard calibrate` wrote here")
    parser.add_argument("--mixed", action="store_true", help="in bfloat16 and in fp8")
    parser.add_argument("--brief", dest="sent", action="store_false", help="no memory, no counts")
    common.add_out(parser, "benchmarks/results/compare.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
