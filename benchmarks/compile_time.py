"""How long does compiling take beside plain torch.compile, with a cold and a warm Inductor cache?

    python -m benchmarks.compile_time [--layers 4] [--dim 256] [--repeats 1] [--device cpu|cuda]

The seconds of the first forward and backward of a GPT on one rank, in a process of its own with a
TORCHINDUCTOR_CACHE_DIR of its own: cold in an empty folder, warm in a new process with that folder.
Imports do not count. Sharding counts for the one line, which does it in that call, and not where
graphshard.shard was called before. The order of the ways is turned round from repeat to repeat. One
process more runs before them and is not counted, unless --no-warm-up says that something has been
compiled on this machine just now: the first to compile reads the compiler from disk.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.common import (
    count,
    heading,
    join_group,
    median,
    parser,
    pick_device,
    show,
    table,
    timed,
)
from benchmarks.models import GPT
from benchmarks.ways import one_line, plain

PLAIN, ONE_LINE, SHARDED = "torch.compile", "graphshard, one line", "graphshard, after shard()"
WAYS = (PLAIN, ONE_LINE, SHARDED)
VOCAB, CONTEXT, ROWS, HEAD_DIM = 4096, 64, 2, 32


@dataclass(frozen=True)
class First:
    """The first forward and backward of a process, how much of it the planner took, and what
    Inductor's cache had of them."""

    seconds: float
    planning_s: float
    hits: int
    misses: int


def main() -> None:
    args = _arguments()
    if args.way:
        print(json.dumps(asdict(_first_step(args))), flush=True)
        return
    device = pick_device(args.device)
    show(heading("benchmarks.compile_time", device))
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
    show(_table(cold, warm), note, last)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--layers", type=count, default=4, help="default: %(default)s")
    options.add_argument("--dim", type=count, default=256, help="default: %(default)s")
    options.add_argument("--repeats", type=count, default=1, help="default: %(default)s")
    options.add_argument(
        "--warm-up", action=argparse.BooleanOptionalAction, default=True, help="see above"
    )
    limit = "seconds that one process may take; default: %(default)s"
    options.add_argument("--timeout", type=count, default=300, metavar="S", help=limit)
    options.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # in the new processes
    return options.parse_args()


def _in_new_process(
    way: str, args: argparse.Namespace, cache: str, layers: int | None = None
) -> First:
    command = [sys.executable, "-m", "benchmarks.compile_time", "--way", way]
    command += ["--layers", str(layers or args.layers), "--dim", str(args.dim)]
    command += ["--device", pick_device(args.device).type]
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
    device = pick_device(args.device)
    mesh = join_group(device)
    torch.manual_seed(0)
    with device:
        heads = max(1, args.dim // HEAD_DIM)
        model = GPT(dim=args.dim, layers=args.layers, heads=heads, vocab=VOCAB, context=CONTEXT)
    ids = model.batch(ROWS, device)
    compiled = _compiled(args.way, model, mesh)
    planning_s: list[float] = []
    with _timed_planning(planning_s):
        seconds = timed(lambda: compiled(ids).backward(), device).done_s
    torch.distributed.destroy_process_group()
    counted = torch._dynamo.utils.counters["inductor"]
    return First(
        seconds, sum(planning_s), counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"]
    )


@contextlib.contextmanager
def _timed_planning(seconds: list[float]) -> Iterator[None]:
    from graphshard.options import schedule_policy

    def timed_decide(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return decide(*args)
        finally:
            seconds.append(time.perf_counter() - begin)

    decide = schedule_policy.find_schedule
    with mock.patch.object(schedule_policy, "find_schedule", timed_decide):
        yield


def _compiled(way: str, model: GPT, mesh: DeviceMesh) -> Any:
    import graphshard  # in all ways: it imports the compilers, and no import is timed

    if way == PLAIN:
        return plain(model, mesh)
    if way == SHARDED:
        graphshard.shard(model, mesh)
    return one_line(model, mesh)


def _seconds(runs: list[First]) -> float:
    return median([run.seconds for run in runs])


def _table(cold: dict[str, list[First]], warm: dict[str, list[First]]) -> str:
    headers = ["first fwd+bwd", "cold s", "ratio", "planning", "warm s", "ratio", "warm cache hits"]
    rows = []
    for way in WAYS:
        row = [way]
        planning = median([run.planning_s for run in cold[way]]) / _seconds(cold[way])
        for runs, more in ((cold, [f"{planning:.1%}"]), (warm, [])):
            seconds = _seconds(runs[way])
            row += [f"{seconds:.2f}", f"{seconds / _seconds(runs[PLAIN]):.2f}", *more]
        last = warm[way][-1]
        rows.append([*row, f"{last.hits} of {last.hits + last.misses}"])
    return table(headers, rows)


if __name__ == "__main__":
    main()
