"""The demo's output: the machine, a table of its trainings, the collectives, and explanations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tabulate import tabulate

from ..dynamo_backend import Backend
from ..kinds import TransferKind
from .demo_model import GPT
from .demo_training import HeldMemory, Settings, Training, gather

NUM_FINAL_STEPS = 10
"""Number of last steps over which the final loss is averaged."""


def rate(settings: Settings, seconds: Sequence[float]) -> float:
    """Return the throughput of all ranks in tokens/s, as the median over steps."""
    return settings.num_ranks * settings.size.tokens / statistics.median(seconds)


def tokens_per_second(settings: Settings, seconds: Sequence[float]) -> str:
    """Return :func:`rate` as text, or a dash if there are no steps."""
    return f"{rate(settings, seconds):,.0f}" if seconds else "–"


def name_ranks(settings: Settings) -> str:
    return f"{settings.num_ranks} rank{'s' if settings.num_ranks > 1 else ''}"


def headline(settings: Settings, model: GPT, text: torch.Tensor) -> str:
    """Describe the machine, the model and the data."""
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


def comparison(
    trainings: Sequence[Training], held: Sequence[HeldMemory], settings: Settings
) -> str:
    """Return a table with a row for each measurement and a column for each training.

    Args:
        held: memory of each training.
    """
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
    for name, by_training in zip(("parameters", "gradients", "AdamW state"), zip(*held)):
        cells = [f"{num_bytes / 1e6:.3f}" for num_bytes in by_training]
        rows.append([f"{name}, MB per rank", *cells])
    headers = ["", *(t.name for t in trainings)]
    align = ("left", *("right" for _ in trainings))
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def largest(held: HeldMemory) -> HeldMemory:
    """Return, for each kind of tensor, the bytes on the rank that holds the most."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    return HeldMemory(*gather(held, device).max(dim=0).values.tolist())


def collectives(sharding: Backend) -> str:
    """Return a table of the collectives in each step of graphshard's graphs."""
    rows = []
    for plan in sharding.plans:
        for kind in (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE):
            if plan.count(kind):
                rows.append([plan.graph, kind, plan.count(kind), plan.num_bytes(kind) / 1e6])
    headers = ["graphshard, every step", "collective", "count", "MB, full size"]
    return tabulate(rows, headers, floatfmt=".3f")


_ON_CPU = """\
On a CPU nothing hides: the cores that compute also carry gloo's messages, so every byte costs time.
Sharded training (graphshard, FSDP2) has to send up to half as much again as DDP: it gathers
parameters in forward, and again in backward, and reduces gradients; DDP reduces gradients alone.
That is the price of the smaller numbers in the last rows. GPUs send while they compute."""
_ON_GPU = """\
Sharded training (graphshard, FSDP2) has to send up to half as much again as DDP: it gathers
parameters in forward, and again in backward, and reduces gradients; DDP reduces gradients alone.
That is the price of the smaller numbers in the last rows. So small a model leaves little compute to
hide it behind."""
_COMPILED = """\
Inductor makes one kernel of several operations, which saves time in every step. Its kernels round
differently than the eager ones: hence the loss differences. It compiles in the first step, once."""
_OP_BY_OP = """\
With aot_eager the eager kernels run, between the same kinds of collectives: nothing is fused."""


def explain_speed(trainings: Sequence[Training], settings: Settings) -> str:
    """Compare graphshard's speed in this run with the others', and explain the differences."""
    ours, *rates = (rate(settings, t.seconds[settings.num_untimed :]) for t in trainings)
    others = [f"{ours / r:.2f} times those of {t.name}" for r, t in zip(rates, trainings[1:])]
    lines = [f"Why? graphshard's tokens/s are {', and '.join(others)}."]
    if settings.num_ranks > 1:
        lines.append(_ON_CPU if settings.device == "cpu" else _ON_GPU)
    lines.append(_COMPILED if settings.compiler == "inductor" else _OP_BY_OP)
    return "\n".join(lines)


_WORDS = (
    ("eager", "run by Python, one operation after the other; not compiled"),
    ("tokens/s", "bytes of text that all ranks together train on in a second"),
    ("MB per rank", "of the rank that holds most, from step to step, in million bytes"),
    ("AdamW state", "the optimizer's two averages for each parameter"),
    (
        "all_gather",
        "ranks send each other their shares of parameters; each has them whole for a while",
    ),
    ("reduce_scatter", "gradients are averaged over the ranks, and each rank keeps its share"),
    ("unsharded", "what a rank would hold if nothing were split"),
    ("sums", "gradients of microbatches that wait to be reduced: graphshard.no_sync"),
    ("gathered", "the most of whole parameters that are there at once"),
)


def explain_words() -> str:
    """Return a glossary of the terms in the tables."""
    return "Words\n" + tabulate(_WORDS, tablefmt="plain")


def next_steps(settings: Settings) -> str:
    """Return suggestions for what to try next, each with its command."""
    command = "python -m graphshard demo"
    rows = [
        ("train a model of yours", 'the script in README.md, "Use"'),
        ("see curves and bars", f"{command} --plot demo.svg"),
        ("compare losses without the rounding", f"{command} --compiler aot_eager"),
        ("check a step for a GPU that is not there", "python -m graphshard check --help"),
    ]
    if settings.device == "cpu":
        rows.append(("see shares get smaller", f"{command} --ranks {2 * settings.num_ranks}"))
    return "Next\n" + tabulate(rows, tablefmt="plain")
