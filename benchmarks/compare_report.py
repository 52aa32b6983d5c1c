"""Records of ``benchmarks.compare``, and its report: a table, a chart and a file."""

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
from benchmarks.variants import mixed_dtypes

VOCAB, HEAD_DIM = 256, 64


@dataclass(frozen=True)
class Job:
    """Settings of a run, equal on all ranks.

    Attributes:
        rows: number of sequences in a rank's batch.
        wire: modelled wire; None: the links of this machine.
        planned_wire: wire that schedules are planned for; None: the same as ``wire``.
        hardware: ``hardware`` of ``SchedulePolicy``.
        mixed: whether to train in bfloat16 and fp8, as in ``benchmarks.variants.sharded``.
    """

    dim: int
    layers: int
    context: int
    rows: int
    steps: int
    warm_up: int
    wire: Wire | None
    planned_wire: Wire | None
    hardware: str
    mixed: bool

    def model(self) -> GPT:
        """Return the model on the CPU, with the same parameters on every call."""
        return GPT.seeded(
            torch.device("cpu"),
            dim=self.dim,
            layers=self.layers,
            head_dim=HEAD_DIM,
            vocab=VOCAB,
            context=self.context,
        )


class Prediction(NamedTuple):
    """The planner's prediction for a step, without the optimizer."""

    total_us: float
    exposed_us: float


@dataclass(frozen=True)
class Result:
    """Measurements of one training variant on one rank.

    Attributes:
        steps_s: seconds of each step, optimizer included.
        alone_s: seconds of each step without the modelled wire.
        first_s: seconds of the first step, which compiles.
        predicted: prediction for the step; None for other variants than graphshard.
        peak_bytes: peak GPU memory of a step, minus what was allocated before; None on a CPU.
    """

    steps_s: list[float]
    alone_s: list[float]
    first_s: float
    predicted: Prediction | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Sent:
    """Memory and communication of one step, on a CPU rank that trains only one variant.

    Attributes:
        peak_bytes: peak resident memory.
        num_collectives: number of collectives.
        num_bytes: size of the collectives' full buffers.
        max_in_flight: largest number of collectives in flight at once.
    """

    peak_bytes: int
    num_collectives: int
    num_bytes: int
    max_in_flight: int


@dataclass(frozen=True)
class Report:
    """All measurements, by training variant.

    Attributes:
        results: measurements of rank 0.
        sent: measurements of the rank with the highest peak memory; empty if not measured.
        setting: description of the ranks and their links.
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
        "Ratio: of medians, to the best peer. Exposed: time that the modelled wire adds to a "
        "step. First step: it compiles. Peak: resident, of a rank that does nothing else, or on a "
        "GPU what a step adds."
    )
    parts = [common.table(HEADERS, rows), work]
    if predicted is not None:
        total, exposed = (f"{us / 1e3:.1f} ms" for us in predicted)
        parts.append(f"predicted: forward and backward {total}, including {exposed} exposed")
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
    """Return the table row of one variant.

    Args:
        best_s: median step time of the fastest variant other than graphshard's.
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
    """Print the report, and write it to ``out`` with a chart next to it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = [common.heading("benchmarks.compare", device), *paragraphs(job, report)]
    out.parent.mkdir(parents=True, exist_ok=True)
    steps_s = {name: result.steps_s for name, result in report.results.items()}
    parts.insert(2, common.chart(steps_s, out.with_suffix(".svg")))
    common.show(*parts)
    common.write_report(out, parts)
