"""How fast is a training step, compared with DDP and with all variants of FSDP2?

    python -m benchmarks.compare                     2 gloo ranks on this machine
    python -m benchmarks.compare --wire 4,1          over a modelled wire: 4 ms and 1 GB/s
    python -m benchmarks.compare --wire 6,0.6 --planned-wire 4,1     planned for a faster wire
    python -m benchmarks.compare --mixed             in bfloat16, with a row in fp8
    torchrun --nproc-per-node 8 -m benchmarks.compare        over NCCL, if there are GPUs

All variants train the same GPT on the same batch with SGD over the same links, in one run: each
round runs every variant once, in rotating order. On a modelled wire (tests/recording.py),
collectives run one after the other, and each takes a latency plus the time of its bytes. Each round
then also runs every variant without the wire, and the difference is the exposed communication. The
process group in tests/recording.py also counts the bytes that a step sends.

On CPUs, FSDP2 by default waits for every gather at once; "async" rows avoid that, for a fair
comparison. On GPUs, --mixed includes torchao's fp8 under FSDP2 if torchao is installed. First steps
compile with empty caches, except under torchrun.
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
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import common
from benchmarks.common import DDP, GRAPHSHARD, GRAPHSHARD_FP8
from benchmarks.links import add_planned_wire, parse_wire, write_with_wire
from benchmarks.memory import give_memory_back, peak_is_known, peak_of
from benchmarks.models import GPT, parameter_bytes
from benchmarks.variants import Build, add_hooks, ddp, mp_policy, sharded, sharding
from graphshard.cost.devices import load_hardware
from graphshard.cost.model import CostModel
from graphshard.planning.plan import Plan
from graphshard.planning.simulate import simulate
from tests import ranks, recording

VOCAB, HEAD_DIM = 256, 64
MIXED = (
    f"bfloat16 reduced in float32 ({DDP} and rows named float32: all in float32; "
    "float8, fp8: all linears except the head compute, and their weights are gathered, in fp8)"
)


@dataclass(frozen=True)
class Result:
    """Measurements of one training variant on one rank.

    Attributes:
        steps_s: seconds of each step, including the optimizer.
        unwired_s: seconds of each step without the modelled wire.
        first_s: seconds of the first step, which compiles.
        predicted_us: predicted total and exposed time of a step, without the optimizer; None unless
            the variant is graphshard.
        peak_bytes: peak GPU memory of a step, minus memory allocated before; None on a CPU.
    """

    steps_s: list[float]
    unwired_s: list[float]
    first_s: float
    predicted_us: tuple[float, float] | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Sent:
    """Memory and communication of one step, on a CPU rank that trains only one variant.

    Attributes:
        peak_bytes: peak resident memory.
        num_bytes: size of the collectives' full buffers.
        max_in_flight: largest number of collectives in flight at once.
    """

    peak_bytes: int
    num_collectives: int
    num_bytes: int
    max_in_flight: int


# --- on a rank -----------------------------------------------------------------------------------


def _model(args: argparse.Namespace) -> GPT:
    sizes = {"dim": args.dim, "layers": args.layers, "context": args.context}
    return GPT.seeded(torch.device("cpu"), **sizes, head_dim=HEAD_DIM, vocab=VOCAB)


def variants(args: argparse.Namespace, device_type: str) -> dict[str, Build]:
    return {DDP: ddp, **sharded(device_type, mixed=args.mixed, hardware=args.hardware)}


class _Training:
    def __init__(self, args: argparse.Namespace, name: str, build: Build, mesh: DeviceMesh) -> None:
        self._device = torch.device(mesh.device_type)
        model = _model(args).to(self._device)
        torch.manual_seed(dist.get_rank())
        self._ids = model.batch(args.rows, self._device)
        self._model = build(model, mesh)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        add_hooks(name, model, self._optimizer)

    def step(self) -> float:
        return common.timed(self.train, self._device).done_s

    def train(self) -> None:
        self._model(self._ids).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(args: argparse.Namespace, device_type: str) -> dict[str, Result]:
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    builds = variants(args, device_type)
    backend = sharding(mesh, hardware=args.hardware, mp_policy=mp_policy(args.mixed))
    builds[GRAPHSHARD] = lambda model, _: torch.compile(model, backend=backend)
    trainings = {name: _Training(args, name, build, mesh) for name, build in builds.items()}
    first_s = {name: training.step() for name, training in trainings.items()}
    unwired_s: dict[str, list[float]] = {name: [] for name in trainings}

    def steps(name: str) -> float:
        unwired_s[name].append(trainings[name].step())
        if args.wire is None:
            return unwired_s[name][-1]
        recording.wire(*args.wire)
        try:
            return trainings[name].step()
        finally:
            recording.wire()

    runs = {name: functools.partial(steps, name) for name in trainings}
    steps_s = common.interleave(runs, args.steps, args.warm_up)
    cost_model = backend.options.schedule.cost_model(torch.device(device_type))
    return {
        name: Result(
            steps_s=steps_s[name],
            unwired_s=unwired_s[name][args.warm_up :],
            first_s=first_s[name],
            predicted_us=_predict(backend.plans, cost_model) if name == GRAPHSHARD else None,
            peak_bytes=_peak(training) if device_type == "cuda" else None,
        )
        for name, training in trainings.items()
    }


def _predict(plans: Sequence[Plan], cost_model: CostModel) -> tuple[float, float]:
    timelines = [simulate(plan.problem, plan.buckets, cost_model) for plan in plans]
    total_us = sum(timeline.total_us + timeline.slowdown_us for timeline in timelines)
    return total_us, sum(sum(timeline.exposed_us) for timeline in timelines)


def _peak(training: _Training) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated() - before


def measure_sent(args: argparse.Namespace, name: str) -> Sent:
    give_memory_back()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training = _Training(args, name, variants(args, "cpu")[name], mesh)
    training.step()
    training.step()
    recording.clear()
    peak = peak_of(training.train).peak
    events = recording.collectives()
    in_flight = recording.max_in_flight()
    return Sent(peak, len(events), sum(event.bytes for event in events), in_flight)


# --- in the parent -------------------------------------------------------------------------------


def on_this_machine(
    args: argparse.Namespace,
) -> tuple[dict[str, Result], dict[str, Sent]]:
    """Return results of rank 0, and memory and communication of the rank with the highest peak."""
    with tempfile.TemporaryDirectory() as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        run = functools.partial(ranks.run_fresh, args.ranks, timeout_s=600.0, import_env=env)
        backend = recording.BACKEND if args.wire else "gloo"
        results = run(measure, args, "cpu", backend=backend)[0]
        sent = {}
        if args.sent and peak_is_known():
            for name in results:
                for _ in range(2):  # the second run finds its graphs in the cache
                    each = run(measure_sent, args, name, backend=recording.BACKEND)
                sent[name] = max(each, key=lambda of_rank: of_rank.peak_bytes)
    return results, sent


def main() -> None:
    args = _arguments()
    if args.planned_wire and not args.wire:
        sys.exit("--planned-wire: needs --wire, the wire that steps are run on")
    if "RANK" in os.environ:
        if args.wire:
            sys.exit("--wire: not supported under torchrun, where ranks have real links; omit it")
        _under_torchrun(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if args.wire:
                base = load_hardware("cpu" if args.hardware == "auto" else args.hardware)
                wire = args.planned_wire or args.wire
                args.hardware = write_with_wire(base, wire, args.ranks, folder)
            results, sent = on_this_machine(args)
        setting = f"{args.ranks} gloo ranks"
        if args.wire:
            setting += f" on a modelled wire of {args.wire}"
        if args.planned_wire:
            setting += f", planned for {args.planned_wire}"
        publish(args, results, sent, setting)


def _under_torchrun(args: argparse.Namespace) -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    results = measure(args, device_type)
    setting = f"{dist.get_world_size()} {dist.get_backend()} ranks"
    if dist.get_rank() == 0:
        publish(args, results, {}, setting)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, ranks=2, dim=256, layers=6, context=64, rows=4, steps=20, warm_up=3)
    parser.add_argument(
        "--wire", type=parse_wire, metavar="ALPHA_MS,GB_PER_S", help="a modelled wire"
    )
    add_planned_wire(parser)
    calibrated = "file of `graphshard calibrate` on this machine"
    parser.add_argument("--calibrated", dest="hardware", default="auto", help=calibrated)
    parser.add_argument("--mixed", action="store_true", help="in bfloat16 and in fp8")
    parser.add_argument(
        "--brief", dest="sent", action="store_false", help="do not measure memory and communication"
    )
    common.add_out(parser, "benchmarks/results/compare.md")
    return parser.parse_args()


# --- output --------------------------------------------------------------------------------------


def paragraphs(
    args: argparse.Namespace, results: dict[str, Result], sent: dict[str, Sent], setting: str
) -> list[str]:
    medians = {name: median(result.steps_s) for name, result in results.items()}
    peers = {name: seconds for name, seconds in medians.items() if GRAPHSHARD not in name}
    best = min(peers, key=peers.__getitem__)
    best_fsdp2 = min(peers.keys() - {DDP}, key=peers.__getitem__)
    rows = [
        _row(args, name, medians[best], result, sent.get(name)) for name, result in results.items()
    ]
    size = parameter_bytes(_model(args)) / 4e6
    dtypes = MIXED if args.mixed else "float32"
    note = (
        f"GPT of {args.layers} layers, d={args.dim}, {size:.1f} M parameters; {args.rows} × "
        f"{args.context} tokens on each rank, {dtypes}, SGD; {args.steps} steps; {setting}. "
        "Ratio: of medians, to the best other variant. Exposed: time that the modelled wire adds "
        "to a step. First step: includes compiling. Peak: resident memory of a rank that trains "
        "only this variant or, on a GPU, the memory that a step adds."
    )
    parts = [common.table(rows), note]
    predicted_us = results[GRAPHSHARD].predicted_us
    if predicted_us is not None:
        total, exposed = (f"{us / 1e3:.1f} ms" for us in predicted_us)
        parts.append(f"predicted: forward and backward {total}, including {exposed} exposed")
    ratios = [
        f"{name} {medians[name] / medians[best]:.2f} × {best}, "
        f"{medians[name] / medians[best_fsdp2]:.2f} × {best_fsdp2}"
        for name in (GRAPHSHARD, GRAPHSHARD_FP8)
        if name in medians
    ]
    return [*parts, f"step: {'; '.join(ratios)}"]


def _row(
    args: argparse.Namespace, name: str, best_s: float, result: Result, sent: Sent | None
) -> dict[str, str]:
    """Return the table row of one variant.

    Args:
        best_s: median step time of the fastest variant other than graphshard's.
    """
    half = median(result.steps_s)
    steps_s = result.steps_s if len(result.steps_s) > 1 else result.steps_s * 2
    low, _, high = statistics.quantiles(steps_s, n=4)
    peak = sent.peak_bytes if sent else result.peak_bytes
    pairs = zip(result.steps_s, result.unwired_s)
    exposed_s = None if args.wire is None else median([wired - without for wired, without in pairs])
    return {
        "training step": name,
        "tokens/s": f"{args.rows * args.context / half:,.0f}",
        "median ms": f"{half * 1e3:.1f}",
        "quartiles": f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        "ratio": f"{half / best_s:.2f}",
        "exposed ms": _or_dash(None if exposed_s is None else exposed_s * 1e3),
        "peak MB": _or_dash(None if peak is None else peak / 1e6, 0),
        "collectives": _or_dash(sent and sent.num_collectives, 0),
        "in flight": _or_dash(sent and sent.max_in_flight, 0),
        "MB sent": _or_dash(sent and sent.num_bytes / 1e6),
        "first step s": _or_dash(result.first_s),
    }


def _or_dash(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def publish(
    args: argparse.Namespace, results: dict[str, Result], sent: dict[str, Sent], setting: str
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = common.heading("benchmarks.compare", device)
    parts = [head, *paragraphs(args, results, sent, setting)]
    common.show(*parts)
    common.write_report(args.out, parts)


if __name__ == "__main__":
    main()
