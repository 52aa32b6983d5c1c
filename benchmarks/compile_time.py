"""How long does the first step take, and how does that grow with depth?

    python -m benchmarks.compile_time [--layers 4 12 24 48] [--dim 128] [--ranks 1] [--repeats 1]
        [--variants "graphshard, regions" ...] [--device cpu|cuda] [--out FILE]

Measures the time to the first gradient of a GPT, in new processes with their own
TORCHINDUCTOR_CACHE_DIR: cold with an empty folder, then warm with the same folder. The time
includes sharding, but neither imports nor work that a compiler does once per machine, such as
precompiled headers and probes of the processor: a graph of one op is compiled first.

"step" is the median time of later steps, and "peak" is the resident memory that a later step adds
at its peak. Ranks share the machine's cores, and the slowest rank counts. Every other repeat runs
the variants in reverse order.

The first process to compile reads the compiler from disk, so one extra process runs first and is
not counted. Skip it with --no-warm-up if something was compiled just before.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.utils import compilation_time_metrics
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from benchmarks import common, memory
from benchmarks.common import FSDP2_BLOCKS, PLAIN
from benchmarks.models import GPT
from benchmarks.variants import Build, Trained, fsdp2_compiled_blocks, plain
from graphshard.pipeline import compile as pipeline
from graphshard.pipeline import partition
from graphshard.ranks.plan_consensus import PlanConsensus

WHOLE, REGIONS = "graphshard, whole", "graphshard, regions"
VOCAB, CONTEXT, ROWS, HEAD_DIM, STEPS = 4096, 64, 2, 32, 20


def _one_line(model: GPT, mesh: DeviceMesh, *, regions: bool) -> Trained:
    schedule = graphshard.SchedulePolicy(regions=regions)
    return torch.compile(model, backend=graphshard.backend(mesh, schedule=schedule))


VARIANTS: dict[str, Build] = {
    PLAIN: plain,
    FSDP2_BLOCKS: fsdp2_compiled_blocks,
    WHOLE: functools.partial(_one_line, regions=False),
    REGIONS: functools.partial(_one_line, regions=True),
}


@dataclass(frozen=True)
class First:
    """The first forward and backward of a run, and steps after it.

    Attributes:
        seconds: time of the first forward and backward.
        parts: seconds of each part of that time, keyed by name; see ``parts_of``.
        graphs: number of graphs that Inductor generated code for, including subgraphs.
        files: number of runs of the C++ compiler.
        step_s: median time of later steps, in seconds.
        peak: bytes that a later step adds to resident memory at its peak.
    """

    seconds: float
    parts: dict[str, float]
    graphs: int
    files: int
    step_s: float
    peak: int


@dataclass(frozen=True)
class Setting:
    variant: str
    layers: int
    dim: int
    ranks: int
    device: str


def main() -> None:
    """Measure and print tables; in a child process, measure once and print the result as JSON."""
    args = _arguments()
    if args.measure:
        _measure(Setting(**json.loads(args.measure)), args.rank, args.store)
        return
    device = common.pick_device(args.device)
    paragraphs = [common.heading("benchmarks.compile_time", device)]
    common.show(*paragraphs)
    if args.warm_up:
        with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
            _in_new_processes(Setting(PLAIN, 1, args.dim, 1, device.type), cache, args.timeout)
    for ranks in args.ranks:
        for layers in args.layers:
            settings = [
                Setting(variant, layers, args.dim, ranks, device.type)
                for variant in args.variants
                if ranks == 1 or variant != PLAIN  # which does not shard
            ]
            cold, warm = _repeat(settings, args)
            note = f"{layers} layers, d={args.dim}, {ranks} ranks; median of {args.repeats}"
            paragraphs += [f"## {note}", _table(cold, warm), _split(cold)]
            common.show(*paragraphs[-3:])
            common.write_report(args.out, paragraphs)


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__, with_device=True)
    counts: dict[str, Any] = {"nargs": "+", "type": common.count, "metavar": "N"}
    parser.add_argument("--layers", default=[4], help="default: 4", **counts)
    parser.add_argument("--ranks", default=[1], help="default: 1", **counts)
    common.add_variants(parser, VARIANTS)
    common.add_counts(parser, dim=128, repeats=1)
    parser.add_argument(
        "--warm-up", action=argparse.BooleanOptionalAction, default=True, help="see above"
    )
    limit = "seconds that one process may take; default: %(default)s"
    parser.add_argument("--timeout", type=common.count, default=600, metavar="S", help=limit)
    common.add_out(parser)
    for hidden in ("measure", "store"):  # for the child processes
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


Runs = dict[str, list[First]]
"""Results of each repeat, by variant."""


def _repeat(settings: Sequence[Setting], args: argparse.Namespace) -> tuple[Runs, Runs]:
    cold: Runs = {setting.variant: [] for setting in settings}
    warm: Runs = {setting.variant: [] for setting in settings}
    for repeat in range(args.repeats):
        for setting in settings if repeat % 2 == 0 else settings[::-1]:
            with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
                for runs in (cold, warm):
                    first = _in_new_processes(setting, cache, args.timeout)
                    runs[setting.variant].append(first)
    return cold, warm


def _in_new_processes(setting: Setting, cache: str, timeout_s: float) -> First:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "GLOO_SOCKET_IFNAME": "lo"}
    env.pop("TRITON_CACHE_DIR", None)  # Inductor then uses its own subfolder
    command = [sys.executable, "-m", "benchmarks.compile_time"]
    command += ["--measure", json.dumps(dataclasses.asdict(setting))]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(
                    [*command, "--rank", str(rank), "--store", f"{folder}/store"],
                    env=env,
                    cwd=Path(__file__).resolve().parents[1],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(setting.ranks)
        ]
        for process in processes:
            running.callback(process.kill)
        out, *_ = [process.communicate(timeout=timeout_s)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"{setting}: a rank failed")
    return First(**json.loads(out.splitlines()[-1]))


# --- in the child processes ----------------------------------------------------------------------


def _measure(setting: Setting, rank: int, store: str) -> None:
    device = torch.device(setting.device)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    shared = dist.FileStore(store, setting.ranks)
    dist.init_process_group(backend, store=shared, rank=rank, world_size=setting.ranks)
    _make_headers(device)
    first = _first_step(setting, device, init_device_mesh(device.type, (setting.ranks,)))
    slowest: list[Any] = [None] * setting.ranks
    dist.all_gather_object(slowest, first)
    if rank == 0:
        print(json.dumps(dataclasses.asdict(max(slowest, key=lambda f: f.seconds))), flush=True)
    dist.destroy_process_group()


def _make_headers(device: torch.device) -> None:
    """Compile a graph of one op, so that headers exist, and clear the metrics."""
    torch.compile(torch.sin)(torch.ones(64, device=device))
    torch._dynamo.reset()
    compilation_time_metrics.clear()


def _first_step(setting: Setting, device: torch.device, mesh: DeviceMesh) -> First:
    model = GPT.seeded(
        device,
        dim=setting.dim,
        layers=setting.layers,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        context=CONTEXT,
    )
    ids = model.batch(ROWS, device)
    dist.barrier()

    def first_step() -> None:
        nonlocal compiled
        compiled = VARIANTS[setting.variant](model, mesh)
        compiled(ids).backward()

    compiled: Any = None
    with timed_parts() as ours:
        seconds = common.timed(first_step, device).done_s
    parts = parts_of(seconds, ours, setting)
    metrics = dict(compilation_time_metrics)

    def step() -> None:
        compiled(ids).backward()
        model.zero_grad()

    dist.barrier()
    step_s = median(common.timed(step, device).done_s for _ in range(STEPS))
    used = memory.peak_of(step)
    return First(
        seconds=seconds,
        parts=parts,
        graphs=len(metrics.get("GraphLowering.codegen", ())),
        files=len(metrics.get("compile_file", ())),
        step_s=step_s,
        peak=used.peak - used.before,
    )


def parts_of(seconds: float, ours: dict[str, float], setting: Setting) -> dict[str, float]:
    """Return the seconds of each part of a first step.

    The parts are Dynamo; AOTAutograd's trace; Inductor's passes over the joint graph, with the
    partitioner; graphshard's passes, planning and plan consensus; Inductor for forward and
    backward; and the rest (sharding, guards, the step itself).

    Args:
        seconds: time of the whole step.
        ours: result of ``timed_parts``.
    """
    cut, lowering = ours.get("cut", 0.0), ours.get("lowering", 0.0)
    # graphshard/_torch/cpp_kernels.py moves these waits out of ``compile_fx_inner``.
    waits_later = setting.variant in (WHOLE, REGIONS) and setting.device == "cpu"
    waited = _spent("async_compile.wait") if waits_later else 0.0
    by_torch = _spent("_recursive_joint_graph_passes", "min_cut_rematerialization_partition")
    parts = {
        "Dynamo": _spent("_compile.compile_inner") - _spent("OutputGraph.call_user_compiler"),
        "AOT trace": _spent("aot_collect_metadata", "aot_trace_joint_graph"),
        "partition": by_torch + cut,
        "ours": sum(ours.values()) - 2 * cut,  # torch's; "partitioner" includes it, too
        "Inductor": _spent("compile_fx_inner") - lowering + waited,
    }
    return {**parts, "rest": seconds - sum(parts.values())}


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the seconds of graphshard's parts; "cut" is torch's share of "partitioner"."""
    spent: dict[str, float] = {}
    places: tuple[tuple[Any, str, str], ...] = (
        (pipeline.Lowering, "__call__", "lowering"),
        (partition.Partitioner, "__call__", "partitioner"),
        (partition, "min_cut_rematerialization_partition", "cut"),
        (PlanConsensus, "common_plans", "consensus"),
    )
    with ExitStack() as stack:
        for owner, name, part in places:
            wrapped = _adding(spent, part, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield spent


def _adding(spent: dict[str, float], part: str, function: Callable[..., Any]) -> Any:

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - begin

    return timed


def _spent(*names: str) -> float:
    return sum(sum(compilation_time_metrics.get(name, ())) for name in names)


# --- output --------------------------------------------------------------------------------------


def _table(cold: Runs, warm: Runs) -> str:
    base = _median(cold[PLAIN], "seconds") if PLAIN in cold else None
    rows = []
    for variant, runs in cold.items():
        seconds, both = _median(runs, "seconds"), [*runs, *warm[variant]]
        rows.append(
            {
                "first gradient": variant,
                "cold s": f"{seconds:.1f}",
                "ratio": f"{seconds / base:.2f}" if base else "",
                "warm s": f"{_median(warm[variant], 'seconds'):.1f}",
                "graphs": str(runs[-1].graphs),
                "files": str(runs[-1].files),
                "step ms": f"{_median(both, 'step_s') * 1e3:.1f}",
                "peak MB": f"{_median(both, 'peak') / 1e6:.1f}",
            }
        )
    return common.table(rows)


def _split(cold: Runs) -> str:
    rows = []
    for variant, runs in cold.items():
        seconds = {part: median(run.parts[part] for run in runs) for part in runs[0].parts}
        parts = {part: f"{part_s:.1f}" for part, part_s in seconds.items()}
        rows.append({"parts of cold s": variant, **parts})
    return common.table(rows)


def _median(runs: Sequence[First], field: str) -> float:
    return median(getattr(run, field) for run in runs)


if __name__ == "__main__":
    main()
