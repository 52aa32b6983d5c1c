"""How long does compiling take beside plain torch.compile, with a cold and a warm Inductor cache?

    python -m benchmarks.compile_time [--layers 4] [--dim 256] [--repeats 1] [--device cpu|cuda]

The seconds of the first forward and backward of a GPT on one rank, in a process of its own with a
TORCHINDUCTOR_CACHE_DIR of its own: cold in an empty folder, warm in a new process with that folder.
Imports do not count. Sharding counts for the one line, which does it in that call, and not where
graphshard.shard was called before. The order of the ways is turned round from repeat to repeat.

The first process to compile reads the compiler from disk. So one process more runs before the
others and is not counted; --no-warm-up leaves it out where something was compiled just now.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from benchmarks import common
from benchmarks.gpt import GPT
from benchmarks.ways import Trained, one_line, plain
from graphshard.options import schedule_policy

PLAIN, ONE_LINE, SHARDED = "torch.compile", "graphshard, one line", "graphshard, after shard()"
WAYS = (PLAIN, ONE_LINE, SHARDED)
VOCAB, CONTEXT, ROWS, HEAD_DIM = 4096, 64, 2, 32


@dataclass(frozen=True)
class First:
    """The first forward and backward of a process.

    Attributes:
        seconds: of everything; ``planning_s``: of the planner.
        hits, misses: graphs that Inductor's cache had, and had not.
    """

    seconds: float
    planning_s: float
    hits: int
    misses: int


def main() -> None:
    """Measure and print a table; in the processes that it starts, one measurement as JSON."""
    args = _arguments()
    if args.way:
        print(json.dumps(asdict(_first_step(args))), flush=True)
        return
    device = common.pick_device(args.device)
    common.show(common.heading("benchmarks.compile_time", device))
    if args.warm_up:
        with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
            _in_new_process(PLAIN, args, cache, layers=1)
    cold: dict[str, list[First]] = {way: [] for way in WAYS}
    warm: dict[str, list[First]] = {way: [] for way in WAYS}
    for repeat in range(args.repeats):
        for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
            with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
                cold[way].append(_in_new_process(way, args, cache))
                warm[way].append(_in_new_process(way, args, cache))
    ratio = _seconds(cold[ONE_LINE]) / _seconds(cold[PLAIN])
    ratio_warm = _seconds(warm[ONE_LINE]) / _seconds(warm[PLAIN])
    note = f"GPT of {args.layers} layers, d={args.dim}; median of {args.repeats}"
    last = f"compile time: graphshard {ratio:.2f} × torch.compile cold, {ratio_warm:.2f} × warm"
    common.show(_table(cold, warm), note, last)


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__, with_device=True)
    common.add_counts(parser, layers=4, dim=256, repeats=1)
    parser.add_argument(
        "--warm-up", action=argparse.BooleanOptionalAction, default=True, help="see above"
    )
    limit = "seconds that one process may take; default: %(default)s"
    parser.add_argument("--timeout", type=common.count, default=300, metavar="S", help=limit)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # in the new processes
    return parser.parse_args()


def _in_new_process(
    way: str, args: argparse.Namespace, cache: str, layers: int | None = None
) -> First:
    """Measure in a new process, whose folder for Inductor's caches is ``cache``.

    Args:
        layers: of the model; None: as ``args`` say.
    """
    command = [sys.executable, "-m", "benchmarks.compile_time", "--way", way]
    command += ["--layers", str(layers or args.layers), "--dim", str(args.dim)]
    command += ["--device", common.pick_device(args.device).type]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    env.pop("TRITON_CACHE_DIR", None)  # Inductor then puts it into its own folder
    done = subprocess.run(
        command,
        env=env,
        cwd=Path(__file__).resolve().parents[1],
        timeout=args.timeout,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return First(**json.loads(done.stdout.splitlines()[-1]))


def _first_step(args: argparse.Namespace) -> First:
    device = common.pick_device(args.device)
    model = GPT.seeded(
        device,
        dim=args.dim,
        layers=args.layers,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        context=CONTEXT,
    )
    ids = model.batch(ROWS, device)
    planning_s: list[float] = []
    with common.group_of_one(device) as mesh, _timed_planning(planning_s):
        compiled = _compiled(args.way, model, mesh)
        seconds = common.timed(lambda: compiled(ids).backward(), device).done_s
    counted = torch._dynamo.utils.counters["inductor"]
    return First(
        seconds=seconds,
        planning_s=sum(planning_s),
        hits=counted["fxgraph_cache_hit"],
        misses=counted["fxgraph_cache_miss"],
    )


@contextlib.contextmanager
def _timed_planning(seconds: list[float]) -> Iterator[None]:
    """Append to ``seconds`` what every search for a schedule takes."""

    def timed_search(*args: object) -> object:
        begin = time.perf_counter()
        try:
            return search(*args)
        finally:
            seconds.append(time.perf_counter() - begin)

    search = schedule_policy.find_schedule
    with mock.patch.object(schedule_policy, "find_schedule", timed_search):
        yield


def _compiled(way: str, model: GPT, mesh: DeviceMesh) -> Trained:
    if way == PLAIN:
        return plain(model, mesh)
    if way == SHARDED:
        graphshard.shard(model, mesh)
    return one_line(model, mesh)


def _seconds(runs: Sequence[First]) -> float:
    return median([run.seconds for run in runs])


def _table(cold: Mapping[str, Sequence[First]], warm: Mapping[str, Sequence[First]]) -> str:
    """Return a row for each way; ratios are to plain torch.compile."""
    headers = ["first fwd+bwd", "cold s", "ratio", "planning", "warm s", "ratio", "warm cache hits"]
    rows = []
    for way in WAYS:
        row = [way]
        planning = median([run.planning_s for run in cold[way]]) / _seconds(cold[way])
        for runs, extra_cells in ((cold, [f"{planning:.1%}"]), (warm, [])):
            seconds = _seconds(runs[way])
            row += [f"{seconds:.2f}", f"{seconds / _seconds(runs[PLAIN]):.2f}", *extra_cells]
        last = warm[way][-1]
        rows.append([*row, f"{last.hits} of {last.hits + last.misses}"])
    return common.table(headers, rows)


if __name__ == "__main__":
    main()
