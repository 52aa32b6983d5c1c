"""How long is a step of Llama-3 compared with FSDP2's, on one GPU that is the first of 8 ranks?

    python -m benchmarks.race [--layers 8] [--links 0.03,370 0.05,100] [--variants graphshard ...]
        [--rounds 3] [--steps 5] [--device cpu|cuda] [--out FOLDER]

Links are modelled (benchmarks/links.py). Parameters are gathered and used in bfloat16,
gradients are reduced in float32, and AdamW is fused. FSDP2 is wrapped as torchtitan wraps it. Plain
torch.compile shards nothing, and its weights are in bfloat16. With --planned-wire, graphshard plans
for other links than it runs on.

Each variant runs in a separate process for each link. Up to --at-once of them build the model and
take the first step, which compiles, at the same time. After that they use the device in turns: in
every round, each takes --steps steps in a row. "step" is the median over the rounds, "host" the
time until a step's Python returns if the device was idle, and "peak" the peak memory of later
steps.

On a GPU, two more steps are profiled. "compute" is the time in which the compute stream is busy,
"exposed" the time in which only other streams are, "idle" the time in which no stream is, and
"links" the time in which streams with modelled collectives are. --out is a folder for race.tar.gz:
the kernels as [start us, duration us, stream, name], and graphshard's plans. Ratios are to FSDP2
with compiled blocks, and for fp8 to torchao's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from benchmarks import common, gpu_trace
from benchmarks.common import FSDP2_BLOCKS, GRAPHSHARD, GRAPHSHARD_FP8, PLAIN, TORCHAO
from benchmarks.links import Wire, add_planned_wire, modelled_group, parse_wire, write_with_wire
from benchmarks.llama import LlamaSizes, TrainableLlama, as_torchtitan
from benchmarks.variants import Trained, add_hooks, asynchronous, convert_to_float8, mp_policy
from graphshard.cost.devices import HARDWARE, find_hardware_or_default
from graphshard.dynamo_backend import Backend

VARIANTS = (FSDP2_BLOCKS, GRAPHSHARD, TORCHAO, GRAPHSHARD_FP8, PLAIN)
RIVALS = {GRAPHSHARD: FSDP2_BLOCKS, GRAPHSHARD_FP8: TORCHAO}
MIXED = mp_policy(mixed=True)
PROFILED_STEPS = 2


class Entry(NamedTuple):
    """A training variant and its link; the unsharded variant has none."""

    variant: str
    wire: Wire | None

    @property
    def name(self) -> str:
        links = f" {self.wire.alpha_s * 1e3:g} {self.wire.bytes_per_s / 1e9:g}" if self.wire else ""
        return re.sub("[^A-Za-z0-9.]+", "-", self.variant + links)


@dataclass(frozen=True)
class Result:
    """Measurements of one process; without a GPU, ``peak_bytes`` is 0 and ``parts_ms`` is empty."""

    first_s: float
    step_s: float
    host_s: float
    peak_bytes: int
    parts_ms: Mapping[str, float]


def main() -> None:
    args = _arguments()
    if args.child:
        variant, wire, folder = json.loads(args.child)
        _take_turns(_turns(Entry(variant, wire and Wire(*wire)), args, folder))
        return
    common.show(common.heading("benchmarks.race", common.pick_device(args.device)))
    entries, results = _entries(args.variants, args.links), dict[Entry, Result]()
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(entries), args.at_once):
            results |= _race(entries[start : start + args.at_once], args, folder)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            with tarfile.open(args.out / "race.tar.gz", "w:gz") as packed:
                packed.add(folder, "race")
    note = (
        f"Llama of {args.layers} layers, d={args.dim}, hidden {args.hidden}, vocabulary of "
        f"{args.vocab:,}; {args.rows} × {args.tokens:,} tokens a step; the first of {args.ranks} "
        f"ranks; {args.rounds} rounds of {args.steps} steps"
    )
    common.show(_table(results), note, *_ratios(results))


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__, with_device=True)
    common.add_counts(parser, layers=8, dim=4096, hidden=14336, vocab=32768, tokens=8192, rows=1)
    links: dict[str, Any] = {"nargs": "+", "type": parse_wire, "metavar": "ALPHA_MS,GB_PER_S"}
    default = [parse_wire("0.03,370"), parse_wire("0.05,100")]
    parser.add_argument("--links", default=default, help="default: 0.03,370 0.05,100", **links)
    add_planned_wire(parser)
    common.add_variants(parser, VARIANTS)
    common.add_counts(parser, ranks=8, rounds=3, steps=5, at_once=4)
    limit = "seconds that a turn of a process may take; default: %(default)s"
    parser.add_argument("--timeout", type=common.count, default=300, metavar="S", help=limit)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for race.tar.gz")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # for the child processes
    return parser.parse_args()


def _entries(variants: Sequence[str], links: Sequence[Wire]) -> list[Entry]:
    left_out = (PLAIN, *(() if importlib.util.find_spec("torchao") else (TORCHAO,)))
    sharded = [variant for variant in variants if variant not in left_out]
    unsharded = [Entry(PLAIN, None)] if PLAIN in variants else []
    return [Entry(variant, wire) for wire in links for variant in sharded] + unsharded


# --- turns of processes --------------------------------------------------------------------------


def _race(entries: Sequence[Entry], args: argparse.Namespace, folder: str) -> dict[Entry, Result]:
    """Measure in processes that compile at the same time, then use the device in turns."""
    command = [sys.executable, "-m", "benchmarks.race", *sys.argv[1:], "--child"]
    with ExitStack() as running:
        racers = {}
        for entry in entries:
            racer = Racer([*command, json.dumps([*entry, folder])], args.timeout)
            racers[entry.name] = racer
            running.callback(racer.end)
        turns = {name: racer.turn for name, racer in racers.items()}
        for connect in turns.values():
            connect()
        for racer in racers.values():
            racer.go()
        for racer in racers.values():
            racer.answer()
        common.interleave(turns, args.rounds, warm_up=0)
        return {entry: Result(**turns[entry.name]()) for entry in entries}


class Racer:
    """A child process that takes a turn for each line it reads, and answers with a line of JSON."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe)

    def go(self) -> None:
        with suppress(BrokenPipeError):  # the process has ended; ``answer`` reports that
            self._process.stdin.write(b"go\n")

    def answer(self) -> Any:
        """Return the answer to the turn that was started.

        Raises:
            SystemExit: the process ended, took too long, or wrote something other than JSON.
        """
        limit = threading.Timer(self._timeout_s, self._process.kill)
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        try:
            return json.loads(line)
        except ValueError:
            command = " ".join(self._process.args)
            sys.exit(
                f"{command}: no answer within {self._timeout_s:g} s (output: {line!r}); see the "
                "messages above"
            )

    def turn(self) -> Any:
        self.go()
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _take_turns(turns: Iterator[Any]) -> None:
    """Answer each line of stdin.

    Output of libraries goes to stderr, to keep it out of the answers.
    """
    answers = os.fdopen(os.dup(1), "w")  # open until the parent kills this process
    os.dup2(2, 1)
    for _, answer in zip(sys.stdin, turns):
        print(json.dumps(answer), file=answers, flush=True)


def _turns(entry: Entry, args: argparse.Namespace, parent: str) -> Iterator[Any]:
    device, folder = common.pick_device(args.device), Path(parent, entry.name)
    folder.mkdir()
    torch.set_float32_matmul_precision("high")
    wire = entry.wire
    group = modelled_group(wire, args.ranks, device) if wire else common.group_of_one(device)
    with group as mesh:
        yield None
        sizes = LlamaSizes.of(args.dim, args.layers, args.hidden, args.vocab)
        with torch.device("meta"):
            model = TrainableLlama(sizes, args.tokens)
        trained, backend = _build(entry, model, mesh, args.planned_wire or entry.wire, folder)
        model.to_empty(device=device)
        model.initialize()
        step = _step(entry.variant, model, trained, args)
        first_s = common.timed(step, device).done_s
        _warm_up(step, device)
        yield None
        rounds = []
        for _ in range(args.rounds):
            rounds.append(_round(step, args.steps, device))
            yield None
        step_s, host_s = map(median, zip(*rounds))
        peak_bytes = torch.cuda.max_memory_allocated()
        if backend:
            (folder / "summary.txt").write_text(backend.summary())
            for i, plan in enumerate(backend.plans):
                (folder / f"plan-{i}-{plan.graph}.json").write_text(plan.to_json())
        parts_ms: dict[str, float] = {}
        if device.type == "cuda":
            kernels = gpu_trace.record(lambda: [step() for _ in range(PROFILED_STEPS)])
            gpu_trace.write(kernels, folder / "trace.json.gz")
            parts_ms = gpu_trace.split(kernels, PROFILED_STEPS)
        yield asdict(Result(first_s, step_s, host_s, peak_bytes, parts_ms))


def _build(
    entry: Entry, model: TrainableLlama, mesh: DeviceMesh, planned_wire: Wire | None, folder: Path
) -> tuple[Trained, Backend | None]:
    if planned_wire is None or entry.variant == PLAIN:
        return torch.compile(model.bfloat16()), None
    if entry.variant in (GRAPHSHARD, GRAPHSHARD_FP8):
        fp8 = graphshard.Float8Policy("tensorwise") if entry.variant == GRAPHSHARD_FP8 else None
        hardware = _hardware(planned_wire, mesh, folder)
        schedule = graphshard.SchedulePolicy(hardware=hardware)
        graphshard.shard(model, mesh, mp_policy=MIXED, fp8=fp8)
        backend = graphshard.backend(mesh, mp_policy=MIXED, fp8=fp8, schedule=schedule)
        return torch.compile(model, backend=backend, fullgraph=True), backend
    if entry.variant == TORCHAO:
        convert_to_float8(model)
    if mesh.device_type == "cpu":  # on CPUs, FSDP2 by default waits for every gather at once
        return asynchronous(model, mesh, build=as_torchtitan, mp_policy=MIXED), None
    return as_torchtitan(model, mesh, mp_policy=MIXED), None


def _hardware(wire: Wire, mesh: DeviceMesh, folder: Path) -> str:
    base = HARDWARE["cpu"]
    if mesh.device_type == "cuda":
        base = find_hardware_or_default(torch.cuda.get_device_name())
    return write_with_wire(base, wire, mesh.size(), str(folder))


def _step(
    variant: str, model: TrainableLlama, trained: Trained, args: argparse.Namespace
) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    add_hooks(variant, model, optimizer)
    ids = torch.randint(args.vocab, (args.rows, args.tokens + 1), device=model.cos.device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> Tensor:
        loss = trained(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _warm_up(step: Callable[[], Tensor], device: torch.device) -> None:
    torch.cuda.empty_cache()  # other processes need the memory
    for _ in range(2):
        step()
    common.synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _round(step: Callable[[], Tensor], steps: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds per step over ``steps`` steps in a row, and the host time of a step."""
    host_s = common.timed(step, device).host_s
    losses: list[Tensor] = []
    done_s = common.timed(lambda: losses.extend(step() for _ in range(steps)), device).done_s
    if not torch.stack(losses).isfinite().all():
        raise RuntimeError(f"a loss is not finite: {losses}")
    return done_s / steps, host_s


# --- output --------------------------------------------------------------------------------------


def _table(results: Mapping[Entry, Result]) -> str:
    rows = []
    for entry, result in results.items():
        base = results.get(Entry(RIVALS.get(entry.variant, FSDP2_BLOCKS), entry.wire))
        parts_ms = result.parts_ms
        rows.append(
            {
                "variant": entry.variant,
                "links": str(entry.wire or ""),
                "step ms": f"{result.step_s * 1e3:.1f}",
                "ratio": f"{result.step_s / base.step_s:.3f}" if base else "",
                **{f"{p} ms": f"{parts_ms[p]:.1f}" if parts_ms else "" for p in gpu_trace.PARTS},
                "host ms": f"{result.host_s * 1e3:.1f}",
                "peak GB": f"{result.peak_bytes / 1e9:.2f}" if result.peak_bytes else "",
                "first step s": f"{result.first_s:.1f}",
            }
        )
    return common.table(rows)


def _ratios(results: Mapping[Entry, Result]) -> list[str]:
    """Return the line for the summary of ``gpu.sh``, or [] if no entry has a rival in the race."""
    ratios = []
    for entry, ours in results.items():
        rival = RIVALS.get(entry.variant, "")
        theirs = results.get(Entry(rival, entry.wire))
        if theirs:
            ratio = f"{ours.step_s / theirs.step_s:.3f} of {rival} over {entry.wire}"
            peak = (
                f", memory {ours.peak_bytes / theirs.peak_bytes:.2f}" if theirs.peak_bytes else ""
            )
            ratios.append(ratio + peak)
    return [f"race: {'; '.join(ratios)}"] if ratios else []


if __name__ == "__main__":
    main()
