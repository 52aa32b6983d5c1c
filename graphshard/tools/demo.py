"""The command ``python -m graphshard demo``: compare graphshard, DDP and FSDP2 on a small GPT.

    python -m graphshard demo ──► torchrun ──► python -m graphshard.tools.demo, once per rank
                                               step k: graphshard, DDP, FSDP2, in turn

All three start from the same parameters and see the same batches. Each step of each is timed
between barriers. All numbers in the final table are measured in that run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..dynamo_backend import backend
from ..options.options import COMPILERS
from ..params.memory_report import memory_report
from .demo_model import SIZES, batches, load_text
from .demo_plot import check_plot, plot
from .demo_report import (
    NUM_FINAL_STEPS,
    collectives,
    comparison,
    explain_speed,
    explain_words,
    headline,
    largest,
    name_ranks,
    next_steps,
    tokens_per_second,
)
from .demo_training import (
    SEED,
    Settings,
    Training,
    gather,
    new_model,
    with_ddp,
    with_fsdp2,
    with_graphshard,
)

# --- the launcher -------------------------------------------------------------------------------


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``demo`` command to ``python -m graphshard``."""
    text = "train a small GPT with graphshard, DDP and FSDP2 in turn, and compare the three"
    parser = commands.add_parser("demo", help=text, description=text)
    parser.add_argument(
        "--ranks", type=_at_least(1), metavar="N", help="default: all GPUs; 2 without one"
    )
    parser.add_argument(
        "--steps", type=_at_least(2), metavar="N", help=f"default: {_default_steps()}"
    )
    parser.add_argument(
        "--compiler", choices=COMPILERS, default=COMPILERS[0], help="default: %(default)s"
    )
    parser.add_argument(
        "--device", choices=list(SIZES), help="default: cuda where there is a GPU, else cpu"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write loss curves and bars; needs matplotlib"
    )
    parser.set_defaults(run=launch, parser=parser)


def _default_steps() -> str:
    return ", ".join(f"{size.steps} on {device}" for device, size in SIZES.items())


def _at_least(least: int) -> Callable[[str], int]:
    """Return a parser for arguments that must be integers of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {least} up")
        return int(text)

    return parse


def _settings(args: argparse.Namespace) -> Settings:
    """Fill in defaults.

    Raises:
        argparse.ArgumentTypeError: there are fewer GPUs than ranks, or the chart cannot be written.
    """
    gpus = torch.cuda.device_count()
    device = args.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and (args.ranks or 1) > gpus:
        raise argparse.ArgumentTypeError(
            f"{args.ranks or 1} rank(s) on cuda: PyTorch sees {gpus} GPU(s), and each rank takes "
            "one; --device cpu runs any number of ranks"
        )
    if args.plot:
        try:
            check_plot(args.plot)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return Settings(
        device=device,
        num_ranks=args.ranks or (gpus if device == "cuda" else 2),
        num_steps=args.steps or SIZES[device].steps,
        compiler=args.compiler,
        plot=str(args.plot) if args.plot else None,
    )


def launch(args: argparse.Namespace) -> int:
    """Start the ranks with torchrun, wait for them, and return the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    settings, start = _settings(args), time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    print(f"starting {name_ranks(settings)} on {settings.device}", flush=True)
    options = ["--standalone", "--nproc-per-node", str(settings.num_ranks), "--module", __name__]
    try:
        torchrun.run(torchrun.parse_args([*options, json.dumps(vars(settings))]))
    except ChildFailedError as error:
        print(f"rank {error.get_first_failure()[0]} failed: see above", file=sys.stderr)
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return 0


# --- output -------------------------------------------------------------------------------------


class Progress:
    """Progress output of rank 0: one line rewritten on a terminal, occasional lines elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_first = dist.get_rank() == 0
        self._is_terminal = sys.stdout.isatty()

    def print(self, text: str) -> None:
        """Print ``text`` on rank 0."""
        if self._is_first:
            print(text, flush=True)

    def print_step(self, training: Training) -> None:
        """Print the latest step, its loss, and the recent speed of ``training``."""
        step, steps = len(training.losses), self._settings.num_steps
        rate = tokens_per_second(self._settings, training.seconds[1:][-NUM_FINAL_STEPS:])
        text = f"step {step}/{steps}  loss {training.losses[-1]:.4f}  {rate} tokens/s"
        if not self._is_terminal:
            if step % max(1, steps // 10) == 0:
                self.print(text)
        elif self._is_first:
            print(f"\r\x1b[K{text}", end="\n" if step == steps else "", flush=True)


# --- the program of a rank ----------------------------------------------------------------------


def _join_group(settings: Settings) -> torch.device:
    """Join the process group and return the device of this rank."""
    if settings.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _train(
    trainings: list[Training], settings: Settings, data: Iterator[torch.Tensor], progress: Progress
) -> None:
    """Run all trainings step by step, on the same batches of ``data``."""
    for step in range(settings.num_steps):
        batch = next(data)
        for training in trainings:
            losses, seconds = gather(_timed_step(training, batch), batch.device).unbind(dim=1)
            training.losses.append(losses.mean().item())
            training.seconds.append(seconds.max().item())
            if training is trainings[0] and step == 0:
                first_s = training.seconds[0]
                progress.print(f"compiled, and ran the first step, in {first_s:.0f} s")
        progress.print_step(trainings[0])


class _Step(NamedTuple):
    """One step on one rank."""

    loss: float
    seconds: float


def _timed_step(training: Training, batch: torch.Tensor) -> _Step:
    """Train one step, started on all ranks at the same time."""
    dist.barrier()
    _synchronize(batch.device)
    start = time.perf_counter()
    loss = training.step(batch)
    _synchronize(batch.device)
    return _Step(loss.item(), time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_rank(settings: Settings) -> None:
    """Train and compare; runs on every rank, prints on rank 0."""
    device = _join_group(settings)
    mesh = init_device_mesh(device.type, (settings.num_ranks,))
    sharding = backend(mesh, compiler=settings.compiler)
    models = [new_model(settings.size, device) for _ in range(3)]
    text, progress = load_text(), Progress(settings)
    progress.print(headline(settings, models[0], text))
    progress.print(f"compiling with {settings.compiler}: can take a minute where nothing is cached")
    trainings = [
        with_graphshard(models[0], sharding),
        with_ddp(models[1], device),
        with_fsdp2(models[2], mesh),
    ]
    stream = batches(text, settings.size, SEED + 1 + dist.get_rank())
    _train(trainings, settings, (batch.to(device) for batch in stream), progress)
    held = [largest(training.held_memory()) for training in trainings]
    report = memory_report(trainings[0].model, trainings[0].optimizer)
    paragraphs = [
        comparison(trainings, held, settings),
        explain_speed(trainings, settings),
        collectives(sharding),
        f"graphshard, on this rank\n{report}",
        explain_words(),
        next_steps(settings),
    ]
    for paragraph in paragraphs:
        progress.print("\n" + paragraph)
    if settings.plot and dist.get_rank() == 0:
        plot(Path(settings.plot), trainings, held, settings)
        progress.print(f"\nwrote {settings.plot}")
    dist.destroy_process_group()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun forwards Ctrl-C: end without traceback
    run_rank(Settings(**json.loads(sys.argv[1])))
