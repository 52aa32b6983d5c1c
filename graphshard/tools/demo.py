"""``python -m graphshard demo``: one small GPT trained three ways, side by side, and compared.

    python -m graphshard demo ──► torchrun ──► python -m graphshard.tools.demo, once per rank
                                               step k: graphshard, DDP, FSDP2, in turn

All three start from the same parameters and see the same batches; each step of each is timed
between barriers. Whatever the table at the end says was measured in that run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from ..backend import Backend, backend
from ..kinds import TransferKind
from ..options.options import COMPILERS
from ..params.memory_report import memory_report
from .demo_model import GPT, SIZES, Size, batches, load_text

SEED = 0
LEARNING_RATE = 1e-3
RAMP = 20  # steps in which the learning rate rises to that; without, the loss is unsteady at first
LAST = 10  # the final loss is the mean of so many steps
UNTIMED = 10  # first steps that no median counts


@dataclass(frozen=True)
class Settings:
    """What a rank has to know: the arguments, checked and with defaults filled in."""

    device: str
    ranks: int
    steps: int
    compiler: str

    @property
    def size(self) -> Size:
        return SIZES[self.device]

    @property
    def untimed(self) -> int:
        return min(UNTIMED, self.steps // 2)


# --- the launcher -------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add the command ``demo`` to those of ``python -m graphshard``."""
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
    parser.set_defaults(run=launch, parser=parser)


def _default_steps() -> str:
    return ", ".join(f"{size.steps} on {device}" for device, size in SIZES.items())


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {least} up")
        return int(text)

    return parse


def _settings(args: argparse.Namespace) -> Settings:
    gpus = torch.cuda.device_count()
    device = args.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and (args.ranks or 1) > gpus:
        raise argparse.ArgumentTypeError(
            f"{args.ranks or 1} rank(s) on cuda: PyTorch sees {gpus} GPU(s), and each rank takes one; "
            "--device cpu runs any number of ranks"
        )
    ranks = args.ranks or (gpus if device == "cuda" else 2)
    return Settings(device, ranks, args.steps or SIZES[device].steps, args.compiler)


def launch(args: argparse.Namespace) -> int:
    """Start the ranks by torchrun and wait for them; the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    settings, start = _settings(args), time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    print(f"starting {_ranks(settings)} on {settings.device}", flush=True)
    where = ["--standalone", "--nproc-per-node", str(settings.ranks), "--module", __name__]
    try:
        torchrun.run(torchrun.parse_args([*where, json.dumps(vars(settings))]))
    except ChildFailedError as error:
        print(f"rank {error.get_first_failure()[0]} failed: see above", file=sys.stderr)
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return 0


# --- one rank -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Training:
    """One of the trainings that run side by side, and what was measured of it.

    Attributes:
        losses: by step, the mean over the ranks.
        seconds: by step, of the slowest rank.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loop that a user writes; gradients stay for :meth:`held_bytes`."""
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def held_bytes(self) -> list[int]:
        """What this rank holds of parameters, gradients and optimizer state."""
        params = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        grads = [param.grad for param in params]
        return [_storage_bytes(tensors) for tensors in (params, grads, states)]

    def largest_difference(self, other: Training) -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def _storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the memory behind ``tensors``, each block of it once; of a DTensor, its shard's."""
    blocks: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, torch.Tensor):
            storage = local.detach().untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
    return sum(blocks.values())


def _new_model(settings: Settings, device: torch.device) -> GPT:
    torch.manual_seed(SEED)
    return GPT(settings.size).to(device)


def _training(name: str, model: Any) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return Training(name, model, optimizer, LinearLR(optimizer, 1 / RAMP, total_iters=RAMP))


def _ours(model: nn.Module, sharding: Backend) -> Training:
    model = torch.compile(model, backend=sharding)  # type: ignore[assignment]
    return _training("graphshard", model)


def _ddp(model: nn.Module, device: torch.device) -> Training:
    ids = None if device.index is None else [device.index]
    return _training("DDP, eager", DistributedDataParallel(model, device_ids=ids))


def _fsdp2(model: GPT, mesh: DeviceMesh) -> Training:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _training("FSDP2, eager", model)


def _gather(values: list[float], device: torch.device) -> torch.Tensor:
    """The values of every rank, by rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).cpu()


def _timed_step(training: Training, batch: torch.Tensor) -> tuple[float, float]:
    """This rank's loss and seconds for one step that all ranks start together."""
    dist.barrier()
    _synchronize(batch.device)
    start = time.perf_counter()
    loss = training.step(batch)
    _synchronize(batch.device)
    return loss.item(), time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _train(
    trainings: list[Training], settings: Settings, data: Iterator[torch.Tensor], show: Progress
) -> None:
    for step in range(settings.steps):
        batch = next(data)
        for training in trainings:
            every = _gather(list(_timed_step(training, batch)), batch.device)
            training.losses.append(every[:, 0].mean().item())
            training.seconds.append(every[:, 1].max().item())
            if training is trainings[0] and step == 0:
                show.line(f"compiled, and ran the first step, in {training.seconds[0]:.0f} s")
        show.step(trainings[0])


class Progress:
    """What rank 0 prints while it trains: one line, rewritten, or a line now and then in a log."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._speaks = dist.get_rank() == 0
        self._tty = sys.stdout.isatty()

    def line(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)

    def step(self, training: Training) -> None:
        """Tell the step, its loss, and the speed of ``training`` in the last few steps."""
        done, steps = len(training.losses), self._settings.steps
        rate = _tokens_per_second(self._settings, training.seconds[1:][-LAST:])
        text = f"step {done}/{steps}  loss {training.losses[-1]:.4f}  {rate} tokens/s"
        if not self._tty:
            if done % max(1, steps // 10) == 0:
                self.line(text)
        elif self._speaks:
            print(f"\r\x1b[K{text}", end="\n" if done == steps else "", flush=True)


def _tokens_per_second(settings: Settings, seconds: list[float]) -> str:
    if not seconds:
        return "–"
    return f"{settings.ranks * settings.size.tokens / statistics.median(seconds):,.0f}"


# --- what is printed ----------------------------------------------------------------------------

_NOTE = """
Inductor's kernels round differently than the eager ones; with --compiler aot_eager the eager
kernels run between the same kinds of collectives.
"""


def _ranks(settings: Settings) -> str:
    return f"{settings.ranks} rank{'s' if settings.ranks > 1 else ''}"


def _headline(settings: Settings, model: GPT, text: torch.Tensor) -> str:
    ranks = _ranks(settings)
    if settings.device == "cuda":
        where = f"{ranks} over NCCL on {torch.cuda.get_device_name()}"
    else:
        where = f"{ranks} over gloo on CPU, {torch.get_num_threads()} thread(s) each"
    size = settings.size
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    alone = "" if settings.ranks > 1 else "; with one rank nothing is split"
    return (
        f"{where}; torch {torch.__version__}{alone}\n"
        f"a GPT of {millions:.1f} M parameters, float32, learns {len(text) / 1e6:.1f} MB of "
        f"Python's standard library; {size.batch} × {size.context} bytes per rank and step"
    )


def _comparison(trainings: list[Training], settings: Settings) -> str:
    """The table; by row what was measured, by column the training."""
    skip, last = settings.untimed, min(LAST, settings.steps)
    rows: list[list[str]] = [
        ["loss, first step", *(f"{t.losses[0]:.6f}" for t in trainings)],
        [
            f"loss, mean of last {last} of {settings.steps} steps",
            *(f"{statistics.mean(t.losses[-last:]):.6f}" for t in trainings),
        ],
    ]
    for other in trainings[1:]:
        apart = ["–" if t is other else f"{t.largest_difference(other):.1e}" for t in trainings]
        rows.append([f"largest loss difference from {other.name.split(',')[0]}", *apart])
    rows.append(
        ["first step, s (graphshard compiles)", *(f"{t.seconds[0]:.1f}" for t in trainings)]
    )
    rates = [_tokens_per_second(settings, t.seconds[skip:]) for t in trainings]
    rows.append([f"tokens/s, median of steps {skip + 1} to {settings.steps}", *rates])
    held = [_largest(t.held_bytes()) for t in trainings]
    for i, what in enumerate(("parameters", "gradients", "AdamW state")):
        rows.append([f"{what}, MB per rank", *(f"{numbers[i] / 1e6:.3f}" for numbers in held)])
    headers = ["", *(t.name for t in trainings)]
    align = ("left", *("right" for _ in trainings))
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _largest(held: list[int]) -> list[float]:
    """By kind of tensor, the bytes of the rank that holds most."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    every = _gather([float(number) for number in held], device)
    return [float(number) for number in every.max(dim=0).values]


def _collectives(sharding: Backend) -> str:
    rows = []
    for plan in sharding.plans:
        for kind in (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE):
            if plan.count(kind):
                rows.append([plan.graph, kind, plan.count(kind), plan.num_bytes(kind) / 1e6])
    headers = ["graphshard, every step", "collective", "count", "MB, full size"]
    return tabulate(rows, headers, floatfmt=".3f")


# --- the program of a rank ----------------------------------------------------------------------


def _start(settings: Settings) -> torch.device:
    """Join the process group; the device that is this rank's."""
    if settings.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def run_rank(settings: Settings) -> None:
    """Train and compare; every rank runs this, and rank 0 prints."""
    device = _start(settings)
    mesh = init_device_mesh(device.type, (settings.ranks,))
    sharding = backend(mesh, compiler=settings.compiler)
    models = [_new_model(settings, device) for _ in range(3)]
    text, show = load_text(), Progress(settings)
    show.line(_headline(settings, models[0], text))
    show.line(f"compiling with {settings.compiler}: can take a minute where nothing is cached")
    trainings = [_ours(models[0], sharding), _ddp(models[1], device), _fsdp2(models[2], mesh)]
    stream = batches(text, settings.size, SEED + 1 + dist.get_rank())
    _train(trainings, settings, (batch.to(device) for batch in stream), show)
    show.line("\n" + _comparison(trainings, settings))
    show.line(_NOTE if settings.compiler == "inductor" else "")
    show.line(_collectives(sharding))
    report = memory_report(trainings[0].model, trainings[0].optimizer)
    show.line(f"\ngraphshard, on this rank\n{report}")
    dist.destroy_process_group()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun passes Ctrl-C on; it is not an error
    run_rank(Settings(**json.loads(sys.argv[1])))
