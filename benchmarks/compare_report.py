"""The records of ``benchmarks.compare``, and its report as a table, a chart and a file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks import common
from benchmarks.common import DDP, GRAPHSHARD, GRAPHSHARD_FP8
from benchmarks.gpt import GPT
from benchmarks.links import Wire
from benchmarks.models import parameter_bytes
from benchmarks.ways import mixed_dtypes

VOCAB, HEAD_DIM = 256, 64


@dataclass(frozen=True)
class Job:
    """What every rank has to do.

    Attributes:
        rows: sequences in a batch of one rank.
        wire: the modelled wire; None: the links that there are.
        told: the wire that schedules are planned for, if it is another one.
        hardware: the planner's option.
        mixed: in bfloat16 and fp8, as ``benchmarks.ways.sharded`` does it.
    """

    dim: int
    layers: int
    context: int
    rows: int
    steps: int
    warm_up: int
    wire: Wire | None
    told: Wire | None
    hardware: str
    mixed: bool

    def model(self) -> GPT:
        """Make the model on the CPU, with the same parameters in every call."""
        return GPT.seeded(
            torch.device("cpu"),
            dim=self.dim,
            layers=self.layers,
            head_dim=HEAD_DIM,
            vocab=VOCAB,
            context=self.context,
        )


class Prediction(NamedTuple):
    """The planner's forecast of a step without the optimizer."""

    total_us: float
    exposed_us: float


@dataclass(frozen=True)
class Result:
    """Measurements of one way to train on one rank; None where this machine cannot tell.

    Attributes:
        steps_s: seconds of each step, with the optimizer's.
        alone_s: the same without the modelled wire.
        first_s: seconds of the first step, which compiles.
        peak_bytes: memory of a GPU that one step adds to what was there before.
    """

    steps_s: list[float]
    alone_s: list[float]
    first_s: float
    predicted: Prediction | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Sent:
    """One step of a rank that trains in one way alone, on a CPU.

    Attributes:
        peak_bytes: the most resident memory.
        num_collectives: collectives of the step; ``num_bytes`` of their full buffers.
        max_in_flight: most collectives at once.
    """

    peak_bytes: int
    num_collectives: int
    num_bytes: int
    max_in_flight: int


@dataclass(frozen=True)
class Report:
    """All that was measured, by way to train.

    Attributes:
        results: of rank 0.
        sent: of the rank that needs most memory; empty where it was not measured.
        setting: the ranks and their links, in words.
    """

    results: dict[str, Result]
    sent: dict[str, Sent]
    setting: str


def paragraphs(job: Job, report: Report) -> list[str]:
    """Return the report as paragraphs of Markdown."""
    results = report.results
    halves = {name: median(result.steps_s) for name, result in results.items()}
    peers = {name: half for name, half in halves.items() if GRAPHSHARD not in name}
    forms = {name: half for name, half in peers.items() if name != DDP}
    best, form = min(peers, key=peers.__getitem__), min(forms, key=forms.__getitem__)
    predicted = results[GRAPHSHARD].predicted
    rows = [
        _row(job, name, halves[best], result, report.sent.get(name))
        for name, result in results.items()
    ]
    size = parameter_bytes(job.model()) / 4e6
    dtypes = mixed_dtypes(DDP) if job.mixed else "float32"
    work = (
        f"GPT of {job.layers} layers, d={job.dim}, {size:.1f} M parameters; {job.rows} × "
        f"{job.context} tokens on each rank, {dtypes}, SGD; {job.steps} steps; {report.setting}. "
        "Ratio: of medians, to the best other way. Exposed: time that the modelled wire adds to a "
        "step. First step: it compiles. Peak: resident, of a rank that does nothing else, or on a "
        "GPU what a step adds."
    )
    parts = [common.table(HEADERS, rows), work]
    if predicted is not None:
        total, exposed = (f"{us / 1e3:.1f} ms" for us in predicted)
        parts.append(f"predicted: forward and backward {total}, of which exposed {exposed}")
    ratios = [
        f"{name} {halves[name] / halves[best]:.2f} × {best}, "
        f"{halves[name] / halves[form]:.2f} × {form}"
        for name in (GRAPHSHARD, GRAPHSHARD_FP8)
        if name in halves
    ]
    return [*parts, f"step: {'; '.join(ratios)}"]


HEADERS = (
    *("training step", "tokens/s", "median ms", "quartiles", "ratio", "exposed ms", "peak MB"),
    *("collectives", "in flight", "MB sent", "first step s"),
)


def _row(job: Job, name: str, best_s: float, result: Result, sent: Sent | None) -> list[str]:
    """Return the cells of one way to train.

    Args:
        best_s: median step of the best other way.
    """
    half = median(result.steps_s)
    low, _, high = statistics.quantiles(result.steps_s, n=4)
    peak = sent.peak_bytes if sent else result.peak_bytes
    pairs = zip(result.steps_s, result.alone_s)
    added = None if job.wire is None else median([on - off for on, off in pairs]) * 1e3
    return [
        name,
        f"{job.rows * job.context / half:,.0f}",
        f"{half * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{half / best_s:.2f}",
        _or_dash(added),
        _or_dash(None if peak is None else peak / 1e6, 0),
        _or_dash(sent and sent.num_collectives, 0),
        _or_dash(sent and sent.max_in_flight, 0),
        _or_dash(sent and sent.num_bytes / 1e6),
        _or_dash(result.first_s),
    ]


def _or_dash(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def publish(job: Job, report: Report, out: Path) -> None:
    """Print the report, and write it with a chart to ``out``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = [common.heading("benchmarks.compare", device), *paragraphs(job, report)]
    out.parent.mkdir(parents=True, exist_ok=True)
    steps_s = {name: result.steps_s for name, result in report.results.items()}
    parts.insert(2, common.chart(steps_s, out.with_suffix(".svg")))
    common.show(*parts)
    common.write_report(out, parts)
