"""The output of the demo: the machine, a table of its trainings, the collectives."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tabulate import tabulate

from ..backend import Backend
from ..kinds import TransferKind
from .demo_model import GPT
from .demo_training import HeldMemory, Settings, Training, gather

NUM_FINAL_STEPS = 10
"""The final loss is the mean of so many steps."""


def tokens_per_second(settings: Settings, seconds: Sequence[float]) -> str:
    """Return the median over steps, of all ranks together; a dash where there is no step."""
    if not seconds:
        return "–"
    return f"{settings.num_ranks * settings.size.tokens / statistics.median(seconds):,.0f}"


NOTE = """
Inductor's kernels round differently than the eager ones; with --compiler aot_eager the eager
kernels run between the same kinds of collectives.
"""


def name_ranks(settings: Settings) -> str:
    return f"{settings.num_ranks} rank{'s' if settings.num_ranks > 1 else ''}"


def headline(settings: Settings, model: GPT, text: torch.Tensor) -> str:
    """Describe the machine, the model and the batches."""
    ranks = name_ranks(settings)
    if settings.device == "cuda":
        machine = f"{ranks} over NCCL on {torch.cuda.get_device_name()}"
    else:
        machine = f"{ranks} over gloo on CPU, {torch.get_num_threads()} thread(s) each"
    size = settings.size
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    alone = "" if settings.num_ranks > 1 else "; with one rank nothing is split"
    return (
        f"{machine}; torch {torch.__version__}{alone}\n"
        f"a GPT of {millions:.1f} M parameters, float32, learns {len(text) / 1e6:.1f} MB of "
        f"Python's standard library; {size.batch} × {size.context} bytes per rank and step"
    )


def comparison(trainings: Sequence[Training], settings: Settings) -> str:
    """Return the table: a row for each measurement, a column for each training."""
    first, last = settings.num_untimed, min(NUM_FINAL_STEPS, settings.num_steps)
    rows = [
        ["loss, first step", *(f"{t.losses[0]:.6f}" for t in trainings)],
        [
            f"loss, mean of last {last} of {settings.num_steps} steps",
            *(f"{statistics.mean(t.losses[-last:]):.6f}" for t in trainings),
        ],
    ]
    for other in trainings[1:]:
        cells = ["–" if t is other else f"{t.largest_difference(other):.1e}" for t in trainings]
        rows.append([f"largest loss difference from {other.name.split(',')[0]}", *cells])
    rows.append(
        ["first step, s (graphshard compiles)", *(f"{t.seconds[0]:.1f}" for t in trainings)]
    )
    rates = [tokens_per_second(settings, t.seconds[first:]) for t in trainings]
    rows.append([f"tokens/s, median of steps {first + 1} to {settings.num_steps}", *rates])
    held = [_largest(t.held_memory()) for t in trainings]
    for name, by_training in zip(("parameters", "gradients", "AdamW state"), zip(*held)):
        cells = [f"{num_bytes / 1e6:.3f}" for num_bytes in by_training]
        rows.append([f"{name}, MB per rank", *cells])
    headers = ["", *(t.name for t in trainings)]
    align = ("left", *("right" for _ in trainings))
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _largest(held: HeldMemory) -> HeldMemory:
    """Return for each kind of tensor the bytes of the rank that holds most."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    return HeldMemory(*gather(held, device).max(dim=0).values.tolist())


def collectives(sharding: Backend) -> str:
    """Return the table of what graphshard's graphs send in every step."""
    rows = []
    for plan in sharding.plans:
        for kind in (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE):
            if plan.count(kind):
                rows.append([plan.graph, kind, plan.count(kind), plan.num_bytes(kind) / 1e6])
    headers = ["graphshard, every step", "collective", "count", "MB, full size"]
    return tabulate(rows, headers, floatfmt=".3f")
