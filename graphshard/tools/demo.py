"""Command ``python -m graphshard demo``: compare graphshard, DDP and FSDP2 on a small GPT.

    python -m graphshard demo ──► torchrun ──► python -m graphshard.tools.demo, once per rank
                                               step k: graphshard, DDP, FSDP2, in turn

All three are compiled, and train a byte-level GPT on the sources of Python's standard library,
from the same parameters and on the same batches. Losses, speeds and the memory between steps are
measured in that run; the collectives and the gathered memory come from graphshard's plans. On
several CPU ranks, the last steps run on a modelled wire: its delays need no cores, so compute can
hide them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from .._torch import modelled_wire
from .._torch.dynamo import log_only_errors
from ..dynamo_backend import Backend, backend
from ..files import write_whole
from ..kinds import TransferKind
from ..params.memory_report import memory_report
from ..show.dump_folder import folder_page
from .demo_model import SIZES, batches, load_text
from .demo_training import Settings, Training, new_trainings

FINAL_STEPS = 10  # last steps over which the final loss is averaged
WIRE_LATENCY_S, WIRE_BYTES_PER_S = 0.2e-3, 125e6  # modelled wire: 1 Gb/s for each rank


# --- the launcher -------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> Settings:
    gpus = torch.cuda.device_count()
    device = args.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and (args.ranks or 1) > gpus:
        raise argparse.ArgumentTypeError(
            f"{args.ranks or 1} rank(s) on --device cuda: PyTorch sees {gpus} GPU(s), and each "
            "rank needs one; --device cpu runs any number of ranks"
        )
    return Settings(
        device=device,
        num_ranks=args.ranks or (gpus if device == "cuda" else 2),
        num_steps=args.steps or SIZES[device].steps,
        compiler=args.compiler,
        html=str(args.html) if args.html else None,
    )


def launch(args: argparse.Namespace) -> int:
    """Start the ranks with torchrun, wait for them, and return the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    settings, start = _settings(args), time.perf_counter()
    scratch = tempfile.TemporaryDirectory()
    if settings.html:
        dump = Path(scratch.name, "demo")
        dump.mkdir()
        settings = dataclasses.replace(settings, dump=str(dump))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    print(f"starting {_ranks(settings)} on {settings.device}", flush=True)
    options = ["--standalone", "--nproc-per-node", str(settings.num_ranks), "--module", __name__]
    try:
        torchrun.run(torchrun.parse_args([*options, json.dumps(vars(settings))]))
    except ChildFailedError as error:
        print(f"rank {error.get_first_failure()[0]} failed: see above", file=sys.stderr)
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    finally:
        scratch.cleanup()
    print(f"\n{time.perf_counter() - start:.0f} s in total")
    return 0


def _ranks(settings: Settings) -> str:
    return f"{settings.num_ranks} rank{'s' if settings.num_ranks > 1 else ''}"


# --- the program of a rank ----------------------------------------------------------------------


def _train(trainings: Sequence[Training], settings: Settings, device: torch.device) -> None:
    """Train all runs in turn, step by step, on the same batches; show progress on rank 0.

    The last ``settings.num_wire_steps`` steps run on the modelled wire.
    """
    ours, data = trainings[0], batches(load_text(), SIZES[settings.device], 1 + dist.get_rank())
    steps, is_terminal = settings.num_steps + settings.num_wire_steps, sys.stdout.isatty()
    for step in range(1, steps + 1):
        batch = next(data).to(device)
        if step > settings.num_steps:
            modelled_wire.WIRE.latency_s = WIRE_LATENCY_S
            modelled_wire.WIRE.bytes_per_s = WIRE_BYTES_PER_S
        for training in trainings:
            training.step(batch)
            if training is ours and step == 1:
                _print(f"compiled and ran the first step in {ours.seconds[0]:.0f} s")
        rate = _rate(settings, ours.seconds[1:][-FINAL_STEPS:])
        text = f"step {step}/{steps}  loss {ours.losses[-1]:.4f}  {rate} bytes/s"
        if is_terminal:  # one line, rewritten
            _print(f"\r\x1b[K{text}", end="\n" if step == steps else "")
        elif step % max(1, steps // 10) == 0:
            _print(text)


def _print(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


def run_rank(settings: Settings) -> None:
    """Train with graphshard, DDP and FSDP2 on this rank; rank 0 prints a comparison.

    Rank 0 also writes the page, if ``settings.html`` is set.
    """
    log_only_errors()  # compiled DDP causes warnings
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        modelled_wire.register()
        dist.init_process_group(modelled_wire.BACKEND)
    mesh = init_device_mesh(device.type, (settings.num_ranks,))
    sharding = backend(mesh, compiler=settings.compiler, dump=settings.dump)
    trainings = new_trainings(settings, mesh, device, sharding)
    _print(_headline(settings, trainings[1].model))
    _print(f"compiling with {settings.compiler}: may take a minute if nothing is cached")
    _train(trainings, settings, device)
    for training in trainings:
        training.count_memory(device)
    report = memory_report(trainings[0].model, trainings[0].optimizer)
    for paragraph in (
        _memory(trainings),
        _race(trainings, settings),
        _comparison(trainings, settings),
        _explanation(settings),
        _collectives(sharding),
        f"graphshard, on this rank\n{report}",
        f"Words\n{tabulate(_WORDS, tablefmt='plain')}",
        f"Next\n{tabulate(_next_steps(settings), tablefmt='plain')}",
    ):
        _print(f"\n{paragraph}")
    if settings.html and settings.dump and dist.get_rank() == 0:
        write_whole(Path(settings.html), folder_page(Path(settings.dump)))
        _print(f"\nwrote {settings.html}")
    dist.destroy_process_group()


# --- the report ---------------------------------------------------------------------------------


def _headline(settings: Settings, model: nn.Module) -> str:
    machine = f"{_ranks(settings)} over gloo on CPU, {torch.get_num_threads()} thread(s) each"
    if settings.device == "cuda":
        machine = f"{_ranks(settings)} over NCCL on {torch.cuda.get_device_name()}"
    size = SIZES[settings.device]
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    alone = "" if settings.num_ranks > 1 else "; with one rank nothing is sharded"
    return (
        f"{machine}; torch {torch.__version__}{alone}\n"
        f"a GPT of {millions:.1f} M parameters, float32, trains on {len(load_text()) / 1e6:.1f} MB "
        f"of Python's standard library; {size.batch} × {size.context} bytes per rank and step"
    )


def _rate(settings: Settings, seconds: Sequence[float]) -> str:
    return f"{settings.rate(seconds):,.0f}" if seconds else "–"


def _memory(trainings: Sequence[Training]) -> str:
    ours, whole, fsdp2 = (sum(training.held_bytes) / 1e6 for training in trainings)
    return (
        f"Memory: each rank holds {ours:.1f} MB of parameters, gradients and AdamW state (FSDP2: "
        f"{fsdp2:.1f} MB). DDP, which shards nothing, needs {whole:.1f} MB, "
        f"{whole / ours:.1f} times as much."
    )


def _race(trainings: Sequence[Training], settings: Settings) -> str:
    wire = f"on a modelled wire ({WIRE_BYTES_PER_S * 8 / 1e9:g} Gb/s for each rank)"
    places = [("on this machine's wire", settings.timed)]
    if settings.num_wire_steps:
        places.append((wire, settings.wired))
    lines = []
    for place, steps in places:
        ours, ddp, fsdp2 = (settings.rate(t.seconds[steps]) for t in trainings)
        lines.append(
            f"Speed {place}: {ours / fsdp2:.2f} times FSDP2 with compiled blocks, "
            f"{ours / ddp:.2f} times compiled DDP."
        )
    return "\n".join(lines)


def _comparison(trainings: Sequence[Training], settings: Settings) -> str:
    first, num_steps = settings.num_untimed, settings.num_steps
    last = min(FINAL_STEPS, num_steps)
    final_losses = (f"{statistics.mean(t.losses[:num_steps][-last:]):.6f}" for t in trainings)
    rows = [
        ["loss, first step", *(f"{t.losses[0]:.6f}" for t in trainings)],
        [f"loss, mean of last {last} of {settings.num_steps} steps", *final_losses],
    ]
    for other in trainings[1:]:
        cells = ["–" if t is other else f"{t.difference(other):.1e}" for t in trainings]
        rows.append([f"largest loss difference from {other.name.split(',')[0]}", *cells])
    rows.append(["first step, s (compiles)", *(f"{t.seconds[0]:.1f}" for t in trainings)])
    rates = [_rate(settings, t.seconds[settings.timed]) for t in trainings]
    rows.append([f"bytes/s, median of steps {first + 1} to {num_steps}", *rates])
    if settings.num_wire_steps:
        rates = [_rate(settings, t.seconds[settings.wired]) for t in trainings]
        rows.append([f"bytes/s on the modelled wire, {settings.num_wire_steps - 1} steps", *rates])
    for name, sizes in zip(_HELD, zip(*(t.held_bytes for t in trainings))):
        rows.append([f"{name}, MB per rank", *(f"{size / 1e6:.3f}" for size in sizes)])
    headers, align = ["", *(t.name for t in trainings)], ["left", *["right"] * len(trainings)]
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _collectives(sharding: Backend) -> str:
    kinds = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE)
    rows = [
        [plan.graph, kind, plan.count(kind), plan.num_bytes(kind) / 1e6]
        for plan in sharding.plans
        for kind in kinds
        if plan.count(kind)
    ]
    headers = ["graphshard, every step", "collective", "count", "MB, full size"]
    return tabulate(rows, headers, floatfmt=".3f")


_HELD = ("parameters", "gradients", "AdamW state")
_MORE_BYTES = """\
Sharded training (graphshard, FSDP2) sends up to 1.5 times as many bytes as DDP: it gathers
parameters in forward, and again in backward, and reduces gradients; DDP only reduces gradients.
In return, each rank needs less memory (last rows)."""
_ON_CPU = """\
On a CPU no communication is hidden: gloo runs on the cores that compute, so every byte costs time.
A GPU sends while it computes. The modelled wire imitates that: a collective ends only when the wire
has carried its bytes, but gloo still uses the cores to copy them."""
_ON_GPU = "A model this small has little compute to hide communication."
_INDUCTOR = """\
Losses differ because Inductor fuses different operations in each run, which changes rounding. It
compiles once, in the first step."""
_AOT_EAGER = "aot_eager runs the eager kernels, between the same kinds of collectives."


def _explanation(settings: Settings) -> str:
    lines = ["Why?"]
    if settings.num_ranks > 1:
        lines += [_MORE_BYTES, _ON_CPU if settings.device == "cpu" else _ON_GPU]
    lines.append(_INDUCTOR if settings.compiler == "inductor" else _AOT_EAGER)
    return "\n".join(lines)


_WORDS = (
    ("bytes/s", "bytes of text per second, over all ranks"),
    ("MB per rank", "between steps, on the rank with the most; 1 MB is a million bytes"),
    ("AdamW state", "the optimizer's two averages for each parameter"),
    ("all_gather", "ranks exchange shards; each holds the full parameters temporarily"),
    ("reduce_scatter", "gradients are averaged over the ranks, and each rank keeps its shard"),
    ("unsharded", "memory of a rank if nothing were sharded"),
    ("sums", "accumulated gradients that are not reduced yet: graphshard.no_sync"),
    ("gathered", "peak memory of full parameters"),
)


def _next_steps(settings: Settings) -> list[tuple[str, str]]:
    python = os.path.relpath(sys.executable)
    if Path(shutil.which("python") or "").parent == Path(sys.executable).parent:
        python = "python"  # the same environment
    command = f"{python} -m graphshard demo"
    rows = [
        ("train your own model", "examples/train.py"),
        ("see graphshard's step", f"{command} --html demo.html"),
        ("compare losses without rounding differences", f"{command} --compiler aot_eager"),
        ("check a step for a GPU you do not have", f"{python} -m graphshard check --help"),
    ]
    if settings.device == "cpu":
        rows.append(("see shards get smaller", f"{command} --ranks {2 * settings.num_ranks}"))
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun forwards Ctrl-C: exit without traceback
    run_rank(Settings(**json.loads(sys.argv[1])))
